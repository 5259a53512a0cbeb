"""Rules on sequences of metrics: runs that cannot learn, runs that get worse, and several causes at once.

tests/training/test_diagnosed_runs.py has real runs.
"""

from __future__ import annotations

import cProfile
import json
import pstats
from pathlib import Path
from typing import Any

import pytest
from metric_rows import CONFIG, errors, names, steps, summary

from assay.checks import diagnose, diagnose_run, remember
from assay.checks.causes import FIRST, LAST, LONG
from assay.checks.steps import SHORT
from assay.runs import Run

NO_SIGNAL = {"groups/zero_variance": 1.0, "advantage/zero": 1.0, "optim/skipped": 1.0, "weights/changed": 0.0}
EQUAL = {**NO_SIGNAL, "reward/range": 0.0, "reward/std": 0.0}
WRONG = {**EQUAL, "reward/mean": 0.0, "reward/correct": 0.0, "status/ok": 0.0, "status/wrong": 1.0}
SOLVED = {**EQUAL, "reward/mean": 1.0, "reward/correct": 1.0, "status/ok": 1.0, "status/wrong": 0.0}
UNCHANGED = {"weights/changed": 0.0, "optim/skipped": 1.0}
CAUSES: dict[str, tuple[dict[str, Any], str]] = {  # metrics of every step, and a setting in the remedy
    "judge_fails": ({"status/error": 0.2, "status/timeout": 0.4}, "reward.timeout_s (now 5.0)"),
    "truncated": ({**WRONG, "length/truncated": 0.97}, "sampling.max_new_tokens (now 64)"),
    "no_answer": ({**WRONG, "status/wrong": 0.05, "status/no_answer": 0.95}, "reward.extract (now boxed)"),
    "never_rewarded": (WRONG, "task.args"),
    "equal_rewards": ({**WRONG, "reward/mean": 0.25}, "task.args"),
    "too_easy": (SOLVED, "harder problems"),
    "equal_in_groups": ({**NO_SIGNAL, "sampling/entropy": 0.001}, "sampling.temperature (now 0.1)"),
    "zero_advantages": ({**UNCHANGED, "advantage/zero": 1.0}, "algo.advantage"),
    "not_finite": ({**UNCHANGED, "optim/non_finite": 1.0, "optim/grad_norm": float("nan")}, "optim.lr (now 1e-06)"),
    "zero_gradient": ({**UNCHANGED, "optim/grad_norm": 0.0}, "algo.policy_loss"),
    "tiny_updates": ({"weights/changed": 0.0}, "optim.lr (now 1e-06)"),
    "masked": ({**UNCHANGED, "optim/grad_norm": None, "length/truncated": 1.0}, "algo.mask_overlong"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_is_named_with_evidence_and_a_setting_to_change(name: str) -> None:
    changes, remedy = CAUSES[name]
    (cause,) = diagnose(steps(4, changes), CONFIG)
    assert cause.name == name and remedy in cause.remedy and "in all 4 steps" in cause.evidence
    assert cause.severity == ("warning" if name == "too_easy" else "error")
    assert names(steps(2, changes), CONFIG, summary(0.2, 0.2, 0, 0)) == [name]  # at the end, any number of steps


@pytest.mark.parametrize("name", CAUSES)
def test_few_steps_or_few_answers_are_no_evidence_during_a_run(name: str) -> None:
    changes, _ = CAUSES[name]
    assert not diagnose(steps(3, changes), CONFIG)
    assert not diagnose(steps(8, changes, answers=4), CONFIG)
    assert not errors([*steps(4, {}), *steps(LONG - 1, changes, first=5)], CONFIG)
    assert not errors([*steps(8, changes), *steps(1, {}, first=9)], CONFIG)


# If the reward falls at the same time, and answers become unreadable, endless or identical, the cause is the rate.
LATE = dict.fromkeys(("no_answer", "truncated", "equal_in_groups"), "learning_rate_high")


@pytest.mark.parametrize("name", [name for name in CAUSES if name != "too_easy"])
def test_cause_that_begins_late_is_reported_after_many_steps(name: str) -> None:
    changes, _ = CAUSES[name]
    late = {"reward/mean": 0.3, **changes} if name not in LATE else {**changes, "reward/mean": 0.1}
    (cause,) = diagnose([*steps(9, {}), *steps(LONG, late, first=10)], CONFIG)
    assert cause.name == LATE.get(name, name)
    assert name in LATE or f"in the last {LONG} steps" in cause.evidence


def test_most_frequent_status_and_reward_are_shown() -> None:
    (cause,) = diagnose(steps(4, {**WRONG, "status/wrong": 0.3, "status/unparsable": 0.7}), CONFIG)
    assert "no answer got a reward above 0" in cause.evidence and "unparsable, 70 %" in cause.evidence


def test_an_environment_that_masks_all_actions_is_named_before_the_advantages() -> None:
    (cause,) = diagnose(steps(4, {**UNCHANGED, "advantage/zero": 1.0, "turns/masked": 1.0}), CONFIG)
    assert cause.name == "masked" and "info['masked']" in cause.remedy


def test_answers_that_fill_the_context_need_a_longer_context() -> None:
    (cause,) = diagnose(steps(4, {**WRONG, "length/truncated": 1.0, "length/max": 40.0}), CONFIG)
    assert "model.max_length" in cause.remedy and "max_new_tokens" not in cause.remedy


HEALTHY_RUNS: dict[str, list[dict[str, Any]]] = {
    "rewards vary": steps(60, {}),
    "all answers are cut off, but their rewards differ": steps(60, {"length/truncated": 1.0}),
    "no answer is correct, but partial rewards differ": steps(60, {"reward/correct": 0.0, "reward/range": 0.5}),
    "all problems are solved in the end": [*steps(30, {}), *steps(40, SOLVED, first=31)],
    "the policy has converged": [*steps(9, {}), *steps(40, {**NO_SIGNAL, "reward/mean": 0.9}, first=10)],
    "one sample per prompt and a batch baseline": steps(60, {"groups/zero_variance": 1.0, "advantage/zero": 0.1}),
    "an engine without fingerprints": steps(60, {"weights/changed": None}),
    "steps without signal now and then": [
        row for n in range(1, 61) for row in steps(1, WRONG if n % 3 else {}, first=n)
    ],
    "a run of an earlier version": steps(
        60, {"weights/changed": None, "reward/range": None, "advantage/zero": None, "groups/zero_variance": 0.9}
    ),
}


@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_healthy_runs_have_no_cause_in_any_step_nor_at_the_end(name: str) -> None:
    rows = HEALTHY_RUNS[name]
    kept: list[Any] = []
    for row in rows:
        remember(kept, row)
        assert not diagnose(kept, CONFIG)
    assert not diagnose(rows, CONFIG, summary(0.2, 0.6, 20, 0, 1e-5))
    assert names(rows, CONFIG, summary(0.2, 0.22, 5, 4, 0.9)) == ["not_significant"]  # only a note


def test_significant_gain_overrules_all_causes() -> None:
    assert not diagnose(steps(9, WRONG), CONFIG, summary(0.2, 0.6, 20, 0, 1e-5))


def test_unchanged_verdicts_are_reported_at_the_end_unless_all_are_correct() -> None:
    (cause,) = diagnose(steps(9, {}), CONFIG, summary(0.2, 0.2, 0, 0))
    assert cause.name == "no_change" and "optim.lr (now 1e-06)" in cause.remedy and "50" in cause.evidence
    (cause,) = diagnose(steps(9, {}), CONFIG | {"optim": {"lr": 0.5}}, summary(0.2, 0.2, 0, 0))
    assert "optim.lr" not in cause.remedy and "train.steps" in cause.remedy  # it is far too high already
    assert not diagnose(steps(9, {}), CONFIG, summary(1.0, 1.0, 0, 0))
    (cause,) = diagnose([], CONFIG, {**summary(0.2, 0.2, 0, 0), "steps": 0})  # supervised fine-tuning only
    assert "sft.lr" in cause.remedy
    readable = summary(0.2, 0.2, 0, 0)
    readable["before"]["statuses"], readable["after"]["statuses"] = {"no_answer": 40}, {"wrong": 40}
    assert not diagnose(steps(9, {}), CONFIG, readable)
    rising = [*steps(8, {}), *steps(9, {"reward/mean": 0.6}, first=9)]
    assert not diagnose(rising, CONFIG, summary(0.2, 0.2, 0, 0))
    few = summary(0.2, 0.2, 0, 0)
    few["after"]["n"] = 5
    assert not diagnose(steps(9, {}), CONFIG, few)
    assert not diagnose([], CONFIG, {"steps": 3, "before": None, "after": {"accuracy": 0.1}, "paired": None})


def test_a_long_history_keeps_what_the_rules_need() -> None:
    kept: list[Any] = []
    for row in [*steps(100, {}), {"step": 100, "eval/accuracy": 0.5}, *steps(100, WRONG, first=101)]:
        remember(kept, row)
    assert len(kept) == FIRST + LAST and kept[0]["step"] == 1 and kept[-1]["step"] == 200
    assert names(kept, CONFIG) == ["never_rewarded"]


def test_a_run_folder_is_diagnosed_with_its_settings(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "small", "[sampling]\nmax_new_tokens = 64\n")
    rows = steps(5, {**WRONG, "length/truncated": 1.0})
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cause,) = diagnose_run(run)
    assert cause.name == "truncated" and "sampling.max_new_tokens (now 64)" in cause.remedy


Changes = dict[str, Any]
START: Changes = {"length/mean": 40.0, "optim/updates": 1.0, "policy/clip_fraction": 0.01, "policy/kl": 0.02}
START |= {"mismatch/kl": 1e-6, "mismatch/logprob_abs_diff": 1e-4}
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


SIGNS = {"optim/grad_norm": 1.1, "length/mean": 10.0, "sampling/entropy": 4.5, "status/unparsable": 0.6}
SIGNS |= {"length/truncated": 0.6, "policy/kl": 1.5, "policy/clip_fraction": 0.5}
FALL = {sign: {sign: value} for sign, value in SIGNS.items()}


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
    low = steps(8, {**START, **FALL["optim/grad_norm"], "reward/mean": 0.45}, first=FIRST + 21)
    (cause,) = diagnose([*steps(FIRST, START), *high, *low], CONFIG)
    assert cause.name == "learning_rate_high" and "fell from 0.8" in cause.evidence


def test_a_noisy_reward_does_not_count_as_a_fall() -> None:
    noisy = [row | {"reward/mean": (0.05, 0.75)[row["step"] % 2]} for row in run(FALL["optim/grad_norm"], 8)]
    assert not diagnose(noisy, CONFIG)


FULL = {"memory/host": 0.97}


def test_independent_causes_are_reported_together_the_most_important_first() -> None:
    failing = {**FULL, "status/error": 0.1, "policy/clip_fraction": 0.5, "policy/kl": 3.0}
    rows = [*steps(FIRST, FULL), *steps(LONG, failing, first=FIRST + 1)]
    assert names(rows, CONFIG) == ["judge_fails", "kl_blow_up", "memory_full"]  # clipping follows from the KL
    assert names(rows, CONFIG, summary(0.4, 0.4, 0, 0)) == ["judge_fails", "kl_blow_up", "memory_full"]
    assert names(rows, CONFIG, summary(0.2, 0.6, 20, 0, 1e-5)) == ["memory_full"]  # it has learned nevertheless


def test_the_same_causes_are_found_in_the_whole_run_and_in_what_is_remembered() -> None:
    failing = {"status/timeout": 0.2, "policy/clip_fraction": 0.5}
    rows = [*steps(100, {}), *steps(30, failing, first=101)]
    kept: list[Any] = []
    for row in rows:
        remember(kept, row)
    assert names(kept, CONFIG) == names(rows, CONFIG) == ["judge_fails", "always_clipped"]


def test_a_healthy_step_takes_few_operations() -> None:
    """Counted, because times vary: a step of a run takes about a hundred thousand calls at least."""
    rows = steps(FIRST + LAST, {"policy/clip_fraction": 0.01, "memory/host": 0.4, "time/tokens_per_s": 900.0})
    profile = cProfile.Profile()
    profile.runcall(diagnose, rows, CONFIG)
    assert pstats.Stats(profile).total_calls < 5_000
