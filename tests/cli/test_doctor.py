"""`assay doctor`: output, exit codes, and folders that are damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from permissions import public_folder, without_permission

from assay.cli.main import main
from assay.runs import Run

FAILED = {
    **{"reward/mean": 0.0, "reward/std": 0.0, "reward/range": 0.0, "reward/correct": 0.0, "status/no_answer": 1.0},
    **{"groups/zero_variance": 1.0, "advantage/zero": 1.0, "weights/changed": 0.0, "length/truncated": 0.0},
}
LINE = {"sample": 0, "prompt_id": "p/1", "messages": [], "text": "12\x1b[2J", "answer": "12"}
LAST = "rollouts/step-000006.jsonl"
VERDICT = {"reward": 0.0, "status": "no_answer", "parsed": None, "parts": {}, "detail": "no box"}


def make_run(folder: Path, metrics: dict[str, Any] | None = None, name: str = "one") -> Path:
    with Run.create(folder / "runs", name, '[reward]\nextract = "boxed"\n') as run:
        for step in range(1, 7):
            run.log(step, {**(metrics or {}), "sampling/answers": 32 * step})
        (run.path / "rollouts").mkdir()
        line = json.dumps({**LINE, "verdict": VERDICT}) + "\n"
        (run.path / "rollouts" / "step-000006.jsonl").write_text(line)
    return run.path


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("target", ["runs/one", "run:one@last"])
def test_a_run_is_found_by_name_and_by_path(target: str, tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    make_run(tmp_path, FAILED)
    first, _, heading, *lines = stdout_of(main(["doctor", target]), 1).splitlines()
    assert first == "run one (stopped, 6 steps): 1 error" and heading == "ERROR  no_answer"
    assert lines[0].startswith("  found: 100 % of the answers in all 6 steps") and "no box" in lines[0]
    assert lines[1] == '  e.g. p/1: "12\\u001b[2J", expected 12'
    assert lines[2].startswith("  to do: ") and "reward.extract (now boxed)" in lines[2] and len(lines) == 3


def test_notes_do_not_change_the_exit_code(tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    path = make_run(tmp_path)
    results = {"before": {"accuracy": 0.5, "n": 50}, "after": {"accuracy": 0.6, "n": 50}, "steps": 6}
    (path / "summary.json").write_text(json.dumps({**results, "paired": {"p_value": 0.3, "gained": 9, "lost": 4}}))
    content = json.loads(stdout_of(main(["doctor", "one", "--json"])))
    (found,) = content["findings"]
    assert content["target"] == "one" and found["name"] == "not_significant" and found["severity"] == "note"
    assert [*found] == ["name", "evidence", "remedy", "severity", "examples"]


def test_a_config_is_checked_with_overrides(tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    lines = ['model = "preset:nano"', 'device = "cpu"', "[task]", 'name = "abacus"', "[optim]", "lr = 1e-3"]
    (tmp_path / "small.toml").write_text("\n".join([*lines, "[eval]", "final_examples = 9"]))
    assert stdout_of(main(["doctor", "small.toml"])) == "config small.toml: no problems found\n"
    assert "WARNING  learning_rate_low" in stdout_of(main(["doctor", "small.toml", "--optim.lr", "1e-15"]), 1)
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stderr_of: Callable[..., str]
) -> None:
    make_run(tmp_path)
    assert main(["doctor", "two"]) == 2 and "unknown run 'two'" in capsys.readouterr().err
    assert main(["doctor", "one", "--optim.lr", "1"]) == 2 and "is a run" in capsys.readouterr().err
    assert main(["doctor", "x" * 5000]) == 2
    capsys.readouterr()
    assert "there is no file configs/two.toml" in stderr_of(main(["doctor", "configs/two.toml"]))


def test_a_failed_run_shows_its_error(tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    with Run.create(tmp_path / "runs", "one", "") as run:
        run.write_status("failed", 5, "the environment\nfailed: fix it")
    first, second = stdout_of(main(["doctor", "one"]), 1).splitlines()
    assert first == "run one (failed, 0 steps): ended with an error"
    assert second == "  ended with: the environment failed: fix it"
    assert json.loads(stdout_of(main(["doctor", "one", "--json"]), 1))["error"] == "the environment\nfailed: fix it"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("metrics.jsonl", "named pipe"), ("config.toml", "folder"), ("summary.json", "link"), (LAST, "named pipe")],
)
def test_what_is_not_a_file_is_named_and_the_rest_is_diagnosed(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    path = make_run(tmp_path, FAILED)
    (path / name).unlink(missing_ok=True)
    {"folder": os.mkdir, "named pipe": os.mkfifo, "link": lambda place: os.symlink("nowhere", place)}[kind](path / name)
    assert main(["doctor", str(path)]) == 1  # a pipe that is opened would wait forever
    first, second, *lines = capsys.readouterr().out.splitlines()
    what = "is a link to a file that does not exist" if kind == "link" else f"is a {kind}"
    assert second == f"  not diagnosed: {name} {what}"
    if name == "metrics.jsonl":
        assert first == "run one (stopped, 0 steps): no problems found in what can be read" and not lines
    else:
        assert first.endswith(": 1 error") and "ERROR  no_answer" in lines
    assert json.loads(stdout_of(main(["doctor", str(path), "--json"]), 1))["unreadable"] == [f"{name} {what}"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.toml", "not toml [", "config.toml is not valid TOML"),
        ("metrics.jsonl", "{damaged\n", "metrics.jsonl: 1 of 7 lines cannot be read"),
        ("environment.json", '{"resumed": 3}', "some rules cannot be applied: a file has unexpected values (TypeError"),
    ],
)
def test_damaged_files_are_named_and_the_rest_is_diagnosed(
    name: str, content: str, told: str, tmp_path: Path, stdout_of: Callable[..., str]
) -> None:
    path = make_run(tmp_path, FAILED)
    (path / name).write_text(((path / name).read_text() if name == "metrics.jsonl" else "") + content)
    output = stdout_of(main(["doctor", str(path)]), 1)
    assert f"  not diagnosed: {told}" in output and "ERROR  no_answer" in output


def test_files_and_folders_without_permission_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with public_folder() as folder:
        path = make_run(folder, FAILED)
        with without_permission(path / "config.toml", path / "rollouts"):
            assert main(["doctor", str(path)]) == 1
        output = capsys.readouterr().out
        assert "  not diagnosed: config.toml cannot be read (permission denied)" in output
        assert "  not diagnosed: rollouts cannot be listed (permission denied)" in output
        assert "ERROR  no_answer" in output
        with without_permission(path / "metrics.jsonl"):
            assert main(["doctor", str(path)]) == 1
        first, second = capsys.readouterr().out.splitlines()
        assert first == "run one (stopped, 0 steps): no problems found in what can be read"
        assert second == "  not diagnosed: metrics.jsonl cannot be read (permission denied)"
        for denied in (path, path.parent):
            with without_permission(denied):
                assert main(["doctor", str(path)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{denied} cannot be read (permission denied): run chmod -R u+rX {denied} if" in line
