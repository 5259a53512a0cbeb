"""Benchmarks behind `assay bench`, and their result files.

The judge of step benchmarks is defined here: its worker processes import this package without torch, and start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from assay.types import Progress, Status, Verdict


class RunProgress:
    """Progress of the runs of a benchmark: adds "warm-up" or "run 1 of 3" to the names of operations."""

    def __init__(self, show: Progress | None, runs: int, noun: str = "run") -> None:
        self.show, self.runs, self.noun = show, runs, noun
        self.run = 0  # 0 is the warm-up

    def __call__(self, what: str, done: int, total: int, unit: str = "", tokens: int = 0, most_tokens: int = 0) -> None:
        if self.show is not None:
            label = f"{self.noun} {self.run} of {self.runs}" if self.run else "warm-up"
            self.show(f"{label}: {what}", done, total, unit, tokens, most_tokens)


def hash_reward(completion: str) -> float:
    """From 0 to 1, by the text alone. The answers of a group all differ, so every one has an advantage."""
    return crc32(completion.encode()) / 2**32


def judge_by_hash(completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
    reward = hash_reward(completion)
    return Verdict(reward, Status.OK if reward >= 0.5 else Status.WRONG)
