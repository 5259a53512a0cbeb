"""A whole step, measured: the real parts do their work, and the time of each is its own."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.bench import step as bench
from assay.bench import trl_peer
from assay.bench.chance import chance, judge_by_chance
from assay.bench.step import Steps, measure_step, one_step
from assay.bench.trainer import BenchedRun, StepOptions, benched_run, numbers_renderer, parse_settings, peaks, row_id
from assay.bench.workload import SHAPES, Workload, random_model
from assay.rewards import JudgePool
from assay.types import UserError

TINY = Workload(shape="tiny", prompts=2, samples=3, prompt_tokens=9, new=8)
CPU = torch.device("cpu")
OPTIONS = StepOptions(device="cpu", dtype="float32", steps=2)
WAIT = 0.3  # seconds, longer than any part of a tiny step


def test_a_row_of_a_step() -> None:
    (row,) = measure_step(TINY, OPTIONS)
    assert row["id"] == row_id("step-tiny-2x3x8-prompt_tokens9", OPTIONS) and row["system"] == "assay"
    assert len(row["runs"]) == 2 and min(row["runs"]) <= row["step_s"] <= max(row["runs"])
    assert set(row["parts_s"]) == {"generation", "scoring", "reference", "training", "sync"}
    assert row["parts_s"]["reference"] == 0 and min(v for k, v in row["parts_s"].items() if k != "reference") > 0
    assert row["trained_tokens"] == 2 * 3 * 8
    assert row["peak_gib"] > 0.05 and row["peak_reserved_gib"] is None
    assert (row["token_budget"], row["max_grad_norm"], row["dtype"], row["kl"]) == (16384, 1.0, "float32", 0.0)
    words = "--shape tiny --prompts 2 --samples 3 --prompt-tokens 9 --new 8 --device cpu --dtype float32 --steps 2"
    assert row["command"] == f"assay bench step {words}"


def test_a_step_trains_on_every_answer_and_the_engine_gets_the_weights() -> None:
    policy = random_model(SHAPES["tiny"], CPU, seed=0)
    before = {name: weight.clone() for name, weight in policy.weights()}
    with benched_run(policy, TINY, OPTIONS) as run:
        first = run.engine.fingerprint()
        steps = Steps()
        groups = [one_step(run, steps) for _ in range(2)]
        assert run.engine.info.version == 2 and run.engine.fingerprint() != first
    rollouts = [rollout for group in groups[0] for rollout in group.rollouts]
    assert all(rollout.advantage and not rollout.masked and rollout.length == 8 for rollout in rollouts)
    assert [rollout.reward for rollout in rollouts] == [chance(rollout.text) for rollout in rollouts]
    assert all(len(rollout.turns[0].context_ids) == 9 for rollout in rollouts)
    contexts = [tuple(group.rollouts[0].turns[0].context_ids) for step in groups for group in step]
    assert len(set(contexts)) == 4  # every step has prompts of its own
    assert all(not torch.equal(weight, before[name]) for name, weight in policy.weights())


def test_parts_are_timed_where_they_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_model(SHAPES["tiny"], CPU, seed=0)
    with benched_run(policy, TINY, OPTIONS) as run:
        one_step(run, Steps())  # judging processes start
        slow(monkeypatch, run.engine, "step")
        slow(monkeypatch, run.collector.judge, "judge")
        slow(monkeypatch, run.learner.updater, "update")
        slow(monkeypatch, bench, "sync_weights")
        steps = Steps()
        one_step(run, steps)
    found = steps.parts[0]
    assert min(found[name] for name in ("generation", "scoring", "training", "sync")) >= WAIT, found
    assert found["reference"] == 0 and sum(found.values()) == pytest.approx(steps.seconds[0])


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    plain = getattr(owner, name)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(WAIT)
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, slowed)


def test_the_step_is_a_median_and_the_first_is_told_apart() -> None:
    steps = Steps([9.0, 3.0, 1.0, 2.0], [{"sync": value} for value in (7.0, 0.3, 0.1, 0.25)])
    assert steps.row() == {"step_s": 2.0, "runs": [3.0, 1.0, 2.0], "first_step_s": 9.0}
    assert steps.parts_row() == {"sync": 0.25}


def test_a_kl_term_has_a_reference_with_its_share_of_the_time() -> None:
    (row,) = measure_step(TINY, replace(OPTIONS, kl=0.1, steps=1))
    assert row["kl"] == 0.1 and row["id"].endswith(row_id("-kl0.1", OPTIONS)) and row["parts_s"]["reference"] > 0


def test_chance_differs_and_its_judge_runs_in_processes_without_torch() -> None:
    texts = [str(number) for number in range(500)]
    assert len({chance(text) for text in texts}) == 500 and all(0 <= chance(text) < 1 for text in texts)
    assert 0.4 < sum(map(chance, texts)) / 500 < 0.6
    with JudgePool(judge_by_chance, workers=1) as pool:
        assert [verdict.reward for verdict in pool.judge([(text, "", {}) for text in texts])] == list(
            map(chance, texts)
        )


def test_words_are_numbers_and_nothing_ends_an_answer() -> None:
    renderer = numbers_renderer(512)
    assert renderer.stop_token_ids == () and renderer.stop == () and renderer.tokenizer.vocab_size == 512
    assert renderer.tokenizer.encode("8 511 77") == [8, 511, 77] and renderer.decode([9, 2, 500]) == "9 500"
    with pytest.raises(UserError, match="above 8"):
        numbers_renderer(8)


def test_settings_of_the_updater_are_read_by_their_kind() -> None:
    assert parse_settings(("token_budget=64", "max_grad_norm=0.5")) == {"token_budget": 64, "max_grad_norm": 0.5}
    assert row_id("x", StepOptions(set=("token_budget=64", "max_grad_norm=1.0"))) == "x-token_budget64"
    for wrong, said in (("tokens=3", "known: .*token_budget"), ("token_budget=many", "such as 16384")):
        with pytest.raises(UserError, match=said):
            StepOptions(set=(wrong,))


@pytest.mark.parametrize(
    ("work", "options", "said"),
    [
        (replace(TINY, samples=1), {}, "--samples must be at least 2"),
        (replace(TINY, temperature=0.0), {}, "--temperature above 0"),
        (replace(TINY, new=40_000), {}, "more than the 32768 of tiny"),
        (TINY, {"steps": 0}, "--steps must be at least 1"),
        (TINY, {"kl": -1.0}, "--kl must be 0"),
    ],
)
def test_wrong_steps_are_named(work: Workload, options: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        measure_step(work, replace(OPTIONS, **options))


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_peer, "version_of", lambda package: None)
    with pytest.raises(UserError, match="pip install trl"):
        measure_step(TINY, replace(OPTIONS, peer="trl"))


def test_the_peer_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def trl_steps(run: BenchedRun, steps: int, our_turn: Any) -> list[float]:
        for _ in range(steps):
            our_turn()
        return [50.0, 40.0, 60.0]

    monkeypatch.setattr(bench, "trl_steps", trl_steps)
    monkeypatch.setattr(bench, "trl_version", lambda: "1.2.3")
    ours, theirs = measure_step(TINY, replace(OPTIONS, peer="trl"))
    assert len(ours["runs"]) == 2 and ours["id"] == theirs["id"] and ours["command"].endswith("--peer trl")
    assert (theirs["system"], theirs["version"], theirs["step_s"], theirs["runs"]) == (
        "trl",
        "1.2.3",
        50.0,
        [40.0, 60.0],
    )
    assert "peak_gib" not in theirs and "trained_tokens" not in theirs


@pytest.mark.peer
def test_trl_does_the_same_step() -> None:
    pytest.importorskip("trl")
    seen: list[int] = []
    with benched_run(random_model(SHAPES["tiny"], CPU, seed=0), replace(TINY, samples=4), OPTIONS) as run:
        seconds = trl_peer.trl_steps(run, 2, lambda: seen.append(1))  # counts its tokens itself
    assert len(seconds) == 3 and min(seconds) > 0 and len(seen) == 2


@pytest.mark.gpu
def test_memory_of_a_gpu_step() -> None:
    work = Workload(shape="0.5b", prompts=2, samples=4, prompt_tokens=32, new=16)
    (row,) = measure_step(work, StepOptions(device="cuda", steps=1))
    assert 8 < row["peak_gib"] <= row["peak_reserved_gib"] < 60  # weights, gradient and two moments are 7.4
    assert row["dtype"] == "bfloat16" and row["trained_tokens"] == 128


def test_memory_of_a_process_is_what_the_system_counts() -> None:
    before = peaks(CPU)["peak_gib"]
    held = torch.ones(2**26)  # a quarter of a GiB, written to
    after = peaks(CPU)["peak_gib"]
    assert before is not None and after is not None and held.sum() > 0
    assert after >= before and after > 0.25
