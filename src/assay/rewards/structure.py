"""Answers with parts: lists, tuples, sets, unions and matrices, and how brackets divide a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from assay.rewards.numeric import Unreadable

MAX_PARTS = 24  # of a list, a set or a matrix
MAX_UNMATCHED = 4  # symbolic parts of an unordered answer that are compared with each other

_ENVIRONMENT = r"\\begin\s*\{(?:[pbB]?matrix|smallmatrix|array)\}"
_MATRIX = re.compile(rf"([(\[]?)\s*{_ENVIRONMENT}(?:\{{[lcr| ]*\}})?(.*?)\\end\s*\{{\w+\}}\s*([)\]]?)", re.DOTALL)
_CASES = re.compile(r"\\begin\s*\{cases\}(.*?)\\end\s*\{cases\}", re.DOTALL)
_MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_CONJUNCTIONS = ("and", "or", "\\lor", "\\vee")

# Kind of the gold answer -> other kinds of answer that are accepted.
_ALSO_WRITTEN = {"list": ("set", "()"), "set": ("list",), "union": ("list",), "()": ("list",), "column": ("()", "list")}
_OPENING, _CLOSING = "([{", ")]}"
_TOKEN = re.compile(r"\\begin\s*\{\w+\}|\\end\s*\{\w+\}|\\[{}]|\\\\|\\[A-Za-z]+|[()\[\]{},;&=:|-]|\b(?:and|or)\b")


@dataclass(frozen=True, slots=True)
class Structure:
    """`kind` is "list", "set", "union", "()", "[]", "(]", "[)" or "matrix ROWSxCOLUMNS"."""

    kind: str
    parts: tuple[str, ...]


def read_structure(text: str) -> Structure | None:
    """Return the parts of a tidied answer; None if it is a single expression."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    if (matrix := _MATRIX.fullmatch(text)) and len(matrix[1]) == len(matrix[3]):
        return _read_matrix(matrix[2])
    if cases := _CASES.fullmatch(text):
        return Structure("list", tuple(row for row in split(cases[1], ("\\\\", ",")) if row))
    if len(union := split(text, ("\\cup",))) > 1:
        return Structure("union", tuple(union))
    if text.startswith("\\{") and text.endswith("\\}") and encloses(text):
        return Structure("set", _with_both_signs(split(text[2:-2], ",;")))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and encloses(text):
        parts = split(text[1:-1], ",;")
        return Structure(text[0] + text[-1], tuple(parts)) if len(parts) > 1 else None
    values = _with_both_signs(list_items(text))
    return Structure("list", values) if len(values) > 1 else None


def list_items(text: str) -> list[str]:
    """Split "1, 2, and 3" at commas, semicolons and conjunctions; "p=5,q=2; p=7,q=2" at semicolons only."""
    groups = split(text, ";")
    if len(groups) > 1 and all("=" in group and len(split(group, ",")) > 1 for group in groups):
        return groups
    items = split(text, (",", ";", *_CONJUNCTIONS))
    return [item for position, item in enumerate(items) if item or position == 0 or not items[position - 1]]


def same_structure(answer: Structure, gold: Structure, same: Callable[[str, str], bool]) -> bool:
    """Return whether all parts are equal: in any order for lists, sets and unions."""
    if max(len(answer.parts), len(gold.parts)) > MAX_PARTS:
        raise Unreadable(f"the answer has more than {MAX_PARTS} parts")
    if len(answer.parts) != len(gold.parts):
        return False
    kind = "column" if gold.kind.endswith("x1") else gold.kind
    if answer.kind not in (gold.kind, *_ALSO_WRITTEN.get(kind, ())):
        return False
    if gold.kind in ("list", "set", "union"):
        return _same_parts(list(answer.parts), list(gold.parts), same)
    return all(map(same, answer.parts, gold.parts))


def _same_parts(answer: list[str], gold: list[str], same: Callable[[str, str], bool]) -> bool:
    """Return whether the parts can be paired. Equal texts are paired first, to avoid slow comparisons."""
    for part in list(answer):
        if part in gold:
            answer.remove(part)
            gold.remove(part)
    if len(answer) > MAX_UNMATCHED and any(re.search(r"[A-Za-z]", part) for part in answer + gold):
        raise Unreadable(f"more than {MAX_UNMATCHED} symbolic parts differ from the gold answer's")
    for part in answer:
        partner = next((candidate for candidate in gold if same(part, candidate)), None)
        if partner is None:
            return False
        gold.remove(partner)
    return True


def _read_matrix(body: str) -> Structure | None:
    rows = [row for row in split(body, ("\\\\",)) if row]
    cells = [split(row, "&") for row in rows]
    if not cells or len({len(row) for row in cells}) > 1:
        return None
    return Structure(f"matrix {len(cells)}x{len(cells[0])}", tuple(cell for row in cells for cell in row))


def split(text: str, separators: Collection[str]) -> list[str]:
    """Split at separators outside of brackets. Kinds of brackets are not distinguished: (2, 3] is one part."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += _nesting(token.group())
        if depth == 0 and token.group() in separators:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _nesting(token: str) -> int:
    bracket = token.lstrip("\\") if len(token) < 3 else token
    return (bracket in _OPENING or token.startswith("\\begin")) - (bracket in _CLOSING or token.startswith("\\end"))


def encloses(text: str) -> bool:
    """Return whether the bracket that opens the text is closed at its end."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += _nesting(token.group())
        if depth == 0 and _nesting(token.group()):
            return token.end() == len(text)
    return False


def _with_both_signs(parts: list[str]) -> tuple[str, ...]:
    signed: list[str] = []
    for part in parts:
        if len(_PLUS_MINUS.findall(part)) == 1:
            signed += [_PLUS_MINUS.sub("+", part).lstrip("+ "), _PLUS_MINUS.sub("-", part)]
        else:
            signed.append(part)
    return tuple(signed)
