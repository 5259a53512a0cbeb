"""Expressions through math-verify, imported only when an answer needs it: sympy takes longer to load than to use."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import Any

from assay.rewards.limits import Unreadable, UnreadableGold, check_expression, check_work

# A worker process puts its own here, to stop the clock of an answer while the library loads.
loading: Callable[[], AbstractContextManager[None]] = nullcontext

_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_PLAIN_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")


@lru_cache(maxsize=1)
def _library() -> ModuleType:
    with loading():
        import math_verify

        # It warns once that its own time limit is off. Ours, around the whole process, is the one that holds.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        math_verify.verify(_parse(math_verify, "\\boxed{x^2}"), _parse(math_verify, "\\boxed{x^{2}}"), **_NO_LIMIT)
    return math_verify


# Its limits use signals: they work in the main thread only, and raise what `except Exception` does not catch.
_NO_LIMIT: dict[str, Any] = {"timeout_seconds": None, "raise_on_error": True}


def same_expression(answer: str, gold: str) -> bool:
    """Whether two tidied expressions are equal to math-verify; Unreadable if only the gold one can be parsed."""
    check_expression(answer)
    check_work(answer)
    library = _library()
    gold_parsed = _parse_gold(gold)
    if not gold_parsed:
        return False  # plain text, which the comparison of strings has decided already
    try:
        answer_parsed = _parse(library, _as_box(answer))
        if not answer_parsed:
            raise Unreadable("the answer is not a mathematical expression")
        return bool(library.verify(gold_parsed, answer_parsed, **_NO_LIMIT))
    except (RecursionError, MemoryError, OverflowError) as error:
        raise Unreadable(f"the expression is too large ({type(error).__name__})") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError) as error:
        raise Unreadable(f"math-verify cannot compare it ({type(error).__name__})") from None


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    try:
        check_expression(gold)
    except Unreadable as error:
        raise UnreadableGold(str(error)) from None
    return _parse(_library(), _as_box(gold))


def _as_box(text: str) -> str:
    """One expression in a box, so that math-verify reads all of it and picks no part at will."""
    text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)
    text = _PLAIN_PI.sub(r"\\pi ", text)
    return "\\boxed{" + text.replace("**", "^").replace("*", "\\cdot ") + "}"


def _parse(library: ModuleType, text: str) -> list[Any]:
    config = [library.LatexExtractionConfig(boxed_match_priority=0)]
    return library.parse(text, config, fallback_mode="no_fallback", parsing_timeout=None)


def verify_whole(completion: str, gold: str) -> tuple[bool | None, str]:
    """math-verify with its own extraction from the whole text: (equal, or None if nothing was found; what it read)."""
    library = _library()
    gold_parsed = library.parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    answer_parsed = library.parse(completion, parsing_timeout=None)
    if not answer_parsed:
        return None, ""
    equal = library.verify(gold_parsed, answer_parsed, timeout_seconds=None)
    return bool(equal), str(answer_parsed[-1])
