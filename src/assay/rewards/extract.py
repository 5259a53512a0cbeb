"""Extract the final answer from a completion: the last one counts. Takes time linear in the length of the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from assay.rewards.numeric import MAX_ANSWER_CHARS
from assay.types import Status, UserError


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


Extractor = Callable[[str], Extraction]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|((?:\\?\$)?[-+\u2212]?[0-9][0-9,]*(?:\.[0-9]+)?))")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGIT = re.compile(r"[0-9]")
_GROUPED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_PLAIN = rf"(?:{_GROUPED}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?(?:\\?\$|[€£¥₹])?(?:(?<=[$€£¥₹])[-\u2212])?"  # a minus after a word or ")" subtracts
    rf"(?:\\[dt]?frac\{{{_PLAIN}\}}\{{{_PLAIN}\}}|{_PLAIN}(?:/{_PLAIN})?(?:[eE][-+]?[0-9]+(?![\w]))?)(?:\s?\\?%)?"
)


def clip(text: str, limit: int = 200) -> str:
    """Shorten a text."""
    return text if len(text) <= limit else text[:limit] + "..."


def boxed(text: str) -> Extraction:
    r"""Extract the last `\boxed{...}` or `\fbox{...}`, with nested braces; `\boxed 5` counts too."""
    box = None
    for box in _BOX.finditer(text):  # noqa: B007 - only the last one is used
        pass
    if box is None:
        return Extraction(status=Status.NO_ANSWER, detail="no \\boxed{} in the completion")
    if box.group(2):
        return _answer(box.group(2))
    start = box.end()
    depth = 1
    for token in _BRACE_OR_ESCAPE.finditer(text, start, start + MAX_ANSWER_CHARS + 1):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return _answer(text[start : token.start()])
    inside = text[start : start + MAX_ANSWER_CHARS + 1]
    reason = "the last box is too long" if len(inside) > MAX_ANSWER_CHARS else "the last box is never closed"
    return Extraction(clip(inside), Status.UNPARSABLE, detail=reason)


def hash_mark(text: str) -> Extraction:
    """Extract the text after the last `####`, to the end of the line (the form of GSM8K's solutions)."""
    start = text.rfind("####")
    if start < 0:
        return Extraction(status=Status.NO_ANSWER, detail="no #### in the completion")
    start += 4
    line = text[start : start + MAX_ANSWER_CHARS + 2]
    return _answer(line.split("\n", 1)[0])


def answer_tag(text: str) -> Extraction:
    """Extract the content of the last `<answer>...</answer>`."""
    start = text.rfind("<answer>")
    if start < 0:
        return Extraction(status=Status.NO_ANSWER, detail="no <answer> tag in the completion")
    start += len("<answer>")
    end = text.find("</answer>", start)
    if end < 0:
        inside = text[start : start + MAX_ANSWER_CHARS]
        return Extraction(clip(inside), Status.UNPARSABLE, detail="the last <answer> is never closed")
    return _answer(text[start:end])


def last_number(text: str) -> Extraction:
    """Extract the last number, with sign, currency, thousands separators, decimals, a/b, exponent and %."""
    digit = _DIGIT.search(text[::-1])  # backwards, so that the cost does not depend on the length
    if digit is None:
        return Extraction(status=Status.NO_ANSWER, detail="no number in the completion")
    end = len(text) - digit.start()
    start = max(0, end - MAX_ANSWER_CHARS)
    window = text[start : end + 4]  # a closing brace or a percent sign may follow the last digit
    number = None
    for number in _NUMBER.finditer(window):  # noqa: B007
        pass
    if number is None or (number.start() == 0 and start > 0):
        return Extraction(clip(window), Status.UNPARSABLE, detail="the last number is too long")
    return _answer(number.group())


EXTRACTORS: dict[str, Extractor] = {
    "boxed": boxed,
    "hash": hash_mark,
    "answer-tag": answer_tag,
    "last-number": last_number,
}


def check_extractor(name: str) -> None:
    if name not in EXTRACTORS:
        raise UserError(f"unknown answer form '{name}': choose one of {', '.join(EXTRACTORS)}")


def extract(text: str, form: str, strict: bool = True, any_number: bool = True) -> Extraction:
    """Extract the final answer in the given form; if not strict, in any form (the last number only if `any_number`)."""
    first = EXTRACTORS[form](text)
    if first.found or strict:
        return _with_form(first, form)
    for other, extractor in EXTRACTORS.items():
        if other == form or (other == "last-number" and not any_number):
            continue
        extraction = extractor(text)
        if extraction.found:
            return _with_form(extraction, other)
    return _with_form(first, form)


def _with_form(extraction: Extraction, form: str) -> Extraction:
    return Extraction(extraction.text, extraction.status, form, extraction.detail)


def _answer(text: str) -> Extraction:
    text = text.strip()
    if not text:
        return Extraction(status=Status.UNPARSABLE, detail="the final answer is empty")
    if len(text) > MAX_ANSWER_CHARS:
        detail = f"the final answer is longer than {MAX_ANSWER_CHARS} characters"
        return Extraction(clip(text), Status.UNPARSABLE, detail=detail)
    return Extraction(text)
