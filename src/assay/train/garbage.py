"""Python's search for garbage, made rare while a run lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 50_000  # new objects between two searches; Python's own 700 would mean dozens in a step


@contextmanager
def seldom_collected() -> Iterator[None]:
    """The answers of a step are tens of thousands of objects, none of them in circles: they go without any search.

    Each search looks at all of these, every tenth at the last steps', and one in some hundred at everything there is.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(SELDOM, before[0]) if before[0] else 0, *before[1:])  # 0: somebody wants none at all
    try:
        yield
    finally:
        gc.set_threshold(*before)
