"""Statistics against scipy, published numbers and brute-force enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from assay import evals as stats
from assay.types import UserError


@settings(deadline=None)
@given(n=st.integers(1, 2000), data=st.data())
def test_wilson_equals_scipy(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    expected = scipy_stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert stats.wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_published_values_and_ends() -> None:
    # Newcombe 1998, table I, score method without continuity correction
    assert stats.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert stats.wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert stats.wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert stats.wilson(0, 20) == (0.0, pytest.approx(0.1611, abs=5e-5))
    assert stats.wilson(20, 20)[1] == 1.0
    assert stats.wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        stats.wilson(3, 2)


def test_bootstrap_equals_full_enumeration_of_resamples() -> None:
    values = np.array([0.0, 0.25, 1.0, 0.5])
    means = [np.mean(resample) for resample in itertools.product(values, repeat=4)]
    exact = np.quantile(means, [0.025, 0.975])
    assert stats.bootstrap(values, seed=0, n=100_000) == pytest.approx(tuple(exact), abs=1e-9)
    assert (
        stats.bootstrap(values, seed=1, n=9)
        == stats.bootstrap(values, seed=1, n=9)
        != stats.bootstrap(values, seed=2, n=9)
    )


def test_bootstrap_edge_cases_and_many_questions() -> None:
    assert stats.bootstrap([0.5], seed=0) == (0.5, 0.5)
    assert stats.bootstrap(np.ones(7), seed=0) == (1.0, 1.0)
    with pytest.raises(UserError, match="at least one question"):
        stats.bootstrap([], seed=0)
    many = np.random.default_rng(0).random(1319)  # resampled in several chunks
    low, high = stats.bootstrap(many, seed=0)
    half = 1.96 * many.std() / math.sqrt(many.size)
    assert (low, high) == pytest.approx((many.mean() - half, many.mean() + half), abs=0.002)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_equals_all_subsets(n: int) -> None:
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [True] * right + [False] * (n - right)
        subsets = [any(chosen) for chosen in itertools.combinations(samples, k)]
        assert stats.pass_at_k(n, right, k) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_pass_at_k_stays_exact_for_many_samples() -> None:
    exact = 1 - math.comb(9_000, 100) / math.comb(10_000, 100)
    assert stats.pass_at_k(10_000, 1_000, 100) == pytest.approx(exact, rel=1e-12)
    assert stats.pass_at_k(5, 0, 3) == 0.0
    for bad in ((5, 6, 1), (5, 1, 6), (5, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            stats.pass_at_k(*bad)


def test_majority() -> None:
    assert stats.majority_correct(["7", "8", "8"], [True, False, False], 3) is False
    assert stats.majority_correct(["7", "8", "8"], [True, False, False], 2) is True  # a tie: the first seen wins
    assert stats.majority_correct([None, None, "7"], [False, False, True], 3) is True  # a missing answer has no vote
    assert stats.majority_correct([None, "7"], [False, True], 1) is False  # no votes
    answers = [["1", "2", "2"], ["3", "3", "4"]]
    correct = [[False, True, True], [False, False, True]]
    assert [stats.majority_at_k(answers, correct, k) for k in (1, 2, 3)] == [0.0, 0.0, 0.5]
    with pytest.raises(ValueError, match="majority@4"):
        stats.majority_at_k(answers, correct, 4)


@settings(max_examples=60, deadline=None)
@given(gained=st.integers(0, 3000), lost=st.integers(0, 3000), same=st.integers(0, 3))
def test_mcnemar_equals_scipy(gained: int, lost: int, same: int) -> None:
    before = [False] * gained + [True] * lost + [True] * same
    after = [True] * gained + [False] * lost + [True] * same
    found = stats.mcnemar(before, after)
    assert (found.gained, found.lost) == (gained, lost)
    expected = scipy_stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert found.p_value == pytest.approx(expected, rel=1e-6, abs=1e-300)


def test_mcnemar_by_hand() -> None:
    assert stats.mcnemar([], []) == stats.Paired(1.0, 0, 0)
    assert stats.mcnemar([True, False], [True, False]) == stats.Paired(1.0, 0, 0)
    assert stats.mcnemar([0] * 10, [1] * 10).p_value == 2 / 2**10
    assert stats.mcnemar([0] * 20_000, [1] * 20_000) == stats.Paired(
        0.0, 20_000, 0
    )  # below the smallest float, and no overflow
    with pytest.raises(ValueError, match="same questions"):
        stats.mcnemar([True], [True, False])


def sign_flip_by_enumeration(differences: np.ndarray) -> float:
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product([-1, 1], repeat=len(differences))]
    return float(np.mean(np.array(sums) >= abs(differences.sum()) - 1e-9))


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=9))
def test_paired_test_equals_enumeration_of_signs(counts: list[tuple[int, int]]) -> None:
    before = np.array([b / 4 for b, _ in counts])
    after = np.array([a / 6 for _, a in counts])  # the numbers of samples may differ
    found = stats.paired_test(before, after, seed=0)
    assert found.p_value == pytest.approx(sign_flip_by_enumeration(after - before), abs=1e-12)
    assert found.gained == sum(a / 6 > b / 4 + 1e-12 for b, a in counts)
    assert found.lost == sum(a / 6 < b / 4 - 1e-12 for b, a in counts)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_paired_test_of_single_answers_is_mcnemar(pairs: list[tuple[bool, bool]]) -> None:
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    exact, found = stats.mcnemar(before, after), stats.paired_test(before, after, seed=0)
    assert found.p_value == pytest.approx(exact.p_value, rel=1e-9)
    assert (found.gained, found.lost) == (exact.gained, exact.lost)


def test_paired_test_samples_where_values_have_no_common_denominator() -> None:
    rng = np.random.default_rng(5)
    before, after = rng.random(12), rng.random(12) + 0.2
    found = stats.paired_test(before, after, seed=3)
    assert found == stats.paired_test(before, after, seed=3)
    exact = sign_flip_by_enumeration(after - before)
    assert found.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 20_000) + 1e-4)
    assert found.p_value != exact


def test_paired_test_computes_tiny_p_values_exactly() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.binomial(8, 0.3, size=1319) / 8, rng.binomial(8, 0.6, size=1319) / 8
    found = stats.paired_test(before, after, seed=0)
    assert 0 < found.p_value < 1e-50


def successes(count: int, n: int) -> list[bool]:
    return [True] * count + [False] * (n - count)


def test_interval_of_a_difference_of_other_questions_has_the_published_values() -> None:
    """Newcombe 1998, Statistics in Medicine 17, 873-890, table II, method 10."""
    low, high = stats.difference_interval(successes(48, 80), successes(56, 70), paired=False)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
    low, high = stats.difference_interval(successes(3, 10), successes(9, 10), paired=False)
    assert (round(low, 4), round(high, 4)) == (0.1705, 0.8090)


@pytest.mark.parametrize("chances", [(0.25, 0.25, 0.25, 0.25), (0.6, 0.05, 0.15, 0.2), (0.05, 0.02, 0.03, 0.9)])
def test_interval_of_a_paired_difference_covers_the_true_one(chances: tuple[float, ...]) -> None:
    """Exact coverage: the sum of the probabilities of all tables of 16 questions whose interval has the true value."""
    n, truth, covered = 16, chances[2] - chances[1], 0.0
    tables = scipy_stats.multinomial(n, chances)
    for table in itertools.product(range(n + 1), repeat=4):
        if sum(table) == n:
            both, lost, gained, none = table
            before = [True] * (both + lost) + [False] * (gained + none)
            after = [True] * both + [False] * lost + [True] * gained + [False] * none
            low, high = stats.difference_interval(before, after)
            covered += float(tables.pmf(table)) * (low <= truth <= high)
    assert 0.935 < covered < 0.9999


def test_interval_of_a_paired_difference_has_a_width_without_changes_and_is_antisymmetric() -> None:
    low, high = stats.difference_interval(successes(30, 100), successes(30, 100))
    assert -0.1 < low < 0 < high < 0.1 and low == pytest.approx(-high)
    one, other = [True, True, False, False, True, False], [True, False, True, True, True, True]
    low, high = stats.difference_interval(one, other)
    assert stats.difference_interval(other, one) == pytest.approx((-high, -low))


def test_interval_of_a_difference_of_means_is_a_bootstrap() -> None:
    rng = np.random.default_rng(3)
    before = rng.integers(0, 5, 400) / 4
    after = np.clip(before + rng.integers(0, 2, 400) / 4, 0, 1)
    gap = after - before
    low, high = stats.difference_interval(before, after)
    half = 1.96 * gap.std() / math.sqrt(len(gap))
    assert (low, high) == pytest.approx((gap.mean() - half, gap.mean() + half), abs=2e-3)
    low, high = stats.difference_interval(before, after[:300], paired=False)
    half = 1.96 * math.sqrt(before.var() / 400 + after[:300].var() / 300)
    middle = after[:300].mean() - before.mean()
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=4e-3)
