"""`assay eval`: models on the same problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns, gpt2_folder

from assay.cli import eval as eval_command
from assay.cli.main import main
from assay.evals.stats import mcnemar, wilson


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    """A finished run whose warm start is enough to tell its checkpoints apart."""
    small = SmallRuns(tmp_path_factory.mktemp("measured"))
    words = ("--sft.steps", 8, "--sft.batch", 8, "--sft.lr", 8e-3, "--optim.lr", 5e-3, "--train.steps", 3)
    assert small.train(*words, "--eval.final_examples", 8, "--save.keep", 9) == 0
    return small


def measured(small: SmallRuns, folder: Path, *words: object) -> list[dict[str, Any]]:
    assert small("eval", *words, "--json", folder / "out.json") == 0
    return json.loads((folder / "out.json").read_text())


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_status(found: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: found[key] for key in keys}


def test_a_runs_checkpoints_measure_as_the_run_measured_itself(small: SmallRuns, tmp_path: Path) -> None:
    first, last = measured(small, tmp_path, "run:small@0", "run:small@last")
    summary = small.summary()
    for found, name in ((first, "before"), (last, "after")):
        assert without_status(found, list(summary[name])) == summary[name]
    assert last["paired"] == {"against": "run:small@0", **summary["paired"]}
    assert "paired" not in first and (first["task"], first["split"]) == ("abacus", "test")


def test_settings_changed_since_the_checkpoint_are_warned_about(small: SmallRuns, tmp_path: Path) -> None:
    config = small.runs / "small" / "config.toml"
    before = config.read_text()
    config.write_text(before.replace("final_examples = 8", "final_examples = 6"))
    try:
        with pytest.warns(UserWarning, match=r"eval\.final_examples changed since step 3: 8 -> 6"):
            assert measured(small, tmp_path, "run:small@0")[0]["n"] == 6
    finally:
        config.write_text(before)


def test_the_paired_test_is_mcnemars_on_the_answers_written(
    small: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("run:small@0", "run:small@last", "run:small@best")
    found = measured(small, tmp_path, *models, "--answers", tmp_path / "answers.jsonl")
    rows = rows_of(tmp_path / "answers.jsonl")
    assert [row["model"] for row in rows] == [model for model in models for _ in range(8)]
    right = {m: [row["status"] == "ok" for row in rows if row["model"] == m] for m in models}
    ids = {m: [row["id"] for row in rows if row["model"] == m] for m in models}
    assert ids[models[0]] == ids[models[1]] == ids[models[2]]
    for entry in found:
        answers = right[entry["model"]]
        assert entry["accuracy"] == sum(answers) / 8 and tuple(entry["ci95"]) == wilson(sum(answers), 8)
        if "paired" in entry:
            expected = mcnemar(right[models[0]], answers)
            assert entry["paired"] == {
                "against": models[0],
                "p_value": expected.p_value,
                "gained": expected.gained,
                "lost": expected.lost,
            }
    said = capsys.readouterr().out
    assert "vs. the first" in said and "95 % interval" in said
    assert {"question", "answer", "completion", "length", "parsed"} <= rows[0].keys()


def test_several_samples_give_pass_and_majority_at_k(
    small: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--eval.samples", 4, "--eval.temperature", 1, "--eval.final_examples", 5)
    (found,) = measured(small, tmp_path, "run:small@last", *words)
    assert found["samples"] == 4 and found["n"] == 5 and list(found["pass_at_k"]) == ["1", "2", "3", "4"]
    said = capsys.readouterr().out
    assert "pass@4" in said and "majority@4" in said
    again = json.loads((tmp_path / "out.json").read_text())
    (tmp_path / "out.json").unlink()
    assert measured(small, tmp_path, "run:small@last", *words) == again  # the same seed, the same answers
    (tmp_path / "out.json").unlink()
    (other,) = measured(small, tmp_path, "run:small@last", *words, "--seed", 5)
    assert other["mean_length"] != found["mean_length"] or other["accuracy"] != found["accuracy"]


def test_options_may_stand_before_the_models(small: SmallRuns, tmp_path: Path) -> None:
    (found,) = measured(small, tmp_path, "--eval.final_examples", 3, "--split", "validation", "run:small@last")
    assert found["n"] == 3 and found["split"] == "validation" and found["model"] == "run:small@last"


def test_prepared_files_are_the_problems(small: SmallRuns, tmp_path: Path) -> None:
    sizes = ["--train-size", "8", "--val-size", "4", "--eval-size", "6"]
    assert main(["data", "prepare", "abacus", "--out", str(tmp_path / "data"), *sizes]) == 0
    file = tmp_path / "data" / "test6.jsonl"
    words = ("--data", file, "--answers", tmp_path / "answers.jsonl")
    (found,) = measured(small, tmp_path, "run:small@last", *words)
    assert found["n"] == 6
    rows = rows_of(tmp_path / "answers.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in rows_of(file)]
    assert all("####" in row["completion"] or row["status"] == "no_answer" for row in rows)
    (tmp_path / "out.json").unlink()
    assert max(row["length"] for row in rows) <= 8  # as the run was trained to answer, whatever the problems
    (named,) = measured(small, tmp_path, "run:small@last", "--task", "abacus", "--eval.final_examples", 6)
    assert named["statuses"] == found["statuses"]  # the file's judge is the task's


def test_gold_answers_in_a_file_of_ones_own_are_judged(small: SmallRuns, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"question": f"Ann has {n} coins .", "gold": n}) + "\n" for n in range(4)))
    (found,) = measured(small, tmp_path, "run:small@last", "--data", file, "--reward.extract", "hash")
    assert found["n"] == 4 and found["task"] == "jsonl"


def test_a_file_is_measured_whole_and_a_split_of_it_if_asked(small: SmallRuns, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"question": f"Ann has {n} coins .", "gold": n}) + "\n" for n in range(20)))
    words = ("run:small@last", "--data", file, "--reward.extract", "hash", "--reward.workers", 0)
    for extra, split, count in (((), "all", 20), (("--split", "test"), "test", 2)):
        (found,) = measured(small, tmp_path, *words, *extra)
        assert (found["split"], found["n"]) == (split, count)
        (tmp_path / "out.json").unlink()
    # A task of one's own need not know of "all": it is asked for its test split.
    (tmp_path / "own.py").write_text(
        "from assay.tasks import Task\nfrom assay.types import Prompt\n\n\nclass Own(Task):\n"
        "    def __init__(self, path: str):\n        self.lines = open(path).read().splitlines()\n"
        "    def prompts(self, split):\n        part = {'test': self.lines[:3], 'train': self.lines[3:]}[split]\n"
        "        return [Prompt(line, ({'role': 'user', 'content': 'Ann'},), '1') for line in part]\n"
    )
    (found,) = measured(small, tmp_path, *words, "--task", f"{tmp_path}/own.py:Own")
    assert (found["split"], found["n"]) == ("test", 3)


def test_any_model_can_be_measured_and_a_folder_against_a_checkpoint(small: SmallRuns, tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "gpt2")
    exported = tmp_path / "exported"
    assert main(["export", "run:small@last", str(exported), "--dir", str(small.runs)]) == 0
    found = measured(small, tmp_path, "run:small@last", exported, folder)
    same = ("accuracy", "mean_length", "statuses", "ci95")
    assert without_status(found[0], same) == without_status(found[1], same)
    assert (found[1]["paired"]["gained"], found[1]["paired"]["lost"], found[1]["paired"]["p_value"]) == (0, 0, 1.0)
    assert found[2]["n"] == found[0]["n"]


def test_an_endless_task_is_measured_on_a_fixed_number(small: SmallRuns, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(eval_command, "GENERATED", 7)
    words = ("--task", "abacus", "--eval.max_new_tokens", 2, "--reward.workers", 0)
    (found,) = measured(small, tmp_path, "run:small@last", *words)
    assert found["n"] == 7


def test_bad_input_is_one_line(small: SmallRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    bare = gpt2_folder(tmp_path / "bare", chat=False)
    cases: list[tuple[tuple[object, ...], str]] = [
        (("run:small@77",), "there is no checkpoint of step 77; available steps: 0, "),
        (("run:small@first",), "after @ comes a step, last or best"),
        (("run:smal@last",), "did you mean 'small'?"),
        (("preset:nano", "--task", "abacus"), "is untrained"),
        ((tmp_path / "nothing",), "no task"),
        ((tmp_path / "nothing", "--task", "abacus"), "nothing"),
        ((bare, "--task", "abacus"), "no chat template"),
        (("run:small@last", "--data", tmp_path / "none.jsonl"), "no file at"),
        (("run:small@last", "--data", empty), "is empty"),
        (("run:small@last", "--json", taken), "exists: choose another"),
        (("run:small@last", "--answers", taken), "exists: choose another"),
        (("run:small@last", "--json", tmp_path / "no" / "out.json"), "does not exist"),
        (("run:small@last", "--task", "abacsu"), "did you mean 'abacus'"),
        (("run:small@last", "--eval.smaples", 3), "did you mean 'eval.samples'"),
        (("run:small@last", "--eval.top_p", 0), "'eval.top_p'"),
        (("run:small@last", "--model.max_length", 8), "leaves no space"),
        (("run:small@last", "--reward.function", f"{small.folder}/reward.py:raises"), "cannot judge"),
        (("run:small@last", "--split", "tset"), "invalid choice"),
        (("run:small@last", "--split", "all"), 'only a single file or list has the split "all"'),
        (("run:small@last", "--eval.samples"), "--eval.samples needs a value"),
        ((), "required"),
    ]
    for words, message in cases:
        capsys.readouterr()
        assert small("eval", *words) == 2, words
        found = capsys.readouterr()
        assert message in found.err and found.err.count("\n") == 1, (words, found.err)
        assert "Traceback" not in found.err + found.out
    assert taken.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == [
        "bare",
        "empty.jsonl",
        "taken.json",
    ]
