"""Diagnosis of run folders: examples, shared prompts, damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from metric_rows import steps

from assay.checks import Diagnosis, diagnose_run
from assay.checks.diagnosis import with_examples
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
