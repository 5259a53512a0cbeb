"""Benchmarks of a GRPO step and of training alone, with real components, and their judge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.algos import make_algorithm
from assay.bench import hash_reward, judge_by_hash
from assay.bench import step as step_module
from assay.bench.step import (
    Sequences,
    StepOptions,
    measure_step,
    measure_training,
    parse_settings,
    step_benchmark,
    step_row_id,
)
from assay.bench.workload import Workload
from assay.models.device import is_deterministic
from assay.rewards import JudgePool
from assay.training.learner.pack import rows_of
from assay.training.learner.update import Updater
from assay.types import UserError

TINY = Workload(shape="tiny", prompts=2, samples=3, prompt_tokens=9, new=8)
OPTIONS = StepOptions(device="cpu", dtype="float32", steps=2)
SEQUENCES = Sequences(shape="tiny", sequences=4, tokens=16)


def test_the_row_of_a_step() -> None:
    (row,) = measure_step(TINY, OPTIONS)
    assert row["id"] == step_row_id("step-tiny-2x3x8-prompt_tokens9", OPTIONS) and row["system"] == "assay"
    assert len(row["runs"]) == 2 and min(row["runs"]) <= row["step_s"] <= max(row["runs"])
    assert set(row["parts_s"]) == {"generation", "scoring", "reference", "training", "sync"}
    assert row["parts_s"]["reference"] == 0 and min(v for k, v in row["parts_s"].items() if k != "reference") > 0
    assert row["trained_tokens"] == 2 * 3 * 8
    assert row["peak_gib"] > 0.05 and row["peak_reserved_gib"] is None
    assert (row["token_budget"], row["max_grad_norm"], row["dtype"], row["kl"]) == (16384, 1.0, "float32", 0.0)
    words = "--shape tiny --prompts 2 --samples 3 --prompt-tokens 9 --new 8 --device cpu --dtype float32 --steps 2"
    assert row["command"] == f"assay bench step {words}"


def test_a_step_trains_on_every_answer_and_updates_the_engine() -> None:
    with step_benchmark(TINY, OPTIONS) as bench:
        policy, first = bench.learner.policy, bench.engine.fingerprint()
        before = {name: weight.clone() for name, weight in policy.weights()}
        groups = [bench.step() for _ in range(2)]
        assert bench.engine.info.version == 2 and bench.engine.fingerprint() != first
    rollouts = [rollout for group in groups[0] for rollout in group.rollouts]
    assert all(rollout.advantage and not rollout.masked and rollout.length == 8 for rollout in rollouts)
    assert [rollout.reward for rollout in rollouts] == [hash_reward(rollout.text) for rollout in rollouts]
    assert all(len(rollout.turns[0].context_ids) == 9 for rollout in rollouts)
    contexts = [tuple(group.rollouts[0].turns[0].context_ids) for step in groups for group in step]
    assert len(set(contexts)) == 4  # every step has its own prompts
    assert all(not torch.equal(weight, before[name]) for name, weight in policy.weights())


def test_the_time_of_each_part_is_attributed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part advances a clock by its own number of seconds."""
    clock = [0.0]
    with step_benchmark(TINY, OPTIONS) as bench:
        monkeypatch.setattr(step_module, "now", lambda device: clock[0])
        for owner, name, seconds in (
            (bench.source, "next", 5.0),
            (bench.learner, "update", 7.0),
            (step_module, "sync_weights", 11.0),
        ):
            advance(monkeypatch, clock, owner, name, seconds)
        collected = bench.source.next

        def next_with_generation_time(state: Any) -> Any:
            sampled = collected(state)
            sampled.seconds["generate"] = 3.0
            return sampled

        monkeypatch.setattr(bench.source, "next", next_with_generation_time)
        bench.step()
    assert bench.parts == [{"generation": 3.0, "scoring": 2.0, "reference": 0.0, "training": 7.0, "sync": 11.0}]
    assert bench.seconds == [23.0]


def advance(monkeypatch: pytest.MonkeyPatch, clock: list[float], owner: Any, name: str, seconds: float) -> None:
    original = getattr(owner, name)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        clock[0] += seconds
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slowed)


def test_with_a_kl_term_the_reference_is_timed() -> None:
    (row,) = measure_step(TINY, replace(OPTIONS, kl=0.1, steps=1))
    assert row["kl"] == 0.1 and row["id"].endswith(step_row_id("-kl0.1", OPTIONS)) and row["parts_s"]["reference"] > 0


def test_settings_of_the_run_are_parsed_and_checked() -> None:
    words = ("train.token_budget=64", "train.activation_checkpointing=true")
    assert parse_settings(words) == {"train.token_budget": 64, "train.activation_checkpointing": True}
    assert step_row_id("x", StepOptions(set=words)) == "x-token_budget64-activation_checkpointing"
    for wrong, message in (
        ("train.tokens=3", "train.tokens"),
        ("train.token_budget=many", "train.token_budget"),
        ("train.token_budget", "train.token_budget=8192"),
        ("train.samples=3", "--samples"),
        ("train.process=separate", "one process"),
        ("model.source=x", "--model"),
    ):
        with pytest.raises(UserError, match=message):
            StepOptions(set=(wrong,))


@pytest.mark.parametrize(
    ("work", "options", "message"),
    [
        (replace(TINY, samples=1), {}, "--samples must be at least 2"),
        (replace(TINY, temperature=0.0), {}, "--temperature must be above 0"),
        (replace(TINY, new=600_000), {}, "exceed the maximum length of tiny, 524288"),
        (TINY, {"steps": 0}, "--steps must be at least 1"),
        (TINY, {"kl": -1.0}, "--kl must be 0"),
    ],
)
def test_invalid_steps_are_rejected(work: Workload, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        measure_step(work, replace(OPTIONS, **options))


@pytest.mark.gpu
def test_memory_of_a_gpu_step() -> None:
    work = Workload(shape="0.5b", prompts=2, samples=4, prompt_tokens=32, new=16)
    (row,) = measure_step(work, StepOptions(device="cuda", steps=1))
    assert 8 < row["peak_gib"] <= row["peak_reserved_gib"] < 60  # weights, gradient and two moments are 7.4
    assert row["dtype"] == "bfloat16" and row["trained_tokens"] == 128


def test_the_row_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(step_module, "now", lambda device: next(times))
    budgets: list[int] = []
    update = Updater.update

    def recorded(self: Updater, groups, algo, lr, passes=1):
        budgets.append(self.token_budget)
        return update(self, groups, algo, lr, passes)

    monkeypatch.setattr(Updater, "update", recorded)
    options = replace(OPTIONS, set=("train.token_budget=32",))
    (row,) = measure_training(SEQUENCES, options)
    rows = rows_of([SEQUENCES.group(512, run=0)], make_algorithm("grpo"))  # all tokens but the first are trained
    assert [one.trained for one in rows] == [[0] + [1] * 15] * 4
    assert row["id"] == step_row_id("train-tiny-4x16", options) and "-token_budget32" in row["id"]
    assert (row["runs"], row["tokens_per_s"], row["first_run_tokens_per_s"]) == ([32.0, 64.0], 48.0, 7.1)
    assert budgets == [32] * 3 and row["token_budget"] == 32 and row["trained_tokens"] == 60
    words = "--train-only --shape tiny --sequences 4 --tokens 16 --device cpu --dtype float32 --steps 2"
    assert row["command"] == f"assay bench step {words} --set train.token_budget=32"


def test_hash_rewards_differ_and_are_the_same_in_judge_workers() -> None:
    texts = [str(number) for number in range(500)]
    assert len({hash_reward(text) for text in texts}) == 500 and all(0 <= hash_reward(text) < 1 for text in texts)
    assert 0.4 < sum(map(hash_reward, texts)) / 500 < 0.6
    with JudgePool(judge_by_hash, workers=1) as pool:
        assert [verdict.reward for verdict in pool.judge([(text, "", {}) for text in texts])] == list(
            map(hash_reward, texts)
        )


def test_a_deterministic_step_is_strict_and_leaves_torch_as_it_was() -> None:
    options = StepOptions(device="cpu", dtype="float32", steps=1, set=("train.deterministic=true",))
    with step_benchmark(TINY, options) as bench:
        assert torch.are_deterministic_algorithms_enabled() and is_deterministic()
        bench.step()
    assert not torch.are_deterministic_algorithms_enabled() and not is_deterministic()
    assert "-deterministic" in step_row_id("x", options)
