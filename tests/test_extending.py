"""The examples of docs/extending.md work as shown, with the numbers of files and lines that the page states."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from docs_parts import ROOT, blocks, command_lines
from small_run import CONFIG, SmallRuns

from assay.cli.main import main
from assay.runs.directory import read_metrics
from assay.runs.rollouts import read_rollouts
from assay.training import run as train_run
from assay.types import Rollout

PAGE = (ROOT / "docs" / "extending.md").read_text()
TERM, ADVANTAGE = "A loss term with its own per-token input", "An advantage"
TASK, ENVIRONMENT, ENGINE, FAMILY = "A task", "An environment", "An engine backend", "A model family"
PACKAGES = {TASK: "tasks", ENVIRONMENT: "envs", ENGINE: "engine"}  # to which the first file of the section moves


LONG = ("--sampling.max_new_tokens", "120")  # answers that are long enough to repeat n-grams


def section(title: str) -> tuple[str, str]:
    """What a section says of the user's own files, and of the package."""
    (text,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
    own, _, package = text.partition("**In the package.**")
    return own, package


def write_named(text: str, language: str, folder: Path) -> list[Path]:
    """Write each block to the file that its first line names."""
    files = []
    for code in blocks(text, language):
        file = folder / code.splitlines()[0].removeprefix("# ")
        file.write_text(code)
        files.append(file)
    return files


def apply_diff(diff: str, folder: Path) -> None:
    """Apply hunks without line numbers: their context has to be in the file exactly once."""
    header, *hunks = re.split(r"^@@\n", diff, flags=re.MULTILINE)
    file = folder / header.splitlines()[1].removeprefix("+++ b/")
    source = file.read_text()
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+").removesuffix("\n")
        after = "".join(line[1:] or line for line in lines if line[0] != "-").removesuffix("\n")
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    file.write_text(source)


def code_lines(code: str) -> int:
    lines = [line for line in code.splitlines() if line.strip() and line.strip() != "+"]
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    return len(added) if code.startswith("---") else len(lines) - 1  # the first line names the file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_run, "draw_curves", lambda path: None)
    SmallRuns(tmp_path)  # writes small.toml and its reward function
    return tmp_path


def config(folder: Path, text: str) -> Path:
    """A small run with the settings of the section's TOML block."""
    (file,) = write_named(text, "toml", folder)
    file.write_text(CONFIG.format(folder=folder) + file.read_text())
    return file


def train(folder: Path, file: Path, *words: str) -> Path:
    assert main(["train", str(file), "--runs_dir", str(folder / "runs"), *words]) == 0
    name = words[words.index("--name") + 1] if "--name" in words else file.stem
    return folder / "runs" / name


def train_with_package(folder: Path, file: Path, *words: str) -> Path:
    """The same with the package as it is in `folder`, in another process."""
    command = [sys.executable, "-m", "assay", "train", str(file), "--runs_dir", str(folder / "runs"), *words]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / words[words.index("--name") + 1]


def patched_package(folder: Path, text: str) -> None:
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for diff in blocks(text, "diff"):
        apply_diff(diff, folder)
    write_named(text, "python", folder / "src")


def losses(run: Path) -> list[tuple[float, float]]:
    return [(row["loss/repetition"], row["repetition/fraction"]) for row in read_metrics(run) if "loss/policy" in row]


def repeated(rollout: Rollout, n: int) -> list[bool]:
    """By the text of the n-grams, token by token."""
    ids, seen, found = rollout.turns[0].completion.token_ids, [], []
    for end in range(1, len(ids) + 1):
        words = " ".join(map(str, ids[max(end - n, 0) : end])) + f"/{min(end, n)}"
        found.append(words in seen)
        seen.append(words)
    return found


def test_a_loss_term_in_a_file_of_the_users_own(folder: Path) -> None:
    own, _ = section(TERM)
    write_named(own, "python", folder)
    run = train(folder, config(folder, own), *LONG)
    for step, (loss, fraction) in enumerate(losses(run), 1):
        marks = [mark for group in read_rollouts(run, step) for r in group.rollouts for mark in repeated(r, 2)]
        assert fraction == pytest.approx(sum(marks) / len(marks)) and 0 < fraction < 1
        assert 0 < loss < 0.05 * fraction * 2  # coefficient x probability, averaged over answers


@pytest.mark.slow
def test_a_loss_term_in_two_files_of_the_package_and_in_a_separate_update_process(folder: Path) -> None:
    own, package = section(TERM)
    write_named(own, "python", folder)
    file = config(folder, own)
    expected = losses(train(folder, file, *LONG))
    apart = train(folder, file, *LONG, "--name", "apart", "--train.process", "separate")
    assert losses(apart) == expected and len(expected) == 2
    patched_package(folder, package)
    settings = (*LONG, "--algo.repetition_coef", "0.05", "--algo.repetition_ngram", "2", "--name", "built-in")
    assert losses(train_with_package(folder, folder / "small.toml", *settings)) == expected
    changed = [path for path in (folder / "src").rglob("*.py") if differs(path, folder)]
    assert len(changed) == 2, changed


@pytest.mark.parametrize("where", ["own", pytest.param("package", marks=pytest.mark.slow)])
def test_an_advantage(where: str, folder: Path) -> None:
    own, package = section(ADVANTAGE)
    if where == "own":
        write_named(own, "python", folder)
        run = train(folder, config(folder, own))
    else:
        patched_package(folder, package)
        settings = ("--algo.recipe", "dr_grpo", "--algo.advantage", "above_median", "--name", "built-in")
        run = train_with_package(folder, folder / "small.toml", *settings)
        assert [path.name for path in (folder / "src").rglob("*.py") if differs(path, folder)] == ["advantages.py"]
    for group in read_rollouts(run, 1):
        middle = sorted(group.rewards)[1]
        assert [r.advantage for r in group.rollouts] == [float(r > middle) - float(r < middle) for r in group.rewards]


def differs(path: Path, folder: Path) -> bool:
    original = ROOT / path.relative_to(folder)
    return not original.exists() or original.read_text() != path.read_text()


def run_commands(folder: Path, title: str) -> Path:
    """Write the files of a section and run its commands. Returns the folder of the run that they train."""
    own, _ = section(title)
    (module,) = write_named(own, "python", folder)
    write_named(own, "toml", folder)
    for words in command_lines(own):
        if words[1:3] != ["env", "play"]:
            assert main(words[1:]) == 0, words
    return folder / "runs" / module.stem


def built_in(folder: Path, title: str, name: str) -> Path:
    """Make the changes to the package and train with them. `name` replaces the name by path in the config."""
    own, package = section(title)
    files = write_named(own, "python", folder)
    patched_package(folder, package)
    shutil.move(files[0], folder / "src" / "assay" / PACKAGES[title] / files[0].name)
    (file,) = write_named(own, "toml", folder)
    path = re.search(r'"(\w+\.py:\w+)"', file.read_text())
    assert path is not None
    file.write_text(file.read_text().replace(path[1], name))
    if title == ENGINE:
        file.write_text(CONFIG.format(folder=folder) + file.read_text())
    changed = [path for path in (folder / "src").rglob("*.py") if differs(path, folder)]
    assert len(changed) == 1 + len(blocks(package, "diff"))
    return train_with_package(folder, file, "--name", "built-in")


@pytest.mark.slow
def test_a_task(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_commands(folder, TASK)
    assert '"ok": true' in capsys.readouterr().out  # of `assay data check`
    for step in (1, 2):
        groups = read_rollouts(run, step)
        assert len(groups) == 4 and all(len(group.rollouts) == 4 for group in groups)
        for group in groups:
            a, b = group.prompt.id.removeprefix("digit_sum/")
            assert group.prompt.messages[0]["content"] == f"{a} + {b} = ?"
            for rollout in group.rollouts:
                assert rollout.verdict and rollout.verdict.correct == (
                    rollout.text.strip() == f"#### {int(a) + int(b)}"
                )


@pytest.mark.slow
def test_an_environment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_commands(folder, ENVIRONMENT)
    shown = capsys.readouterr().out
    assert shown.count("ok ") == 8 and "a perfect policy reaches max_return" in shown  # of `assay env check`
    groups = read_rollouts(run, 1)
    assert len(groups) == 4 and all(len(group.rollouts) == 4 for group in groups)
    for group in groups:
        first = int(group.prompt.messages[0]["content"])
        for rollout in group.rollouts:
            right = [turn.text.strip() == str(first + 1 + 2 * place) for place, turn in enumerate(rollout.turns)]
            assert rollout.reward == pytest.approx(sum(right) / 2) and all(right[:-1])


@pytest.mark.slow
def test_an_engine_backend_passes_the_conformance_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = section(ENGINE)
    monkeypatch.syspath_prepend(str(folder))
    _, check = write_named(own, "python", folder)
    found: dict[str, object] = {}
    exec(compile(check.read_text(), check.name, "exec"), found)
    assert found["problems"] == []


@pytest.mark.slow
def test_training_with_an_own_engine_backend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, _ = section(ENGINE)
    write_named(own, "python", folder)
    run = train(folder, config(folder, own), "--train.steps", "1", "--sampling.max_new_tokens", "8")
    shown = " ".join(capsys.readouterr().out.split())
    assert "sampling/entropy is left out" in shown and "sampling/kept_mass is left out" in shown
    assert "exact_seeds" not in shown and "not verified" not in shown
    (row,) = [row for row in read_metrics(run) if "loss/policy" in row]
    assert row["mismatch/logprob_abs_diff_max"] < 1e-4 and "sampling/entropy" not in row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "part", "name"),
    [(TASK, "task", "digit_sum"), (ENVIRONMENT, "env", "count_up"), (ENGINE, "engine", "generate")],
)
def test_built_in_by_the_changes_that_the_page_shows(folder: Path, title: str, part: str, name: str) -> None:
    run = built_in(folder, title, name)
    assert tomllib.loads((run / "config.toml").read_text())[part]["name"] == name
    assert len(read_rollouts(run, 1)) > 0


@pytest.mark.slow
def test_a_model_family_equals_transformers_in_all_forward_passes(folder: Path) -> None:
    _, package = section(FAMILY)
    (test,) = write_named(package, "python", folder)
    (diff,) = blocks(package, "diff")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    before = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert before.returncode == 1, before.stdout + before.stderr  # without the entry
    apply_diff(diff, folder)
    after = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert after.returncode == 0 and "4 passed" in after.stdout, after.stdout + after.stderr


@pytest.mark.parametrize("title", [TERM, ADVANTAGE, TASK, ENVIRONMENT, ENGINE, FAMILY])
def test_the_page_counts_files_and_lines(title: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| [") and title.lower() in line.lower()]
    stated = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) files?, (\d+) lines", row)]
    own, package = section(title)
    moved = blocks(own, "python")[:1] if title in PACKAGES else []
    codes = [blocks(own, "python"), moved + blocks(package, "diff") + blocks(package, "python")]
    assert stated == [(len(parts), sum(map(code_lines, parts))) for parts in codes if parts]
