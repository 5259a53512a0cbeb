"""`assay runs compare`: final answers, curves and settings of several runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy.stats import binomtest

from assay.cli.main import main
from assay.cli.runs_compare import blocks
from assay.runs import Run, write_rollouts
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

CONFIG = '[task]\nname = "abacus"\n[optim]\nlr = {lr}\n'


def answered(question: int, correct: bool, split: str = "test") -> Group:
    prompt = Prompt(f"abacus/{split}/{question}", ({"role": "user", "content": f"1 + {question}?"},), str(question + 1))
    turn = Turn([1], Completion([2], [-0.5], [-0.5], Finish.STOP, 0), "2")
    verdict = Verdict(float(correct), Status.OK if correct else Status.WRONG, "2")
    return Group(prompt, [Rollout(prompt, 0, [turn], verdict, float(correct))])


def make_run(folder: Path, name: str, correct: range, questions: range = range(40), lr: float = 1e-4) -> Path:
    """A finished run that answers the questions in `correct` correctly."""
    with Run.create(folder, name, CONFIG.format(lr=lr)) as run:
        for step in range(1, 101):
            row = {"reward/mean": step / 100, "length/truncated": 0.5, "time/wall": 2.0 * step}
            run.log(step, {**row, "eval/accuracy": step / 200} if step % 20 == 0 else row)
        write_rollouts(run.path, 100, [answered(q, q in correct) for q in questions], "eval", split="after-test")
        run.write_status("finished", 100)
        run.write_summary({"after": {"accuracy": len(correct) / len(questions), "ci95": [0.1, 0.9]}})
    return run.path


def compare(folder: Path, *words: object) -> int:
    return main(["runs", *map(str, words), "--runs_dir", str(folder)])


def line_of(out: str, start: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(start))


def test_comparison_prints_the_paired_test_curves_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "one", range(10))
    make_run(tmp_path, "two", range(8, 20), lr=4e-4)
    assert compare(tmp_path, "compare", "one", "two") == 0
    out = capsys.readouterr().out
    p_value = binomtest(8, 18).pvalue
    final = line_of(out, "two with one")
    assert "+5.0 [" in final and "+10 / -8" in final and f"{p_value:.2g}" in final and " 40 " in final
    assert next(line.split() for line in out.splitlines() if line.startswith("optim.lr")) == [
        "optim.lr",
        "0.0001",
        "0.0004",
    ]
    assert "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ 0.01 to 1" in out and "length/truncated" in out
    picture = tmp_path / "compare-one-two.png"
    assert out.splitlines()[-1] == f"Picture of the curves: {picture}" and picture.read_bytes().startswith(b"\x89PNG")


def test_json_and_the_place_of_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs", "one", range(10))
    make_run(tmp_path / "runs", "two", range(8, 20))
    assert compare(tmp_path / "runs", "compare", "one", "two", "--json", "-o", tmp_path / "here.png") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["curves"] == str(tmp_path / "here.png") and (tmp_path / "here.png").is_file()
    (final,) = found["final"]
    assert final["lost"] == [f"abacus/test/{q}" for q in range(8)] and final["questions"] == 40 and final["paired"]
    assert final["p_value"] == pytest.approx(binomtest(8, 18).pvalue) and final["ci95"][0] < 0.05 < final["ci95"][1]
    assert compare(tmp_path / "runs", "compare", "one", "two", "-o", tmp_path / "no" / "folder.png") == 2
    assert "choose another file with -o" in capsys.readouterr().err


def test_names_alone_compare_without_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one", range(10))
    make_run(tmp_path, "two", range(8, 20))
    assert compare(tmp_path, "one", "two") == 0
    out = capsys.readouterr().out
    assert "+10 / -8" in out and "The settings are equal." in out and not list(tmp_path.glob("*.png"))


def test_different_questions_are_said_and_common_ones_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "one", range(10), range(20))
    make_run(tmp_path, "two", range(12), range(5, 30))
    make_run(tmp_path, "other", range(50, 54), range(50, 60))
    assert compare(tmp_path, "one", "two", "other") == 0
    out = capsys.readouterr().out
    assert "only the 15 common questions count (5 only in one, 10 only in two)" in out
    assert "one and other have no question in common, so there is no paired test" in out
    assert next(line for line in out.splitlines() if line.startswith("other with one")).split()[3:6] == [
        "20",
        "and",
        "10",
    ]


@pytest.mark.parametrize(
    "file, content, told",
    [
        ("evals/*", None, "two (finished) has no evaluation after training"),
        ("evals/*", '{"group": 0, "verd', "is damaged"),
        ("evals/*", "[1]\n", "is damaged"),
        ("evals/*", '{"group": 0, "messages": 5, "prompt_id": null}\n', "the final answers cannot be compared"),
        ("evals/*", "", "is empty"),
        ("metrics.jsonl", "{\n", "two: metrics.jsonl: 1 of 1 lines cannot be read"),
        ("metrics.jsonl", None, "+10 / -8"),
        ("config.toml", "= 3", "two: config.toml is not valid TOML"),
    ],
)
def test_damaged_and_unfinished_runs_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None, told: str
) -> None:
    make_run(tmp_path, "one", range(10))
    (path,) = make_run(tmp_path, "two", range(8, 20)).glob(file)
    path.unlink() if content is None else path.write_text(content)
    assert compare(tmp_path, "compare", "one", "two") == 0
    assert told in capsys.readouterr().out
    assert compare(tmp_path, "compare", "two", "one", "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"][1]["run"] == "one"


def test_a_damaged_config_hides_only_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one", range(10))
    (make_run(tmp_path, "two", range(8, 20)) / "config.toml").write_text("= 3")
    make_run(tmp_path, "three", range(10), lr=2e-4)
    assert compare(tmp_path, "compare", "one", "two") == 0
    out = capsys.readouterr().out
    assert "+10 / -8" in line_of(out, "two with one") and line_of(out, "state").split() == [
        *("state", "finished", "damaged", "(finished)")
    ]
    assert line_of(out, "after").count("%") == 2 and out.count("▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ 0.01 to 1") == 2
    assert "The settings of two are not compared: its config.toml cannot be read." in out and "equal" not in out
    assert compare(tmp_path, "compare", "one", "two", "three", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == {"optim.lr": [1e-4, None, 2e-4]}
    assert [bool(run["problems"]) for run in found["runs"]] == [False, True, False]


def test_too_few_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one", range(10))
    for words in (["compare"], ["compare", "one"], ["one", "-o", "x.png"]):
        assert compare(tmp_path, *words) == 2
        assert "at least two runs" in capsys.readouterr().err
    make_run(tmp_path, "compare", range(10))
    assert compare(tmp_path, "compare") == 0 and "Results" in capsys.readouterr().out


def test_runs_with_the_same_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [make_run(tmp_path / folder, "one", range(10)) for folder in ("a", "b")]
    assert compare(tmp_path, "compare", *paths, "-o", tmp_path / "x.png") == 0
    assert f"{paths[1]} with {paths[0]}" in capsys.readouterr().out


def test_blocks_are_means_on_the_scale_of_all_runs() -> None:
    assert blocks([0.0, 1.0], (0.0, 1.0)) == "▁█ " and blocks([0.5] * 100, (0.0, 1.0)) == "▅" * 16 + " "
    assert blocks([3.0, 3.0], (3.0, 3.0)) == "▁▁ " and blocks([1.0], (0.0, 1.0)) == ""
