"""The examples of extensions work as shown, with the numbers of files and lines that the pages state."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from docs_parts import ROOT, blocks, command_lines
from small_run import CONFIG, SmallRuns

from assay.cli.main import main
from assay.runs.directory import read_metrics
from assay.runs.rollouts import read_rollouts
from assay.types import Rollout

PAGES = ("guides/own-algorithm.md", "guides/package.md", "reference/backends.md")
TEXT = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
TERM, ADVANTAGE = "A loss term with its own per-token input", "An advantage"
TASK, ENVIRONMENT, ENGINE, FAMILY = "A task", "An environment", "An engine backend", "A model family"
PACKAGES = {TASK: "tasks", ENVIRONMENT: "envs", ENGINE: "engine"}  # to which the first file of the section moves


LONG = ("--sampling.max_new_tokens", "120")  # answers that are long enough to repeat n-grams


def section(title: str) -> tuple[str, str]:
    """What a section says of the user's own files, and of the package."""
    (text,) = [part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> Path:
    monkeypatch.chdir(tmp_path)
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


MAIN = (
    "import json, sys; from assay.cli.main import main; sys.exit(any(main(words) for words in json.loads(sys.argv[1])))"
)


def train_with_package(folder: Path, configs: dict[str, tuple[Path, Sequence[str]]]) -> None:
    """Train with the package as it is in `folder`, in another process. `configs`: files and options, by run."""
    common = ["--runs_dir", str(folder / "runs"), "--name"]
    words = [["train", str(file), *options, *common, name] for name, (file, options) in configs.items()]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MAIN, json.dumps(words)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def copied_package(folder: Path) -> None:
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))


def patch_package(folder: Path, title: str) -> None:
    """Make the changes that a section shows, which change as many files as it says."""
    own, package = section(title)
    before = changed_files(folder)
    for diff in blocks(package, "diff"):
        apply_diff(diff, folder)
    write_named(package, "python", folder / "src")
    if title in PACKAGES:
        first, *_ = write_named(own, "python", folder)
        shutil.move(first, folder / "src" / "assay" / PACKAGES[title] / first.name)
    added = len(blocks(package, "python")) + (title in PACKAGES)
    assert len(changed_files(folder) - before) == added + len(blocks(package, "diff"))


def changed_files(folder: Path) -> set[Path]:
    originals = ((path, ROOT / path.relative_to(folder)) for path in (folder / "src").rglob("*.py"))
    return {path for path, one in originals if not one.exists() or one.read_text() != path.read_text()}


def renamed_config(folder: Path, title: str, name: str) -> Path:
    """The config of a section with the name of the built-in object in place of its path."""
    own, _ = section(title)
    (file,) = write_named(own, "toml", folder)
    path = re.search(r'"(\w+\.py:\w+)"', file.read_text())
    small = CONFIG.format(folder=folder) if title == ENGINE else ""
    file.write_text(small + file.read_text().replace(path[1], name))
    return file


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


def test_an_advantage_in_a_file_of_the_users_own(folder: Path) -> None:
    own, _ = section(ADVANTAGE)
    write_named(own, "python", folder)
    assert_above_median(train(folder, config(folder, own)))


def assert_above_median(run: Path) -> None:
    for group in read_rollouts(run, 1):
        middle = sorted(group.rewards)[1]
        assert [r.advantage for r in group.rollouts] == [float(r > middle) - float(r < middle) for r in group.rewards]


@pytest.mark.slow
def test_built_in_and_in_a_separate_update_process(folder: Path) -> None:
    """All changes that the page shows, in one copy of the package."""
    copied_package(folder)
    for title in (TERM, ADVANTAGE, TASK, ENVIRONMENT, ENGINE):
        patch_package(folder, title)
    small, term = folder / "small.toml", ("--algo.repetition_coef", "0.05", "--algo.repetition_ngram", "2")
    names = {TASK: ("task", "digit_sum"), ENVIRONMENT: ("env", "count_up"), ENGINE: ("engine", "generate")}
    train_with_package(
        folder,
        {
            "term": (small, (*LONG, *term)),
            "advantage": (small, ("--algo.recipe", "dr_grpo", "--algo.advantage", "above_median")),
            **{part: (renamed_config(folder, title, name), ()) for title, (part, name) in names.items()},
        },
    )
    assert_above_median(folder / "runs" / "advantage")
    for part, name in names.values():
        run = folder / "runs" / part
        assert tomllib.loads((run / "config.toml").read_text())[part]["name"] == name and read_rollouts(run, 1)
    own, _ = section(TERM)
    write_named(own, "python", folder)
    apart = train(folder, config(folder, own), *LONG, "--name", "apart", "--train.process", "separate")
    alone = train(folder, config(folder, own), *LONG, "--name", "alone")
    assert losses(folder / "runs" / "term") == losses(alone) == losses(apart) and len(losses(alone)) == 2


def run_commands(folder: Path, title: str) -> Path:
    """Write the files of a section and run its commands. Returns the folder of the run that they train."""
    own, _ = section(title)
    (module,) = write_named(own, "python", folder)
    write_named(own, "toml", folder)
    for words in command_lines(own):
        if words[1:3] != ["env", "play"]:
            assert main(words[1:]) == 0, words
    return folder / "runs" / module.stem


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
def test_a_model_family_equals_transformers_in_all_forward_passes(folder: Path) -> None:
    _, package = section(FAMILY)
    (test,) = write_named(package, "python", folder)
    (diff,) = blocks(package, "diff")
    copied_package(folder)
    apply_diff(diff, folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    after = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert after.returncode == 0 and "4 passed" in after.stdout, after.stdout + after.stderr


@pytest.mark.parametrize("title", [TERM, ADVANTAGE, TASK, ENVIRONMENT, ENGINE, FAMILY])
def test_the_pages_count_files_and_lines(title: str) -> None:
    (row,) = [line for line in TEXT.splitlines() if line.startswith("| [") and title.lower() in line.lower()]
    stated = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) files?, (\d+) lines", row)]
    own, package = section(title)
    moved = blocks(own, "python")[:1] if title in PACKAGES else []
    codes = [blocks(own, "python"), moved + blocks(package, "diff") + blocks(package, "python")]
    assert stated == [(len(parts), sum(map(code_lines, parts))) for parts in codes if parts]
