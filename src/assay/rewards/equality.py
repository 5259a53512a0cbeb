r"""Whether an extracted answer equals the gold answer.

Numbers are compared exactly and quickly (see `numeric`); everything else goes to math-verify (see `latex`).
"""

from __future__ import annotations

import re

from assay.rewards.latex import same_expression
from assay.rewards.limits import MAX_ANSWER_CHARS, Unreadable, UnreadableGold
from assay.rewards.numeric import Quantity, read_quantity, tidy

_WORDS = re.compile(r"[A-Za-z][A-Za-z .'-]*[A-Za-z]")
_BASED = re.compile(r"([0-9A-Za-z]+)(?:_\{?([0-9]+)\}?)?")
_IDLE_SPACE = re.compile(r" (?![0-9A-Za-z])|(?<![0-9A-Za-z]) ")  # "1 2" is not "12"
_CHOICE = re.compile(r"\(\s*([A-Za-z])\s*\)")
_MATHS = re.compile(r"[0-9]|\\[A-Za-z]|(?<![A-Za-z])(?:pi|e|i)(?![A-Za-z])")


def equal(answer: str, gold: str) -> bool:
    """Whether they are the same answer. Raises Unreadable (or UnreadableGold) with the reason if one cannot be read."""
    if len(answer) > MAX_ANSWER_CHARS:
        raise Unreadable(f"the answer is longer than {MAX_ANSWER_CHARS} characters")
    answer, gold = tidy(answer), tidy(gold)
    if not answer:
        raise Unreadable("the answer is empty")
    if answer == gold:
        return True
    try:
        gold_number = read_quantity(gold)
    except Unreadable as error:
        raise UnreadableGold(str(error)) from None
    answer_number = read_quantity(answer)
    if answer_number is not None and gold_number is not None:
        return answer_number.same(gold_number)
    if _same_text(answer, gold):
        return True
    if (based := _same_based(answer, gold)) is not None:
        return based
    if _contradicts(answer, gold_number):
        return False
    if gold_number is not None and not _MATHS.search(answer):
        raise Unreadable("there is no number in the answer")
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(gold):
        return False  # as products of letters, anagrams would be equal
    return same_expression(answer, gold)


def _same_text(answer: str, gold: str) -> bool:
    answer, gold = (_IDLE_SPACE.sub("", _CHOICE.sub(r"\1", text)) for text in (answer, gold))
    if answer == gold:
        return True
    worded = answer.isalpha() or _WORDS.fullmatch(answer) is not None
    return len(gold) > 1 and worded and answer.casefold() == gold.casefold()


def _same_based(answer: str, gold: str) -> bool | None:
    """Numbers written with a base, such as 101_2: the same digits, and the same base where both name one."""
    ours, theirs = _BASED.fullmatch(answer), _BASED.fullmatch(gold)
    if not (ours and theirs) or not (ours[2] or theirs[2]):
        return None
    return ours[1].casefold() == theirs[1].casefold() and (not ours[2] or not theirs[2] or ours[2] == theirs[2])


def _contradicts(answer: str, gold: Quantity | None) -> bool:
    """Whether an equation such as "43 = 42" has a side that is a number, but not the gold one."""
    if gold is None or "=" not in answer:
        return False
    sides = [read_quantity(tidy(side)) for side in answer.split("=")]
    return any(side is not None and not side.same(gold) for side in sides)
