"""Rules for runs that get worse: thresholds, and silence for runs that learn."""

from __future__ import annotations

from typing import Any

import pytest
from metric_rows import CONFIG, names, steps

from assay.checks import diagnose
from assay.checks.causes import FIRST, LONG
from assay.checks.steps import SHORT

Changes = dict[str, Any]
START: Changes = {
    "length/mean": 40.0,
    "optim/updates": 1.0,
    "mismatch/kl": 1e-6,
    "mismatch/logprob_abs_diff": 1e-4,
    "policy/clip_fraction": 0.01,
    "policy/kl": 0.02,
}
# By cause: metrics of the later steps just beyond a threshold, metrics just short of it, and a key of the remedy.
CASES: dict[str, tuple[Changes, Changes, str]] = {
    "entropy_collapse": ({"sampling/entropy": 0.04}, {"sampling/entropy": 0.06}, "optim.lr (now 1e-06)"),
    "length_collapse": ({"length/mean": 9.9}, {"length/mean": 10.1}, "optim.lr (now 1e-06)"),
    "length_explosion": (
        {"length/mean": 60.0, "length/truncated": 0.5},
        {"length/mean": 60.0, "length/truncated": 0.4},
        "algo.soft_overlong_buffer",
    ),
    "kl_blow_up": ({"policy/kl": 1.1}, {"policy/kl": 0.9}, "algo.kl_coef"),
    "always_clipped": ({"policy/clip_fraction": 0.41}, {"policy/clip_fraction": 0.39}, "algo.updates"),
    "truncated": (
        {"length/truncated": 0.6, "status/no_answer": 0.5},
        {"length/truncated": 0.6, "status/no_answer": 0.4},
        "sampling.max_new_tokens (now 64)",
    ),
    "few_useful_groups": (
        {"groups/zero_variance": 0.95, "advantage/zero": 0.95},
        {"groups/zero_variance": 0.95, "advantage/zero": 0.85},
        "train.samples (now 4)",
    ),
    "mismatch": ({"mismatch/kl": 0.03}, {"mismatch/kl": 0.01}, "algo.correction"),
}


def run(changes: Changes, count: int = LONG, reward: float = 0.4) -> list[dict[str, Any]]:
    later = steps(count, {**START, **changes, "reward/mean": reward}, first=FIRST + 1)
    return [*steps(FIRST, START), *later]


@pytest.mark.parametrize("name", CASES)
def test_a_symptom_of_many_steps_is_a_warning(name: str) -> None:
    beyond, short, key = CASES[name]
    (cause,) = diagnose(run(beyond), CONFIG)
    assert cause.name == name and cause.severity == "warning" and key in cause.remedy
    assert f"in the last {LONG} steps" in cause.evidence
    assert not diagnose(run(short), CONFIG)


@pytest.mark.parametrize("name", CASES)
def test_few_steps_and_recovered_runs_are_silent(name: str) -> None:
    beyond, _, _ = CASES[name]
    count = SHORT - 1 if name in ("kl_blow_up", "mismatch") else LONG - 1
    assert not diagnose(run(beyond, count), CONFIG)
    assert not diagnose([*run(beyond), *steps(1, START, first=99)], CONFIG)


@pytest.mark.parametrize("name", [name for name in CASES if name != "mismatch"])
def test_a_run_whose_reward_rises_is_silent(name: str) -> None:
    beyond, _, _ = CASES[name]
    assert not diagnose(run(beyond, reward=0.45), CONFIG)


def test_short_answers_cannot_collapse_and_solved_problems_need_no_entropy() -> None:
    short = {"length/mean": 4.0}
    assert not diagnose([*steps(FIRST, short), *steps(LONG, {"length/mean": 0.9}, first=FIRST + 1)], CONFIG)
    assert not diagnose(run({"sampling/entropy": 0.01, "reward/correct": 0.95}), CONFIG)


def test_sequence_ratios_may_be_clipped_more_often() -> None:
    rows = run({"policy/clip_fraction": 0.6})
    assert names(rows, CONFIG) == ["always_clipped"]
    assert not diagnose(rows, {**CONFIG, "algo": {"recipe": "gspo"}})
    assert not diagnose(rows, {**CONFIG, "algo": {"ratio": "sequence"}})


def test_several_updates_or_earlier_weights_explain_a_difference_between_engine_and_trainer() -> None:
    large = {"mismatch/kl": 0.2}
    assert not diagnose(run({**large, "optim/updates": 4.0}), CONFIG)
    assert not diagnose(run({**large, "replay/share": 0.5}), CONFIG)
    assert not diagnose(run({**large, "async/staleness": 0.5}), CONFIG)
    recomputed = {**CONFIG, "algo": {"recompute_logprobs": True}}
    assert names(run({**large, "optim/updates": 4.0}), recomputed) == ["mismatch"]


def test_a_difference_that_grows_without_verified_syncs_means_stale_weights() -> None:
    unverified = {**START, "weights/changed": None}
    later = steps(8, {**unverified, "mismatch/kl": 0.1}, first=FIRST + 1)
    (cause,) = diagnose([*steps(FIRST, unverified), *later], CONFIG)
    assert cause.name == "stale_weights" and cause.severity == "error" and "engine.verify" in cause.remedy
    always = steps(9, {**unverified, "mismatch/kl": 0.1})  # from the first step on: not the weights
    assert names(always, CONFIG) == ["mismatch"]


FALL: dict[str, Changes] = {
    "gradient": {"optim/grad_norm": 1.1},
    "length": {"length/mean": 10.0},
    "entropy": {"sampling/entropy": 4.5},
    "unreadable": {"status/unparsable": 0.6},
    "cut off": {"length/truncated": 0.6},
    "kl": {"policy/kl": 1.5},
    "clip": {"policy/clip_fraction": 0.5},
}


@pytest.mark.parametrize("sign", FALL)
def test_a_falling_reward_with_a_sign_of_instability_means_a_high_learning_rate(sign: str) -> None:
    (cause,) = diagnose(run(FALL[sign], SHORT, reward=0.1), CONFIG)
    assert cause.name == "learning_rate_high" and "optim.lr (now 1e-06)" in cause.remedy
    assert "fell from 0.4 (steps 1 to 4) to 0.1" in cause.evidence
    assert "learning_rate_high" not in names(run(FALL[sign], SHORT, reward=0.2), CONFIG)  # 0.2 of the range
    assert not diagnose(run({}, SHORT, reward=0.1), CONFIG)  # e.g. harder problems
    assert not diagnose(run(FALL[sign], SHORT - 1, reward=0.1), CONFIG)


def test_a_fall_after_a_rise_is_compared_with_the_best_steps() -> None:
    high = steps(20, {**START, "reward/mean": 0.8}, first=FIRST + 1)
    low = steps(8, {**START, **FALL["gradient"], "reward/mean": 0.45}, first=FIRST + 21)
    (cause,) = diagnose([*steps(FIRST, START), *high, *low], CONFIG)
    assert cause.name == "learning_rate_high" and "fell from 0.8" in cause.evidence


def test_a_noisy_reward_does_not_count_as_a_fall() -> None:
    noisy = [row | {"reward/mean": (0.05, 0.75)[row["step"] % 2]} for row in run(FALL["gradient"], 8)]
    assert not diagnose(noisy, CONFIG)
