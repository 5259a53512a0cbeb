"""`assay eval`: models on the same problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns, gpt2_folder

from assay.cli.main import main
from assay.evals import mcnemar, wilson


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    """A finished run whose warm start is enough to tell its checkpoints apart."""
    small = SmallRuns(tmp_path_factory.mktemp("measured"))
    words = ("--sft.steps", 8, "--sft.batch", 8, "--sft.lr", 8e-3, "--optim.lr", 5e-3, "--train.steps", 3)
    assert small.train(*words, "--eval.final_examples", 8, "--eval.every", 3, "--save.keep", 9) == 0
    return small


def evaluate(small: SmallRuns, folder: Path, *words: object) -> list[dict[str, Any]]:
    assert small("eval", *words, "--json", folder / "out.json") == 0
    return json.loads((folder / "out.json").read_text())


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def select(result: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: result[key] for key in keys}


def test_settings_changed_since_the_checkpoint_are_warned_about(small: SmallRuns, tmp_path: Path) -> None:
    config = small.runs / "small" / "config.toml"
    before = config.read_text()
    config.write_text(before.replace("final_examples = 8", "final_examples = 6"))
    try:
        with pytest.warns(UserWarning, match=r"eval\.final_examples changed since step 3: 8 -> 6"):
            assert evaluate(small, tmp_path, "run:small@0")[0]["n"] == 6
    finally:
        config.write_text(before)


def test_json_is_all_that_is_printed_to_standard_output(
    small: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small("eval", "run:small@0", "--json", "-") == 0
    shown = capsys.readouterr()
    (result,) = json.loads(shown.out)
    assert result["n"] == 8 and "accuracy" in shown.err
    assert result["accuracy"] == evaluate(small, tmp_path, "run:small@0")[0]["accuracy"]


def test_the_paired_test_is_mcnemars_test_on_the_answers(
    small: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("run:small@0", "run:small@last", "run:small@best")
    result = evaluate(small, tmp_path, *models, "--answers", tmp_path / "answers.jsonl")
    rows = rows_of(tmp_path / "answers.jsonl")
    assert [row["model"] for row in rows] == [model for model in models for _ in range(8)]
    right = {m: [row["status"] == "ok" for row in rows if row["model"] == m] for m in models}
    ids = {m: [row["id"] for row in rows if row["model"] == m] for m in models}
    assert ids[models[0]] == ids[models[1]] == ids[models[2]]
    summary = small.summary()
    for entry, name in zip(result, ("before", "after"), strict=False):  # as the run itself has measured
        assert select(entry, list(summary[name])) == summary[name]
    assert result[1]["paired"] == {"against": models[0], **summary["paired"]}
    for entry in result:
        answers = right[entry["model"]]
        assert entry["accuracy"] == sum(answers) / 8 and tuple(entry["ci95"]) == wilson(sum(answers), 8)
        if "paired" in entry:
            expected = mcnemar(right[models[0]], answers)
            assert entry["paired"] == {"against": models[0], **asdict(expected)}
    output = capsys.readouterr().out
    assert "vs. the first" in output and "95 % interval" in output
    assert {"question", "answer", "completion", "length", "parsed"} <= rows[0].keys()


def test_pass_and_majority_at_k_of_several_samples(
    small: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--eval.samples", 4, "--eval.temperature", 1, "--eval.final_examples", 5)
    (result,) = evaluate(small, tmp_path, "run:small@last", *words)
    assert result["samples"] == 4 and result["n"] == 5 and list(result["pass_at_k"]) == ["1", "2", "3", "4"]
    output = capsys.readouterr().out
    assert "pass@4" in output and "majority@4" in output
    again = json.loads((tmp_path / "out.json").read_text())
    (tmp_path / "out.json").unlink()
    assert evaluate(small, tmp_path, "run:small@last", *words) == again  # the same seed gives the same answers
    (tmp_path / "out.json").unlink()
    (other,) = evaluate(small, tmp_path, "run:small@last", *words, "--seed", 5)
    assert other["mean_length"] != result["mean_length"] or other["accuracy"] != result["accuracy"]
    (tmp_path / "out.json").unlink()
    words = ("--eval.samples", 2, "--eval.final_examples", 1, "--split", "validation")  # at temperature 0
    assert evaluate(small, tmp_path, "run:small@last", *words)[0]["split"] == "validation"
    shown = capsys.readouterr().out
    assert "all 2 samples of a problem are equal" in shown and "1 problem x 2 samples" in shown


def test_prepared_files_and_endless_tasks_are_evaluated(
    small: SmallRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--train-size", "8", "--val-size", "4", "--eval-size", "6"]
    assert main(["data", "prepare", "abacus", "--out", str(tmp_path / "data"), *sizes]) == 0
    file = tmp_path / "data" / "test6.jsonl"
    words = ("--data", file, "--answers", tmp_path / "answers.jsonl")
    (result,) = evaluate(small, tmp_path, "run:small@last", *words)
    assert result["n"] == 6
    rows = rows_of(tmp_path / "answers.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in rows_of(file)]
    assert all(row["parsed"] == row["completion"] for row in rows)  # by the reward function of the run
    (tmp_path / "out.json").unlink()
    assert max(row["length"] for row in rows) <= 8  # the length limit of the run
    (judged,) = evaluate(small, tmp_path, "run:small@last", "--data", file, "--reward.function", "")
    (tmp_path / "out.json").unlink()
    monkeypatch.setattr("assay.build.measure.GENERATED", 6)  # problems of an endless split
    (named,) = evaluate(small, tmp_path, "run:small@last", "--task", "abacus")
    assert named["statuses"] == judged["statuses"] != result["statuses"]  # the file's judge is the task's


def test_a_file_is_evaluated_whole_or_by_split(small: SmallRuns, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"question": f"Ann has {n} coins .", "gold": n}) + "\n" for n in range(20)))
    words = ("run:small@last", "--data", file, "--reward.extract", "hash", "--reward.workers", 0)
    for extra, split, count in (((), "all", 20), (("--split", "test"), "test", 2)):
        (result,) = evaluate(small, tmp_path, *words, *extra)
        assert (result["split"], result["n"], result["task"]) == (split, count, "jsonl")
        (tmp_path / "out.json").unlink()
    # A user-defined task without the split "all" is evaluated on its test split.
    (tmp_path / "own.py").write_text(
        "from assay.tasks import Task\nfrom assay.types import Prompt\n\n\nclass Own(Task):\n"
        "    def __init__(self, path: str):\n        self.lines = open(path).read().splitlines()\n"
        "    def prompts(self, split):\n        part = {'test': self.lines[:3], 'train': self.lines[3:]}[split]\n"
        "        return [Prompt(line, ({'role': 'user', 'content': 'Ann'},), '1') for line in part]\n"
    )
    (result,) = evaluate(small, tmp_path, *words, "--task", f"{tmp_path}/own.py:Own")
    assert (result["split"], result["n"]) == ("test", 3)


def test_folders_and_checkpoints_are_compared(small: SmallRuns, tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "gpt2")
    exported = tmp_path / "exported"
    assert main(["export", "run:small@last", str(exported), "--dir", str(small.runs)]) == 0
    result = evaluate(small, tmp_path, "run:small@last", exported, folder)
    same = ("accuracy", "mean_length", "statuses", "ci95")
    assert select(result[0], same) == select(result[1], same)
    assert (result[1]["paired"]["gained"], result[1]["paired"]["lost"], result[1]["paired"]["p_value"]) == (0, 0, 1.0)
    assert result[2]["n"] == result[0]["n"]


def test_bad_input_is_one_line(small: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("run:small@77",), "there is no checkpoint of step 77; available steps: 0, "),
        (("run:smal@last",), "did you mean 'small'?"),
        (("preset:nano", "--task", "abacus"), "is untrained"),
        ((tmp_path / "nothing",), "no task"),
        ((tmp_path / "nothing", "--task", "abacus"), "nothing"),
        (("run:small@last", "--data", tmp_path / "none.jsonl"), "no file at"),
        (("run:small@last", "--json", taken), "exists: choose another"),
        (("run:small@last", "--json", tmp_path / "no" / "out.json"), "does not exist"),
        (("run:small@last", "--eval.smaples", 3), "did you mean 'eval.samples'"),
        (("run:small@last", "--model.max_length", 8), "leaves no space"),
        (("run:small@last", "--reward.function", f"{small.folder}/reward.py:raises"), "cannot judge"),
        (("run:small@last", "--split", "tset"), "invalid choice"),
        (("run:small@last", "--split", "all"), 'only a single file or list has the split "all"'),
        ((), "required"),
    ]
    for words, message in cases:
        capsys.readouterr()
        assert small("eval", *words) == 2, words
        result = capsys.readouterr()
        assert message in result.err and result.err.count("\n") == 1, (words, result.err)
        assert "Traceback" not in result.err + result.out
    assert taken.read_text() == "mine" and [*tmp_path.iterdir()] == [taken]
