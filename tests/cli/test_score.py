"""`assay score`: judge completions in files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.cli import score
from assay.cli.main import parse
from assay.types import UserError

Score = Callable[..., tuple[dict[str, Any], list[dict[str, Any]], str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Score:
    def run_score(rows: list[dict[str, Any]] | str, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        """The summary, the rows written, and what was output on stderr."""
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        source.write_text(text, encoding="utf-8")
        workers = () if "--workers" in options else ("--workers", "0")  # in this process, which is faster
        words = [str(source), "--out", str(out), *workers, *options]
        assert score.run(parse(score, "assay score", words)) == 0
        printed = capsys.readouterr()
        written = out.read_text(encoding="utf-8").split("\n")
        assert written.pop() == ""
        return json.loads(printed.out), [json.loads(line) for line in written], printed.err

    return run_score


def statuses(rows: list[dict[str, Any]]) -> list[str]:
    return [row["verdict"]["status"] for row in rows]


def test_rollouts_of_a_run_are_judged_again(run: Score) -> None:
    fields = {"nums": [1, 2], "target": 3}
    line = {"prompt_id": "countdown/train/0", "text": "<answer>1 + 2</answer>", "answer": "3", "fields": fields}
    rows = [line | {"verdict": {"status": "wrong"}}, line | {"text": "3"}]
    summary, written, _ = run(rows, "--task", "countdown", "--unparsable", "-1")
    assert statuses(written) == ["ok", "no_answer"] and summary["mean_reward"] == 0.0
    assert {k: v for k, v in written[1].items() if k != "verdict"} == rows[1]


def test_gsm8k_rows(run: Score) -> None:
    rows = [
        {"id": 7, "gold": "1,200", "completion": r"\boxed{1200}", "extra": {"a": [1, None, "é\u2028"]}},
        {"answer": "6 * 12 = <<6*12=72>>72\n#### 72", "completion": r"so \boxed{72 \text{ clips}}"},
        {"gold": 72, "answer": "ignored", "completion": r"\boxed{73}"},
        {"gold": "72", "completion": "72"},
        {"gold": "72", "completion": r"\boxed{72"},
    ]
    summary, written, _ = run(rows, "--task", "gsm8k", "--workers", "1")
    assert statuses(written) == ["ok", "ok", "wrong", "no_answer", "unparsable"]
    assert [{k: v for k, v in row.items() if k != "verdict"} for row in written] == rows
    assert written[0]["verdict"] == {
        "reward": 1.0,
        "status": "ok",
        "parsed": "1200",
        "parts": {"accuracy": 1.0, "format": 1.0, "length": 1.0},
        "detail": "",
    }
    assert (summary["n"], summary["accuracy"], summary["mean_reward"]) == (5, 0.4, 0.4)
    assert summary["ci95"] == pytest.approx([0.1176, 0.7693], abs=1e-4)  # Wilson's, for 2 of 5
    expected = {"ok": 2, "wrong": 1, "no_answer": 1, "unparsable": 1, "timeout": 0, "error": 0}
    assert summary["status"] == expected


def test_code_rows(run: Score) -> None:
    rows = [
        {"tests": ["assert f(2) == 4"], "completion": f"```python\ndef f(x): return {result}\n```"}
        for result in ("x * x", "x", "(")
    ]
    summary, written, _ = run(rows, "--task", "code")
    assert statuses(written) == ["ok", "wrong", "unparsable"] and summary["correct"] == 1


def test_math_and_abacus_rows(run: Score) -> None:
    rows = [
        {"answer": r"\frac{\sqrt{2}}{2}", "completion": r"\boxed{\frac{1}{\sqrt{2}}}"},
        {"solution": r"thus \boxed{\dfrac{1}{2}}", "completion": r"\boxed{0.5}"},
    ]
    assert statuses(run(rows, "--task", "math")[1]) == ["ok", "ok"]
    rows = [{"gold": "7", "completion": "3 + 4 = 7 #### 7"}]
    assert run(rows, "--task", "abacus", "--force")[0]["accuracy"] == 1.0


def test_lenient_and_values(run: Score) -> None:
    rows = [{"gold": "5", "completion": text} for text in (r"\boxed{5}", r"\boxed{6}", "it is 5", "none")]
    summary, written, _ = run(rows, "--task", "gsm8k", "--lenient", "--correct", "2", "--unparsable", "-1")
    assert statuses(written) == ["ok", "wrong", "ok", "no_answer"]
    assert [row["verdict"]["reward"] for row in written] == [2.0, 0.0, 2.0, -1.0] and summary["mean_reward"] == 0.75


def test_task_and_judge_of_a_config(run: Score, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion, answer): return 0.25\n")
    config = tmp_path / "train.toml"
    settings = 'model = "preset:nano"\n[task]\nname = "gsm8k"\nargs = {solution_style = "hash"}\n'
    config.write_text(f"{settings}[reward]\nstrict = false\nwrong = -1.0\nformat = 0.4\nformat_pattern = '####'\n")
    rows = [{"gold": "5", "completion": text} for text in ("#### 5", "it is 5", "#### 6")]
    summary, written, _ = run(rows, "--config", str(config))
    assert [row["verdict"]["reward"] for row in written] == [1.4, 1.0, -0.6]
    assert (summary["task"], summary["judge"]) == ("gsm8k", "default, lenient")
    options = ("--wrong", "0", "--reward.format", "0", "--force")  # replace the settings of the config
    assert run(rows, "--config", str(config), *options)[0]["mean_reward"] == pytest.approx(2 / 3)
    config.write_text(f"{settings}[reward]\nfunctions = ['task', '{tmp_path}/mine.py:reward']\n")
    assert run(rows, "--config", str(config), "--force")[0]["mean_reward"] == pytest.approx(0.25 + 1 / 3)
    function = ("--reward", f"{tmp_path}/mine.py:reward")
    assert run(rows, "--config", str(config), *function, "--force")[0]["mean_reward"] == 0.25


def test_lone_surrogates_are_preserved(run: Score) -> None:
    text = "x \\ud800 \\udc00\\ud83d \\u0000 \\u2028 \\ud83d\\ude00 \\\\boxed{\\ud800}"
    _, written, _ = run('{"gold": "\\udfff", "\\ud800": "\\udead", "completion": "' + text + '"}\n', "--task", "gsm8k")
    assert written[0]["completion"] == json.loads(f'"{text}"')
    assert written[0]["\ud800"] == "\udead" and written[0]["verdict"]["parsed"] == "\ud800"


def test_user_defined_reward_function(run: Score, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "async def reward(completion, answer, level, **fields):\n"
        "    if level == 9: raise KeyError('nine')\n"
        "    return {'reward': level / 2, 'parsed': answer}\n"
    )
    rows = [{"gold": "g", "completion": "c", "level": level} for level in (1, 2, 9)]
    summary, written, output = run(rows, "--reward", f"{file}:reward")
    assert statuses(written) == ["wrong", "ok", "error"] and summary["mean_reward"] == 0.5
    assert "in.jsonl:3" in output and "KeyError: 'nine'" in output
    with pytest.raises(UserError, match=r"only answer.*nine"):
        run(rows[2:], "--reward", f"{file}:reward", "--force")


def test_disagreements_of_two_judges(run: Score, tmp_path: Path) -> None:
    rows = [
        {"gold": "5", "completion": r"\boxed{5} #### 5"},
        {"gold": "5", "completion": r"\boxed{5} #### 6"},
        {"gold": "5", "completion": "#### 5"},
        {"gold": "5", "completion": "no number"},
    ]
    summary, _, output = run(rows, "--task", "gsm8k", "--against", "hash")
    assert [entry["row"] for entry in summary["disagreements"]] == [1, 2]
    expected = {"status": "ok", "parsed": "5", "against_status": "wrong", "against_parsed": "6"}
    assert expected.items() <= summary["disagreements"][0].items()
    assert summary["agreement"] == 0.5 and "2 disagreements with hash in 4 rows" in output and "no_answer" in output
    assert (summary["same_status"], summary["same_correctness"]) == (2, 2)

    summary, _, _ = run(rows, "--task", "gsm8k", "--against", "lenient", "--force")
    assert [(e["row"], e["against_status"]) for e in summary["disagreements"]] == [(2, "ok")]
    rows_without = [{"gold": "5", "completion": text} for text in (r"\boxed{5}", "#### x", "#### y")]
    summary, _, output = run(rows_without, "--task", "gsm8k", "--against", "lenient", "--force")
    assert len(summary["disagreements"]) == 3 - summary["same_status"] and summary["same_correctness"] == 3
    summary, _, _ = run(rows[:1], "--task", "gsm8k", "--against", "math-verify", "--force")
    assert summary["disagreements"] == [] and summary["against_accuracy"] == 1.0
    (tmp_path / "mine.py").write_text("def reward(completion, answer): return 0")
    summary, _, _ = run(rows, "--task", "gsm8k", "--against", f"{tmp_path / 'mine.py'}:reward", "--force")
    assert [entry["row"] for entry in summary["disagreements"]] == [0, 1, 2, 3]


GOOD = '{"gold": "5", "completion": "#### 5"}\n'


@pytest.mark.parametrize(
    ("text", "options", "word"),
    [
        (GOOD + "{oops\n", ["--task", "gsm8k"], "in.jsonl:2"),
        ('{"gold": "5"}\n', ["--task", "gsm8k"], "in.jsonl:1.*'completion' is missing"),
        ('{"gold": "5", "completion": 5}\n', ["--task", "gsm8k"], "not a string"),
        ('{"completion": "5"}\n', ["--task", "gsm8k"], "'gold'"),
        ('{"gold": [5], "completion": "5"}\n', ["--task", "gsm8k"], "list"),
        ('{"completion": "5", "nums": [1]}\n', ["--task", "countdown"], "'target' is missing"),
        ('{"completion": "5", "answer": "1"}\n', ["--task", "code"], "'tests' is missing"),
        ("", ["--task", "gsm8k"], "empty"),
        ('{"gold": ' + "9" * 5000 + ', "completion": ""}', ["--task", "gsm8k"], "too many digits"),
        ('{"gold": NaN, "completion": ""}', ["--task", "gsm8k"], "not nan"),
        (GOOD, ["--task", "gsm9k"], "gsm9k"),
        (GOOD, [], "--task"),
        (GOOD, ["--task", "gsm8k", "--extract", "boxt"], "boxt"),
        (GOOD, ["--task", "gsm8k", "--against", "boxt"], "boxt"),
        (GOOD, ["--task", "gsm8k", "--reward", "nowhere.py:reward"], "nowhere.py"),
        (GOOD, ["--task", "gsm8k", "--correct", "nan"], "finite"),
    ],
)
def test_bad_input(run: Score, tmp_path: Path, text: str, options: list[str], word: str) -> None:
    with pytest.raises(UserError, match=word):
        run(text, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_bad_files(run: Score, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        score.run(argparse.Namespace(file=str(tmp_path / "missing.jsonl"), out="x.jsonl", force=False))
    for out, word in (
        (tmp_path / "in.jsonl", "is the input file"),
        (tmp_path / "no" / "out.jsonl", "does not exist"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(UserError, match=word):
            run(GOOD, "--task", "gsm8k", "--force", "--out", str(out))
    assert (tmp_path / "in.jsonl").read_text() == GOOD


def test_existing_output_needs_force(run: Score, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("existing")
    with pytest.raises(UserError, match="--force"):
        run(GOOD, "--task", "gsm8k")
    assert (tmp_path / "out.jsonl").read_text() == "existing"
    assert run(GOOD, "--task", "gsm8k", "--extract", "hash", "--force")[0]["accuracy"] == 1.0
