"""A regression set of correct answers in unusual forms, and of wrong answers that look correct.

Each line of answer_pairs.jsonl has the gold answer, the answer, how it is stated (`form`), whether it is equal with
`strict`, and why. `lenient` is the expectation without `strict` where that differs. latex_pairs.txt has boxed answers
only; its first lines explain the format.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.rewards import MathJudge
from assay.rewards.numeric import read_quantity, tidy
from assay.tasks.base import state_answer
from assay.types import Status


def lines_of(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()


def latex_rows() -> Iterator[dict[str, Any]]:
    style = gold = ""
    for line in lines_of("latex_pairs.txt"):
        mark, _, text = line.partition(" ")
        if mark == "==":
            style = text
        elif mark in ("+", "-", "~"):
            row = {"style": style, "form": "boxed", "gold": gold, "answer": text.replace("␣", " "), "why": style}
            yield row | {"equal": mark == "+", "lenient": mark != "-"}
        elif mark and mark != "#":
            gold = line


ROWS: list[dict[str, Any]] = [*map(json.loads, lines_of("answer_pairs.jsonl")), *latex_rows()]
STYLES = sorted({row["style"] for row in ROWS})


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("style", STYLES)
def test_judge_accepts_exactly_the_correct_answers(style: str, strict: bool) -> None:
    failed = []
    for row in (row for row in ROWS if row["style"] == style):
        verdict = MathJudge(row["form"], strict)(state_answer(row["answer"], row["form"]), row["gold"], {})
        expected = row["equal"] if strict else row.get("lenient", row["equal"])
        if verdict.status is Status.ERROR or verdict.correct is not expected:
            failed.append((row, verdict))
    assert failed == []


def test_spellings_of_numbers_are_read_without_computer_algebra() -> None:
    answers = [row["answer"] for row in ROWS if row["style"] == "spellings of numbers"]
    assert answers and [answer for answer in answers if read_quantity(tidy(answer)) is None] == []


def test_regression_set_is_large_balanced_and_without_duplicates() -> None:
    keys = Counter((row["form"], row["gold"], row["answer"]) for row in ROWS)
    right = sum(row["equal"] for row in ROWS)
    assert len(ROWS) >= 1_900 and right >= 700 and len(ROWS) - right >= 600 and len(STYLES) >= 30
    assert max(keys.values()) == 1 and all(row["why"] for row in ROWS)


MATH500 = Path(os.environ.get("ASSAY_MATH500", Path(__file__).parents[2] / ".." / "shared" / "data" / "math500"))
GSM8K = Path(os.environ.get("ASSAY_GSM8K", Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k"))
REWRITINGS: dict[str, Callable[[str], str]] = {
    "itself": str,
    "display fractions": lambda gold: gold.replace("\\frac", "\\dfrac"),
    "dollar delimiters": lambda gold: f"${gold}$",
    "full stop": lambda gold: f"{gold}.",
    "box in a box": lambda gold: f"\\boxed{{{gold}}}",
    "bold": lambda gold: f"\\mathbf{{{gold}}}",
    "square brackets": lambda gold: gold.replace("pmatrix", "bmatrix"),
    "without degrees": lambda gold: gold.replace("^\\circ", ""),
    "Unicode": lambda gold: gold.replace("\\pi", "π").replace("\\infty", "∞").replace("\\cup", "∪").replace("-", "−"),
    "decimal point": lambda gold: f"{gold}.0" if gold.lstrip("-").isdigit() else gold,
    "order of a union": lambda gold: " \\cup ".join(reversed(gold.split("\\cup"))),
    "product sign": lambda gold: re.sub(r"(\d)\s*(\\sqrt|\\pi)", r"\1 \\cdot \2", gold),
    "plain root": lambda gold: re.sub(r"(\d)\s*\\sqrt\{(\d+)\}", r"\1*sqrt(\2)", gold),
    "assignment": lambda gold: gold if re.search(r"=|\\in|text", gold) else f"t = {gold}",
}


@pytest.mark.skipif(not MATH500.is_dir(), reason="no MATH-500 folder: set ASSAY_MATH500")
@pytest.mark.parametrize("rewriting", REWRITINGS)
def test_math500_gold_answers_in_other_notations(rewriting: str) -> None:
    golds = [json.loads(line)["answer"] for line in (MATH500 / "test.jsonl").read_text().splitlines()]
    lost = []
    for gold in golds:
        answer = REWRITINGS[rewriting](gold)
        if not MathJudge()(f"\\boxed{{{answer}}}", gold, {}).correct:
            lost.append((gold, answer))
    assert len(golds) == 500 and lost == []


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K folder: set ASSAY_GSM8K")
@pytest.mark.parametrize("rewriting", ["{}", "${}", "{}.00", "{} dollars", "x = {}", "{:,}", "\\text{{{}}}"])
def test_gsm8k_gold_answers_in_other_notations(rewriting: str) -> None:
    lines = (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"].rpartition("####")[2].strip().replace(",", "") for line in lines]
    judge = MathJudge("hash")
    lost = [gold for gold in golds if not judge(f"#### {rewriting.format(int(gold))}", gold, {}).correct]
    assert len(golds) == 1319 and lost == []
