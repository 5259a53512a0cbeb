"""Reasons of inequality. Pairs of answers are in test_answer_pairs.py."""

from __future__ import annotations

import pytest

from assay.rewards.equality import compare, equal


@pytest.mark.parametrize(("answer", "gold"), [(r"\sqrt{4}", "2"), ("x = 2 + 3", "5"), ("2**10", "1024")])
def test_expression_equals_a_number_only_if_not_strict(answer: str, gold: str) -> None:
    same, reason = compare(answer, gold)
    assert not same and "not evaluated" in reason
    assert equal(answer, gold, strict=False)


@pytest.mark.parametrize("gold", [r"3\sqrt{13}", r"\cot x", "18"])
def test_rejected_form_has_a_reason(gold: str) -> None:
    same, reason = compare(r"2 \lor 3", gold)
    assert not same and reason
