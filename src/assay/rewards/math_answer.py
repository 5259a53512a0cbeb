"""Judging a final answer against a gold one: GSM8K, MATH, and anything with one number or expression as its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.rewards.equality import compare
from assay.rewards.extract import check_extractor, extract
from assay.rewards.judge import graded
from assay.rewards.latex import cache_bytecode, verify_whole
from assay.rewards.limits import Unreadable, UnreadableGold, clip
from assay.types import Status, Verdict

MAX_AUDIT_CHARS = 50_000  # math-verify's own extraction searches the whole text, and slowly


@dataclass(frozen=True)
class MathJudge:
    """1.0 if the extracted answer equals the gold one, else 0.0.

    Not strict: the answer may stand in any of the known forms, and may be an expression where the gold one is a number.

    `parts` has `accuracy`, and `format`: whether an answer stood in the asked form, right or wrong.
    """

    extract: str = "boxed"
    strict: bool = True

    def __post_init__(self) -> None:
        check_extractor(self.extract)

    def prepare(self) -> None:
        cache_bytecode()

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        if not answer.strip():
            return Verdict(0.0, Status.ERROR, detail="the gold answer is empty")
        found = extract(completion, self.extract, self.strict)
        form = float(found.found and found.form == self.extract)
        if not found.found:
            return graded(found.status, found.text or None, form, found.detail)
        try:
            right, detail = compare(found.text, answer, self.strict)
        except Unreadable as error:
            return graded(Status.UNPARSABLE, clip(found.text), form, str(error))
        except UnreadableGold as error:
            return Verdict(0.0, Status.ERROR, clip(found.text), detail=f"the gold answer cannot be read: {error}")
        return graded(Status.OK if right else Status.WRONG, found.text, form, detail)


@dataclass(frozen=True)
class MathVerifyJudge:
    """math-verify alone, with its own way of finding the answer: a second opinion for audits."""

    def prepare(self) -> None:
        cache_bytecode()

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        if len(completion) > MAX_AUDIT_CHARS:
            return graded(Status.UNPARSABLE, None, 0.0, f"longer than {MAX_AUDIT_CHARS} characters")
        same, read = verify_whole(completion, answer)
        if same is None:
            return graded(Status.NO_ANSWER, None, 0.0, "math-verify found no answer")
        return graded(Status.OK if same else Status.WRONG, clip(read), 1.0)
