"""Mixing accuracy, format and length into one reward."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from assay.rewards.judge import Judge
from assay.types import Status, UserError, Verdict

_UNREAD = (Status.NO_ANSWER, Status.UNPARSABLE, Status.TIMEOUT)


@dataclass(frozen=True)
class RewardMix:
    """reward = accuracy x A + format x F + length x L, with the components A, F, L in `parts` before weighting.

    A: `correct` or `wrong` (in between for a judge that gives partial credit), `unparsable` if there was no readable
       answer or it took too long, 0 if the judge itself failed. (1, 0, -1) is the classic choice.
    F: 1 if the answer stands in the asked form, or if `format_pattern` is found in the completion; else 0.
    L: 1 up to `target_length` characters, then falling linearly to 0 at twice that.
    The status stays that of the judge.
    """

    judge: Judge
    accuracy: float = 1.0
    format: float = 0.0
    length: float = 0.0
    correct: float = 1.0
    wrong: float = 0.0
    unparsable: float = 0.0
    format_pattern: str | None = None
    target_length: int = 1000

    def __post_init__(self) -> None:
        for name in ("accuracy", "format", "length", "correct", "wrong", "unparsable"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"the reward's '{name}' must be a finite number, not {getattr(self, name)}")
        if self.target_length <= 0:
            raise UserError(f"the reward's 'target_length' must be at least 1, not {self.target_length}")
        if self.format_pattern is not None:
            _compiled(self.format_pattern)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return self.shape(self.judge(completion, answer, fields), completion)

    def prepare(self) -> None:
        prepare = getattr(self.judge, "prepare", None)
        if prepare is not None:
            prepare()

    def shape(self, verdict: Verdict, completion: str) -> Verdict:
        """The judge's verdict with the mixed reward in place of its own."""
        parts = dict(verdict.parts)
        failed = verdict.status in (Status.TIMEOUT, Status.ERROR)
        parts["accuracy"] = self._accuracy(verdict)
        parts["format"] = 0.0 if failed else self._format(verdict, completion)
        parts["length"] = 0.0 if failed else length_score(completion, self.target_length)
        reward = self.accuracy * parts["accuracy"] + self.format * parts["format"] + self.length * parts["length"]
        return Verdict(reward, verdict.status, verdict.parsed, parts, verdict.detail)

    def _accuracy(self, verdict: Verdict) -> float:
        if verdict.status in _UNREAD:
            return self.unparsable
        if verdict.status is Status.ERROR:
            return 0.0
        return self.wrong + (self.correct - self.wrong) * verdict.reward

    def _format(self, verdict: Verdict, completion: str) -> float:
        if self.format_pattern is not None:
            return float(_compiled(self.format_pattern).search(completion) is not None)
        return verdict.parts.get("format", float(verdict.status in (Status.OK, Status.WRONG)))


def length_score(completion: str, target_length: int) -> float:
    """1 up to the target, 0 from twice the target on, a straight line between."""
    return min(1.0, max(0.0, 2.0 - len(completion) / target_length))


@lru_cache(maxsize=32)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"the reward's 'format_pattern' is not a regular expression: {error}") from None
