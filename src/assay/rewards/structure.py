r"""Answers made of parts: lists, tuples, intervals, sets, unions, matrices, and "a \pm b", which is two values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from assay.rewards.limits import MAX_PARTS, Unreadable

MAX_UNMATCHED = 4  # parts of an unordered answer that are compared with each other by computer algebra

_MATRIX = re.compile(r"\\begin\s*\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*?)\\end\s*\{\1\}", re.DOTALL)
_MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_CONJUNCTION = re.compile(r"\s*,?\s+(?:and|or)\s+")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_LESS, _MORE = r"(<|\\leq?(?![A-Za-z])|\\lt(?![A-Za-z]))", r"(>|\\geq?(?![A-Za-z])|\\gt(?![A-Za-z]))"
_BETWEEN = re.compile(rf"([^<>]+?)\s*{_LESS}\s*[A-Za-z]\s*{_LESS}\s*([^<>]+)")
_BELOW = re.compile(rf"[A-Za-z]\s*{_LESS}\s*([^<>]+)|([^<>]+?)\s*{_MORE}\s*[A-Za-z]")
_ABOVE = re.compile(rf"[A-Za-z]\s*{_MORE}\s*([^<>]+)|([^<>]+?)\s*{_LESS}\s*[A-Za-z]")

# The kinds of answer that a gold answer of another kind accepts.
_ALSO_WRITTEN = {"list": ("set", "()"), "set": ("list",), "union": ("list",), "()": ("list",), "column": ("()", "list")}
_OPENING, _CLOSING = "([{", ")]}"
_TOKEN = re.compile(r"\\begin\s*\{\w+\}|\\end\s*\{\w+\}|\\cup(?![A-Za-z])|\\[{}]|\\\\|\\[A-Za-z]+|[()\[\]{},;&]")


@dataclass(frozen=True, slots=True)
class Structure:
    """`kind` is "list", "set", "union", "()", "[]", "(]", "[)" or "matrix ROWSxCOLUMNS"."""

    kind: str
    parts: tuple[str, ...]


def read_structure(text: str) -> Structure | None:
    """The parts of a tidied answer; None if it is a single expression."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    if interval := _interval(text):
        return interval
    if matrix := _MATRIX.fullmatch(text):
        return _read_matrix(matrix[2])
    if len(union := _split(text, "\\cup")) > 1:
        return Structure("union", tuple(union))
    if text.startswith("\\{") and text.endswith("\\}") and _encloses(text):
        return Structure("set", _with_both_signs(_split(text[2:-2], ",;")))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _encloses(text):
        parts = _split(text[1:-1], ",;")
        return Structure(text[0] + text[-1], tuple(parts)) if len(parts) > 1 else None
    values = _with_both_signs(_split(text, ",;"))
    return Structure("list", values) if len(values) > 1 else None


def as_list(text: str) -> str:
    """The text with "and" and "or" between its parts as commas: for an answer whose gold answer has several parts."""
    return _CONJUNCTION.sub(", ", text)


def same_structure(answer: Structure, gold: Structure, same: Callable[[str, str], bool]) -> bool:
    """Whether the parts are equal one by one: in any order for lists, sets and unions."""
    if max(len(answer.parts), len(gold.parts)) > MAX_PARTS:
        raise Unreadable(f"the answer has more than {MAX_PARTS} parts")
    if len(answer.parts) != len(gold.parts):
        return False
    kind = "column" if gold.kind.endswith("x1") else gold.kind
    if answer.kind not in (gold.kind, *_ALSO_WRITTEN.get(kind, ())):
        return False
    unordered = gold.kind in ("list", "set", "union")
    if not unordered:
        return all(map(same, answer.parts, gold.parts))
    return _same_parts(list(answer.parts), list(gold.parts), same)


def _same_parts(answer: list[str], gold: list[str], same: Callable[[str, str], bool]) -> bool:
    """Whether the parts can be paired: equal texts first, so that few are left for slow comparisons."""
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


def _interval(text: str) -> Structure | None:
    r"""The interval that an inequality in one variable stands for: "2 < x \le 3" is (2, 3]."""
    if between := _BETWEEN.fullmatch(text):
        low, first, second, high = between.groups()
        return Structure(("(" if _excludes(first) else "[") + (")" if _excludes(second) else "]"), (low, high.strip()))
    if below := _BELOW.fullmatch(text):
        relation, value = (below[1], below[2]) if below[1] else (below[4], below[3])
        return Structure("(" + (")" if _excludes(relation) else "]"), ("-\\infty", value.strip()))
    if above := _ABOVE.fullmatch(text):
        relation, value = (above[1], above[2]) if above[1] else (above[4], above[3])
        return Structure(("(" if _excludes(relation) else "[") + ")", (value.strip(), "\\infty"))
    return None


def _excludes(relation: str) -> bool:
    return relation in ("<", ">", "\\lt", "\\gt")


def _read_matrix(body: str) -> Structure | None:
    rows = [row for row in _split(body, "\\\\") if row]
    cells = [_split(row, "&") for row in rows]
    if not cells or len({len(row) for row in cells}) > 1:
        return None
    return Structure(f"matrix {len(cells)}x{len(cells[0])}", tuple(cell for row in cells for cell in row))


def _split(text: str, separators: str) -> list[str]:
    """The text cut at separators that no bracket encloses. Brackets of all kinds count alike: (2, 3] is one part."""
    wanted = [separators] if separators.startswith("\\") else list(separators)
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += _nesting(token.group())
        if depth == 0 and token.group() in wanted:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _nesting(token: str) -> int:
    bracket = token.lstrip("\\") if len(token) < 3 else token
    return (bracket in _OPENING or token.startswith("\\begin")) - (bracket in _CLOSING or token.startswith("\\end"))


def _encloses(text: str) -> bool:
    """Whether the bracket that opens the text is closed at its very end."""
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
