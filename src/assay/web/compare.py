"""Two evaluations question by question: which were gained, which were lost, and a paired test.

Two questions are the same if their ids, texts and gold answers are the same: generated problems can have the same id
and differ. System messages are not compared, because they are part of what may differ between runs.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from assay.evals.stats import difference_interval, paired_test
from assay.web.data import RunView, ViewError, evaluation_facts
from assay.web.index import IndexedFile, fold
from assay.web.table import OK, Page, Text

CHANGES = ("gained", "lost", "same_correct", "same_wrong")
SHOWN = {"changed": CHANGES[:2], "gained": CHANGES[:1], "lost": CHANGES[1:2], "all": CHANGES}
Key = tuple[int, int]  # hash of the question, and a number if several questions are equal
KEPT = 16  # comparisons


class Questions:
    """The questions of an evaluation: share of correct answers, and the lines of the answers."""

    def __init__(self, file: IndexedFile) -> None:
        rows = {name: file.rows[name].tolist() for name in ("group", "index", "prompt", "question", "status")}
        groups: dict[int, list[int]] = {}
        for position, group in enumerate(rows["group"]):
            if group >= 0:  # else the line is damaged
                groups.setdefault(group, []).append(position)
        seen: Counter[int] = Counter()
        self.shares: dict[Key, float] = {}
        self.lines: dict[Key, list[int]] = {}
        self.prompts: dict[Key, tuple[str, str]] = {}
        for positions in groups.values():
            question = rows["question"][positions[0]]
            key = question, seen[question]
            seen[question] += 1
            self.shares[key] = sum(rows["status"][position] == OK for position in positions) / len(positions)
            self.lines[key] = [rows["index"][position] for position in positions]
            self.prompts[key] = file.prompts[rows["prompt"][positions[0]]]


class Pairing:
    """The common questions of two evaluations, in the order of the first.

    Without common questions, all questions of A are compared with all of B: `p_value` is None, and nothing is gained or
    lost.
    """

    def __init__(self, a: Questions, b: Questions) -> None:
        self.a, self.b = a, b
        self.keys = [key for key in a.shares if key in b.shares]
        self.changes = {key: change_of(a.shares[key], b.shares[key]) for key in self.keys}
        self.shares = [np.array([side.shares[key] for key in self.keys or side.shares]) for side in (a, b)]
        self.p_value = paired_test(self.shares[0], self.shares[1], seed=0).p_value if self.keys else None

    def facts(self) -> dict[str, Any]:
        """Accuracies on the compared questions, their difference, and the ids of questions gained and lost."""
        was, now = self.shares
        common = len(self.keys)
        return {
            "paired": common > 0,
            "questions": common,
            "only_a": len(self.a.shares) - common,
            "only_b": len(self.b.shares) - common,
            "accuracy_a": float(was.mean()),
            "accuracy_b": float(now.mean()),
            "difference": float(now.mean()) - float(was.mean()),
            "ci95": difference_interval(was, now, paired=common > 0),
            "p_value": self.p_value,
            "gained": self._changed("gained"),
            "lost": self._changed("lost"),
        }

    def _changed(self, change: str) -> list[str]:
        return [self.a.prompts[key][0] for key in self.keys if self.changes[key] == change]


def change_of(before: float, after: float) -> str:
    if abs(after - before) > 1e-9:
        return "gained" if after > before else "lost"
    return "same_correct" if after >= 0.5 else "same_wrong"


@lru_cache(KEPT)
def paired(a: IndexedFile, b: IndexedFile) -> Pairing:
    """The comparison of two evaluations. If a file changes, it gets a new `IndexedFile`."""
    return Pairing(Questions(a), Questions(b))


class CompareQuery(Page):
    """Two evaluations by the ids of their runs and their names, and which questions are listed."""

    run_a: Text
    a: Text
    run_b: Text
    b: Text
    show: Literal["changed", "gained", "lost", "all"] = "changed"


def compare(view_a: RunView, view_b: RunView, query: CompareQuery) -> dict[str, Any]:
    """Compare two evaluations, of one run or of two."""
    files = [(view_a, view_a.evaluation(query.a)), (view_b, view_b.evaluation(query.b))]
    pairing = paired(files[0][1], files[1][1])
    if not pairing.keys:
        raise ViewError("the two evaluations have no question in common", 400)
    folded = fold(query.search)
    prompts = pairing.a.prompts
    found = [key for key in pairing.keys if not folded or any(folded in fold(text) for text in prompts[key])]
    chosen = [key for change in SHOWN[query.show] for key in found if pairing.changes[key] == change]
    counts = Counter(pairing.changes.values())
    return {
        **{
            side: {"run": view.id, **evaluation_facts(file.place, file)}
            for side, (view, file) in zip("ab", files, strict=True)
        },
        "counts": {change: counts[change] for change in CHANGES},
        "p_value": pairing.p_value,
        "unpaired": len(pairing.a.shares) + len(pairing.b.shares) - 2 * len(pairing.keys),
        "total": len(chosen),
        "rows": _rows(pairing, chosen[query.offset : query.offset + query.limit], files),
    }


def _rows(pairing: Pairing, keys: list[Key], files: list[tuple[RunView, IndexedFile]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"prompt_id": pairing.a.prompts[key][0], "change": pairing.changes[key]} for key in keys
    ]
    for side, (view, file), questions in zip("ab", files, (pairing.a, pairing.b), strict=True):
        lines = view.lines(file, [questions.lines[key][0] for key in keys])
        for row, key, line in zip(rows, keys, lines, strict=True):
            verdict = line.get("verdict")
            if side == "a":
                row |= {name: line.get(name) for name in ("messages", "answer")}
            row[side] = {
                **{name: line.get(name) for name in ("text", "reward", "length")},
                **{name: verdict.get(name) if isinstance(verdict, dict) else None for name in ("status", "parsed")},
                "index": questions.lines[key][0],
                "step": file.place.step,
                "source": file.place.source,
                "samples": len(questions.lines[key]),
                "share": questions.shares[key],
            }
    return rows
