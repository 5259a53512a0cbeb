"""Benchmarks behind `assay bench`, and their result files.

The judge of step benchmarks is defined here: its worker processes import this package without torch, and start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from assay.types import Status, Verdict


def hash_reward(completion: str) -> float:
    """From 0 to 1, by the text alone. The answers of a group all differ, so every one has an advantage."""
    return crc32(completion.encode()) / 2**32


def judge_by_hash(completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
    reward = hash_reward(completion)
    return Verdict(reward, Status.OK if reward >= 0.5 else Status.WRONG)
