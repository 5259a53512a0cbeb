"""A judge that any text satisfies more or less. It knows no tensors, so that its worker processes start fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from assay.types import Status, Verdict


def chance(completion: str) -> float:
    """From 0 to 1, by the text alone. Answers of a group all differ, so none has advantage 0 and all are trained on."""
    return crc32(completion.encode()) / 2**32


def judge_by_chance(completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
    reward = chance(completion)
    return Verdict(reward, Status.OK if reward >= 0.5 else Status.WRONG)
