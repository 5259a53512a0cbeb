"""Extract the final answer from a completion: the last one counts. Takes time linear in the length of the text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from assay.rewards.numeric import MAX_ANSWER_CHARS, closing_brace
from assay.types import Status, UserError, clip


@dataclass(frozen=True, slots=True)
class Extraction:
    """An answer (`status` ok), or why there is none: no_answer, or unparsable with the text that was found."""

    text: str = ""
    status: Status = Status.OK
    form: str = ""  # the extractor that found it
    detail: str = ""

    @property
    def found(self) -> bool:
        return self.status is Status.OK


_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|((?:\\?\$)?[-+\u2212]?[0-9][0-9,]*(?:\.[0-9]+)?))")
_DIGIT = re.compile(r"[0-9]")
MAX_SHOWN = 200  # characters of an answer in a verdict
_GROUPED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_PLAIN = rf"(?:{_GROUPED}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?(?:\\?\$|[€£¥₹])?(?:(?<=[$€£¥₹])[-\u2212])?"  # a minus after a word or ")" subtracts
    rf"(?:\\[dt]?frac\{{{_PLAIN}\}}\{{{_PLAIN}\}}|{_PLAIN}(?:/{_PLAIN})?(?:[eE][-+]?[0-9]+(?![\w]))?)(?:\s?\\?%)?"
)


def boxed(text: str) -> Extraction:
    r"""Extract the last `\boxed{...}` or `\fbox{...}`, with nested braces; `\boxed 5` counts too."""
    box = _last_match(_BOX, text)
    if box is None:
        return _no_answer("\\boxed{}")
    if box.group(2):
        return _answer(box.group(2))
    start = box.end()
    end = closing_brace(text, start, start + MAX_ANSWER_CHARS + 1)
    if end >= 0:
        return _answer(text[start:end])
    inside = text[start : start + MAX_ANSWER_CHARS + 1]
    reason = "the last box is too long" if len(inside) > MAX_ANSWER_CHARS else "the last box is never closed"
    return Extraction(clip(inside, MAX_SHOWN), Status.UNPARSABLE, detail=reason)


def hash_mark(text: str) -> Extraction:
    """Extract the text after the last `####`, to the end of the line (the form of GSM8K's solutions)."""
    start = text.rfind("####")
    if start < 0:
        return _no_answer("####")
    line = text[start + 4 : start + MAX_ANSWER_CHARS + 6]
    return _answer(line.split("\n", 1)[0])


def answer_tag(text: str) -> Extraction:
    """Extract the content of the last `<answer>...</answer>`."""
    start = text.rfind("<answer>")
    if start < 0:
        return _no_answer("<answer> tag")
    start += len("<answer>")
    end = text.find("</answer>", start)
    if end < 0:
        inside = text[start : start + MAX_ANSWER_CHARS]
        return Extraction(clip(inside, MAX_SHOWN), Status.UNPARSABLE, detail="the last <answer> is never closed")
    return _answer(text[start:end])


def last_number(text: str) -> Extraction:
    """Extract the last number, with sign, currency, thousands separators, decimals, a/b, exponent and %."""
    digit = _DIGIT.search(text[::-1])  # backwards, so that the cost does not depend on the length
    if digit is None:
        return _no_answer("number")
    end = len(text) - digit.start()
    start = max(0, end - MAX_ANSWER_CHARS)
    window = text[start : end + 4]  # a closing brace or a percent sign may follow the last digit
    number = _last_match(_NUMBER, window)
    if number is None or (number.start() == 0 and start > 0):
        return Extraction(clip(window, MAX_SHOWN), Status.UNPARSABLE, detail="the last number is too long")
    return _answer(number.group())


EXTRACTORS: dict[str, Callable[[str], Extraction]]
EXTRACTORS = {"boxed": boxed, "hash": hash_mark, "answer-tag": answer_tag, "last-number": last_number}


def check_extractor(name: str) -> None:
    if name not in EXTRACTORS:
        raise UserError(f"unknown answer form '{name}': choose one of {', '.join(EXTRACTORS)}")


def extract(text: str, form: str, strict: bool = True, any_number: bool = True) -> Extraction:
    """Extract the final answer in the given form; if not strict, in any form (the last number only if `any_number`)."""
    others = [name for name in EXTRACTORS if name != form and (any_number or name != "last-number")]
    extractions = (replace(EXTRACTORS[name](text), form=name) for name in [form, *([] if strict else others)])
    first = next(extractions)
    return first if first.found else next((other for other in extractions if other.found), first)


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _no_answer(missing: str) -> Extraction:
    return Extraction(status=Status.NO_ANSWER, detail=f"no {missing} in the completion")


def _answer(text: str) -> Extraction:
    text = text.strip()
    if not text:
        return Extraction(status=Status.UNPARSABLE, detail="the final answer is empty")
    if len(text) > MAX_ANSWER_CHARS:
        detail = f"the final answer is longer than {MAX_ANSWER_CHARS} characters"
        return Extraction(clip(text, MAX_SHOWN), Status.UNPARSABLE, detail=detail)
    return Extraction(text)
