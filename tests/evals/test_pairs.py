"""Comparison of two evaluation files question by question."""

from __future__ import annotations

from typing import Any

import pytest
from scipy.stats import binomtest

from assay.evals.pairs import compare_evaluations


def lines(correct: dict[str, list[bool]], text: str = "What is {}?", system: str = "") -> list[dict[str, Any]]:
    """Lines of an evaluation with the given verdicts by question id."""
    first = [{"role": "system", "content": system}] if system else []
    return [
        {
            "group": group,
            "sample": sample,
            "prompt_id": name,
            "messages": [*first, {"role": "user", "content": text.format(name)}],
            "answer": "1",
            "verdict": {"status": "ok" if is_correct else "wrong"},
        }
        for group, (name, answers) in enumerate(correct.items())
        for sample, is_correct in enumerate(answers)
    ]


def test_the_same_questions_are_paired_in_any_order() -> None:
    a = {f"q{i}": [i < 10] for i in range(40)}
    b = {f"q{i}": [i < 8 or 20 <= i < 30] for i in reversed(range(40))}
    result = compare_evaluations(lines(a), lines(b, system="Think."))
    assert (result.questions, result.only_a, result.only_b) == (40, 0, 0)
    assert result.gained == [f"q{i}" for i in range(20, 30)] and result.lost == ["q8", "q9"]
    assert (result.accuracy_a, result.accuracy_b) == (0.25, 0.45) and result.difference == pytest.approx(0.2)
    assert result.p_value == pytest.approx(binomtest(2, 12).pvalue, rel=1e-12)
    assert result.ci95[0] < 0.2 < result.ci95[1]


def test_only_common_questions_are_compared() -> None:
    a = {"x": [True], "y": [False], "z": [True]}
    b = {"y": [True], "z": [True], "w": [False], "v": [False]}
    result = compare_evaluations(lines(a), lines(b))
    assert (result.questions, result.only_a, result.only_b) == (2, 1, 2)
    assert (result.accuracy_a, result.accuracy_b, result.gained) == (0.5, 1.0, ["y"])


def test_questions_with_the_same_id_and_another_text_are_different() -> None:
    a, b = ({f"q{i}": [i < count] for i in range(10)} for count in (3, 8))
    result = compare_evaluations(lines(a), lines(b, text="What is twice {}?"))
    assert not result.paired and (result.only_a, result.only_b, result.p_value) == (10, 10, None)
    assert result.difference == pytest.approx(0.5) and result.gained == result.lost == []
    assert 0.0 < result.ci95[0] < 0.5 < result.ci95[1]


def test_several_answers_per_question_and_different_numbers_of_answers() -> None:
    a = {f"q{i}": [i % 2 == 0, False] for i in range(20)}
    b = {f"q{i}": [True, True, i == 3, True] for i in range(20)}
    result = compare_evaluations(lines(a), lines(b))
    assert result.accuracy_a == 0.25 and result.accuracy_b == pytest.approx(0.7625)
    assert len(result.gained) == 20 and result.p_value == pytest.approx(2 / 2**20, rel=1e-6)


def test_repeated_questions_are_paired_in_their_order() -> None:
    twice = lines({"q": [True]}) + [{**line, "group": 1, "verdict": None} for line in lines({"q": [True]})]
    result = compare_evaluations(twice, twice[:1])
    assert (result.questions, result.only_a, result.accuracy_a) == (1, 1, 1.0)
