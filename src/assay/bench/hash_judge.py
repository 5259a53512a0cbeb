"""A judge whose reward is a hash of the text. It does not import torch, so that judge workers start quickly."""

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
