"""Waiting for another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def comes_true(condition: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def until(condition: Callable[[], bool], within: float = 60.0) -> None:
    assert comes_true(condition, within), "this never came true"
