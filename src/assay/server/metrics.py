"""Counters of the server, in Prometheus' text format.

All counters of a process are in one array of numbers with a fixed layout. Several processes use parts of one shared
array, and any of them can report the sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, MutableSequence
from itertools import accumulate

from assay.engine.base import EngineLoad

ENDPOINTS = ("completions", "chat", "classify", "models", "engine", "other")
CLOSED = 499  # the client has disconnected
STATUSES = (200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 429, CLOSED, 500, 503)
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
REQUESTS = len(ENDPOINTS) * len(STATUSES)
HISTOGRAM = len(BUCKETS) + 2  # one count per bucket, one for longer times, and the sum
PROMPT_TOKENS, SAMPLED_TOKENS, ACTIVE = REQUESTS, REQUESTS + 1, REQUESTS + 2
FIRST_TOKEN = ACTIVE + 1
LATENCY = FIRST_TOKEN + HISTOGRAM
SIZE = LATENCY + HISTOGRAM


class Metrics:
    """The counters of one process, and the sums over all processes."""

    def __init__(self, values: MutableSequence[float] | None = None, part: int = 0) -> None:
        """`values`: the shared array, a multiple of `SIZE` numbers. `part`: the index of this process."""
        self._values: MutableSequence[float] = [0.0] * SIZE if values is None else values
        self._start = part * SIZE

    def add(self, index: int, amount: float = 1.0) -> None:
        self._values[self._start + index] += amount

    def count_request(self, endpoint: str, status: int) -> None:
        known = status if status in STATUSES else 500 if status >= 500 else 400 if status >= 400 else 200
        self.add(ENDPOINTS.index(endpoint) * len(STATUSES) + STATUSES.index(known))

    def observe(self, histogram: int, seconds: float) -> None:
        self.add(histogram + bisect_left(BUCKETS, seconds))
        self.add(histogram + HISTOGRAM - 1, seconds)

    def total(self, index: int) -> float:
        return sum(self._values[index::SIZE])

    @property
    def active(self) -> int:
        """Samples of all processes that are requested and not finished."""
        return int(self.total(ACTIVE))

    def render(self, load: EngineLoad, version: int) -> str:
        lines: list[str] = []
        counts = {
            (endpoint, status): self.total(row * len(STATUSES) + column)
            for row, endpoint in enumerate(ENDPOINTS)
            for column, status in enumerate(STATUSES)
        }
        labelled = ((f'{{endpoint="{e}",status="{s}"}}', value) for (e, s), value in counts.items() if value)
        lines += series("assay_requests_total", "counter", "Responses by endpoint and status.", labelled)
        single = [
            ("prompt_tokens_total", "counter", "Prompt tokens of accepted requests.", self.total(PROMPT_TOKENS)),
            ("generated_tokens_total", "counter", "Sampled tokens of all answers.", self.total(SAMPLED_TOKENS)),
            ("preemptions_total", "counter", "Sequences that lost their KV blocks for a while.", load.preemptions),
            ("active_samples", "gauge", "Samples that are requested and not finished.", self.total(ACTIVE)),
            ("running_sequences", "gauge", "Sequences that are being decoded.", load.running),
            ("waiting_requests", "gauge", "Requests that wait for memory or a free row.", load.waiting),
            ("kv_blocks_used", "gauge", "Blocks of the KV cache that requests hold.", load.kv_blocks_used),
            ("kv_blocks", "gauge", "Blocks of the KV cache.", load.kv_blocks),
            ("weights_version", "gauge", "Version of the served weights.", version),
        ]
        for name, kind, text, value in single:
            lines += series(f"assay_{name}", kind, text, [("", value)])
        lines += self._histogram("assay_time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN)
        lines += self._histogram("assay_request_seconds", "Time to the end of the answer.", LATENCY)
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str, text: str, start: int) -> list[str]:
        *counts, total = [self.total(start + index) for index in range(HISTOGRAM)]
        bounds = [*map(str, BUCKETS), "+Inf"]
        below = list(accumulate(counts))
        rows = [(f'_bucket{{le="{bound}"}}', count) for bound, count in zip(bounds, below, strict=True)]
        return series(name, "histogram", text, [*rows, ("_sum", total), ("_count", below[-1])])


def series(name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> list[str]:
    rows = [f"{name}{suffix} {int(value) if value == int(value) else repr(float(value))}" for suffix, value in values]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *rows]
