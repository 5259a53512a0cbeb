"""Diagnosis of run folders: examples, shared prompts, damaged files; rules on results, memory and throughput."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from metric_rows import CONFIG, names, steps, summary

from assay.checks import Diagnosis, diagnose, diagnose_run
from assay.checks.causes import FIRST, LONG
from assay.checks.diagnosis import problems_needed, record_speed, with_examples
from assay.evals import mcnemar
from assay.runs import Run
from assay.runs.directory import RunFiles
from tests.checks.test_steps import WRONG

NO_ANSWER = {"reward": 0.0, "status": "no_answer", "parsed": None, "parts": {}, "detail": "no \\boxed{...}"}


def line(prompt: str, text: str = "I think 12", sample: int = 0, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {prompt}?"}]
    known = {"sample": sample, "prompt_id": prompt, "messages": messages, "text": text, "answer": "12"}
    return {**known, "verdict": NO_ANSWER, "truncated": False, **changes}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path, "one", "[train]\nsamples = 4\n")
    made.close()
    write(made.path / "metrics.jsonl", steps(6, {**WRONG, "status/wrong": 0.3, "status/no_answer": 0.7}))
    return made


def test_the_most_frequent_failure_is_shown_with_three_answers_to_different_prompts(run: Run) -> None:
    wrong = {**NO_ANSWER, "status": "wrong", "parsed": "13", "detail": ""}
    lines = [line(prompt, sample=sample) for prompt in ("1+11", "2+10") for sample in range(3)]
    lines += [line("3+9", "x" * 300 + " the end"), line("4+8", "13", verdict=wrong)]
    write(run.path / "rollouts" / "step-000005.jsonl", [line("9+3", verdict=wrong)])
    write(run.path / "rollouts" / "step-000006.jsonl", lines)
    (cause,) = diagnose_run(run)
    assert cause.name == "never_rewarded"
    assert cause.evidence.endswith("in step 6, 88 % of the verdicts are no_answer (no \\boxed{...})")
    assert [text.partition(":")[0] for text in cause.examples] == ["1+11", "2+10", "3+9"]
    assert cause.examples[0] == '1+11: "I think 12", expected 12' and cause.examples[2].count("x") < 200
    assert 'the end", expected 12' in cause.examples[2]


def test_extracted_answers_and_answers_that_were_cut_off_are_shown(run: Run) -> None:
    wrong = {**NO_ANSWER, "status": "wrong", "parsed": "13"}
    write(run.path / "rollouts" / "step-000001.jsonl", [line("1+1", verdict=wrong), line("1+2", truncated=True)])
    one = with_examples(Diagnosis("equal_rewards", "what", "do"), RunFiles(run.path))
    assert one.examples == ('1+1: "I think 12", extracted 13, expected 12',)
    (cut_off,) = with_examples(Diagnosis("truncated", "what", "do"), RunFiles(run.path)).examples
    assert cut_off.startswith("1+2: ")


def test_problems_in_training_and_evaluation_are_reported(run: Run) -> None:
    write(run.path / "metrics.jsonl", steps(6, {}))
    write(run.path / "rollouts" / "step-000001.jsonl", [line("1+1"), line("1+2")])
    evals = run.path / "evals"
    write(evals / "step-000000-before-test.jsonl", [line("1+1", prompt_id="test/7"), line("5+5"), line("6+6")])
    (cause,) = diagnose_run(run)
    assert cause.name == "leakage" and cause.severity == "warning"
    assert "1 of the 3 test problems" in cause.evidence and "test/7 and 1+1" in cause.evidence
    write(evals / "step-000000-before-test.jsonl", [line("1+1")])
    assert diagnose_run(run)[0].severity == "error"
    (evals / "step-000000-before-test.jsonl").rename(evals / "step-000000-before-train.jsonl")  # as the user asked
    assert not diagnose_run(run)
    (evals / "step-000000-before-train.jsonl").rename(evals / "step-000000-before-test.jsonl")
    (run.path / "config.toml").write_text('[env]\nname = "guess"\n')  # all episodes begin with the same text
    assert not diagnose_run(run)


DAMAGE: dict[str, tuple[str, str]] = {
    "metrics": ("metrics.jsonl", '{"step": 3, "rew'),
    "config": ("config.toml", "not toml ["),
    "summary of another kind": ("summary.json", '{"before": 3, "after": [], "paired": "x", "steps": null}'),
    "rollouts": ("rollouts/step-000006.jsonl", '{"prompt_id": 3}\nnot json\n{"messages": "text", "verdict": 7}\n'),
    "evaluation": ("evals/step-000000-before-test.jsonl", '\xff\n{"messages": [3]}\n'),
    "environment": ("environment.json", "[]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_can_be_read_of_a_damaged_run_is_diagnosed(name: str, run: Run) -> None:
    file, content = DAMAGE[name]
    write(run.path / "rollouts" / "step-000006.jsonl", [line("1+1")])
    path = run.path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if file == "metrics.jsonl" else "") + content)
    assert [cause.name for cause in diagnose_run(run)] == ["never_rewarded"]


def test_an_empty_folder_has_no_causes(tmp_path: Path) -> None:
    assert diagnose_run(Run(tmp_path)) == []


# Results, memory and throughput, and the best throughput of this machine


def test_a_difference_that_may_be_chance_is_a_note_with_the_number_of_problems_needed() -> None:
    (cause,) = diagnose(steps(9, {}), CONFIG, summary(0.5, 0.6, 9, 4, 0.27))
    assert cause.name == "not_significant" and cause.severity == "note"
    assert "+10.0 points on 50 problems (9 gained, 4 lost)" in cause.evidence and "about 210 problems" in cause.remedy
    assert not diagnose(steps(9, {}), CONFIG, summary(0.5, 0.7, 10, 0, 0.002))
    assert not diagnose(steps(9, {}), CONFIG, summary(0.5, 0.5, 4, 4, 1.0))  # no difference to confirm


def evaluated(*accuracies: float) -> list[dict[str, Any]]:
    """A step for each evaluation, with intervals of 5 points on both sides."""
    return [
        row | {"eval/accuracy": accuracy, "eval/low": accuracy - 0.05, "eval/high": accuracy + 0.05}
        for row, accuracy in zip(steps(len(accuracies), {}), accuracies, strict=True)
    ]


def test_a_run_that_ends_far_below_its_best_evaluation_is_reported_even_if_it_has_gained() -> None:
    gain = summary(0.44, 0.52, 30, 10, 1e-4)
    (cause,) = diagnose(evaluated(0.6, 0.75, 0.64), CONFIG, gain)
    assert cause.name == "fell_from_best" and "75.0 % in step 2 to 64.0 % in step 3" in cause.evidence
    assert not diagnose(evaluated(0.6, 0.75, 0.66), CONFIG, gain)  # the intervals overlap
    assert not diagnose(evaluated(0.75, 0.6, 0.75), CONFIG, gain)  # it has recovered
    unstable = [*evaluated(0.75), *steps(28, {"length/truncated": 1.0, "length/mean": 64.0}, first=2)]
    assert not diagnose(unstable, CONFIG, gain)
    assert names([*unstable, *evaluated(0.5)], CONFIG, gain) == ["fell_from_best"]


@pytest.mark.parametrize(("gained", "lost"), [(0.12, 0.04), (0.2, 0.15)])
def test_with_the_needed_number_of_problems_most_tests_are_significant(gained: float, lost: float) -> None:
    """A simulation as reference: the power is 80 %."""
    needed = problems_needed(100, round(100 * gained), round(100 * lost), gained - lost)
    rng = np.random.default_rng(0)
    draws = rng.choice(3, size=(400, needed), p=[gained, lost, 1 - gained - lost])
    found = [mcnemar(draw == 1, draw == 0).p_value < 0.05 for draw in draws]
    assert 0.72 < np.mean(found) < 0.88


def test_needed_problems_follow_the_normal_approximation_and_exceed_those_measured() -> None:
    z = NormalDist()
    exact = ((z.inv_cdf(0.975) * math.sqrt(0.2) + z.inv_cdf(0.8) * math.sqrt(0.2 - 0.1**2)) / 0.1) ** 2
    assert exact <= problems_needed(50, 8, 2, 0.1) * 1.01 and problems_needed(50, 8, 2, 0.1) <= exact * 1.1
    assert problems_needed(9, 1, 0, 1.0) > 9


@pytest.mark.parametrize(
    ("metric", "key"), [("memory/gpu", "train.activation_checkpointing"), ("memory/host", "reward.workers")]
)
def test_memory_that_is_nearly_full_is_reported_whatever_the_result(metric: str, key: str) -> None:
    full = steps(4, {metric: 0.96})
    for arguments in ((full, CONFIG), (full, CONFIG, summary(0.2, 0.6, 20, 0, 1e-5))):
        (cause,) = diagnose(*arguments)
        assert cause.name == "memory_full" and "96 %" in cause.evidence and key in cause.remedy
    assert not diagnose(steps(4, {metric: 0.94}), CONFIG) and not diagnose(full[:3], CONFIG)


def test_generation_that_becomes_much_slower_is_reported() -> None:
    fast, slow = ({"time/tokens_per_s": speed, "time/generate": 2.0} for speed in (1000.0, 240.0))
    rows = [*steps(FIRST, fast), *steps(LONG, slow, first=FIRST + 1)]
    (cause,) = diagnose(rows, CONFIG)
    assert cause.name == "slow" and "240 tokens per second" in cause.evidence and "1,000" in cause.evidence
    assert not diagnose([row | {"time/generate": 0.5} for row in rows], CONFIG)  # too short to measure
    twice = steps(LONG, {**slow, "time/tokens_per_s": 260.0}, first=FIRST + 1)
    assert not diagnose([*steps(FIRST, fast), *twice], CONFIG)
    assert names(steps(9, {}), CONFIG) == []


@pytest.mark.parametrize(
    ("metric", "engine", "key"),
    [
        ("async/engine_idle", "native", "source.max_staleness"),
        ("async/engine_idle", "vllm", "source.max_staleness"),
        ("async/learner_idle", "vllm", "start more servers"),
        ("async/learner_idle", "native", ""),  # both halves share the hardware: somebody has to wait
    ],
)
def test_an_asynchronous_run_in_which_one_half_waits_for_the_other_is_reported(
    metric: str, engine: str, key: str
) -> None:
    config = {**CONFIG, "engine": {"name": engine}, "source": {"name": "async", "max_staleness": 1}}
    rows = steps(LONG, {metric: 0.6})
    found = diagnose(rows, config)
    assert [cause.name for cause in found] == (["starving"] if key else [])
    assert all("60 % of the time" in cause.evidence and key in cause.remedy for cause in found)
    assert not diagnose(rows[1:], config) and not diagnose(steps(LONG, {metric: 0.4}), config)


SETTINGS = '[model]\nsource = "preset:nano"\n[train]\nsamples = {samples}\n'


def make_run(folder: Path, name: str, speed: float, samples: int = 4, seconds: float = 2.0) -> Run:
    run = Run.create(folder, name, SETTINGS.format(samples=samples))
    rows = steps(8, {"time/tokens_per_s": speed, "time/generate": seconds})
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.close()
    return run


def record(run: Run) -> None:
    files = RunFiles(run.path)
    record_speed(files, files.readable_metrics(), files.config())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_run_is_compared_with_the_best_one_of_the_same_work(tmp_path: Path) -> None:
    for name, speed in (("first", 800.0), ("best", 1000.0), ("other", 900.0)):
        record(make_run(tmp_path, name, speed))
    (cause,) = diagnose_run(make_run(tmp_path, "slow", 200.0))
    assert cause.name == "slow" and "1,000 in run best" in cause.evidence and "200 tokens" in cause.evidence
    assert not diagnose_run(make_run(tmp_path, "half", 500.0))
    assert not diagnose_run(make_run(tmp_path, "other-work", 200.0, samples=8))


def test_runs_of_other_machines_are_not_compared(tmp_path: Path) -> None:
    record(make_run(tmp_path, "best", 1000.0))
    slow = make_run(tmp_path, "slow", 200.0)
    assert diagnose_run(slow)
    file = slow.path / "environment.json"
    content = json.loads(file.read_text())
    content["machine"]["host"] = "elsewhere"
    file.write_text(json.dumps(content))
    assert not diagnose_run(slow)
    file.unlink()
    assert not diagnose_run(slow)


def test_short_steps_are_not_recorded_and_a_missing_cache_is_no_error(tmp_path: Path, cache: Path) -> None:
    record(make_run(tmp_path, "short", 1000.0, seconds=0.1))
    assert not cache.exists()
    cache.write_text("not a folder")
    record(make_run(tmp_path, "run", 1000.0))
    assert not diagnose_run(make_run(tmp_path, "slow", 200.0))
