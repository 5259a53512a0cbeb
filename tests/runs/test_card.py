"""The model card: accuracies of the exported step only, and nothing that belongs to the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.build.export import Contents, model_card
from assay.runs import Run

CONFIG = """
runs_dir = "/home/me/runs"
[model]
source = "org/base"
[task]
name = "jsonl"
path = "https://user:secret@host/data?key=secret"
[algo]
recipe = "grpo"
"""
SUMMARY: dict[str, Any] = {
    "steps": 4,
    "split": "test",
    "before": {"accuracy": 0.25, "ci95": [0.1, 0.4], "n": 40},
    "after": {"accuracy": 0.5, "ci95": [0.35, 0.65], "n": 40},
    "paired": {"p_value": 0.0123, "gained": 12, "lost": 2},
}
CONTENTS = Contents("tuned", "run:toy@best", "A folder", {"assay": "9.9"})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create(tmp_path, "toy", CONFIG)
    run.log(2, {"eval/accuracy": 0.75, "eval/low": 0.5, "eval/high": 0.9})
    run.write_summary(SUMMARY)
    return run


def rows(card: str) -> list[list[str]]:
    lines = [line for line in card.splitlines() if line.startswith("| ") and "%" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_last_step_has_the_final_accuracies_and_the_paired_test(run: Run) -> None:
    card = model_card(CONTENTS, run.path, 4)
    assert rows(card) == [
        ["before", "test", "25.0 %", "10.0 to 40.0 %", "40"],
        ["after 4 steps", "test", "50.0 %", "35.0 to 65.0 %", "40"],
    ]
    assert "+25.0 points" in card and "12 gained, 2 lost, paired p = 0.012" in card


def test_an_earlier_step_does_not_have_the_accuracy_of_the_last_one(run: Run) -> None:
    card = model_card(CONTENTS, run.path, 2)
    assert rows(card)[1] == ["after 2 steps", "validation during training", "75.0 %", "50.0 to 90.0 %", ""]
    assert "50.0 %  |" not in card and "paired p" not in card
    assert len(rows(model_card(CONTENTS, run.path, 0))) == 1


def test_a_fine_tuned_model_was_not_trained_by_rewards(run: Run) -> None:
    run.write_summary(SUMMARY | {"steps": 0, "algorithm": "sft", "sft": {"steps": 200}})
    card = model_card(CONTENTS, run.path, 0)
    assert "(`sft`), 200 steps." in card and rows(card)[1][0] == "after 200 steps"
    assert "rlvr" not in card and "reinforcement-learning" not in card


def test_settings_are_listed_without_credentials_and_folders_of_the_machine(run: Run) -> None:
    card = model_card(CONTENTS, run.path, 4)
    assert 'model.source = "org/base"' in card and 'task.name = "jsonl"' in card
    assert "secret" not in card and "/home/me" not in card and "runs_dir" not in card
    assert 'base_model: "org/base"' in card
    assert "torch" in card.partition("## Versions of the training")[2]


def test_files_that_cannot_be_read_leave_their_sections_empty(run: Run) -> None:
    for name in ("config.toml", "summary.json", "metrics.jsonl", "environment.json"):
        (run.path / name).write_text("{[")
    assert "no evaluation of these weights" in model_card(CONTENTS, run.path, 4)


def test_the_card_loads_as_one_of_the_hub() -> None:
    from huggingface_hub import ModelCard

    for contents, library in (
        (CONTENTS, "transformers"),
        (Contents("t", "s", "f", {}, file="t.gguf"), "gguf"),
        (Contents("t", "s", "f", {}, base='odd "name"'), "peft"),
    ):
        data = ModelCard(model_card(contents)).data.to_dict()
        assert data["library_name"] == library and data["tags"] == ["assay"]
        assert data.get("base_model") == (contents.base or None)
