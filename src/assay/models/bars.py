"""Counts of the progress bars of transformers and of the hub's client, which are not drawn themselves.

Both report progress through tqdm only, so a class in place of tqdm passes the counts on, and `Console` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from tqdm import tqdm

from assay.models.base import LoadReport

BYTES = "B"  # unit of bars that count bytes


def reporting_bar(report: LoadReport | None, unit: str, only: str | None = None) -> type[tqdm]:
    """A class like tqdm that draws nothing and passes its counts to `report`, as counts of `unit`.

    `only`: bars with another tqdm unit report nothing, and if several count the same, the largest count is reported.
    """
    lock, most = Lock(), 0  # bars are updated by several threads

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            self.reports = report is not None and only in (None, options.get("unit"))

        def __iter__(self) -> Iterator[Any]:
            for item in self.iterable:
                yield item
                self.update()

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            with lock:
                self.n += n or 0
                if self.reports and report is not None and self.total and self.n > most:
                    most = 0 if only is None else int(self.n)
                    report(int(self.n), int(self.total), unit)

    return ReportingBar


@contextmanager
def reported_bars(report: LoadReport | None) -> Iterator[None]:
    """Within the block, bars of transformers are not drawn, and `report` receives how many weights are loaded."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    bar, shown = reporting_bar(report, "tensors"), logging.is_progress_bar_enabled()
    hook, gguf_bar = logging.set_tqdm_hook(lambda _, args, options: bar(*args, **options)), gguf.tqdm
    gguf.tqdm = bar  # does not ask the hook
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        gguf.tqdm = gguf_bar
        if shown:
            logging.enable_progress_bar()
