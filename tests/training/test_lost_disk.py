"""Full disks and damaged files: commands stop with a one-line error, or use an intact checkpoint."""

from __future__ import annotations

import errno
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import SmallRuns, inject, mostly_slow

from assay.runs import Run, checkpoints
from assay.runs.resolve import resolve_model
from assay.training import checkpoint
from assay.types import UserError

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS = 5
WORDS = ("--train.steps", STEPS, "--save.every", 2, "--eval.every", 2)
# What cannot be written: the function, which call of it fails, and the step of the last checkpoint then.
FULL: dict[str, tuple[Any, str, int, int | None]] = {
    "the first metrics": (Run, "log", 1, None),
    "the token arrays": (np, "savez", 3, 2),
    "the first model": (checkpoint, "save_model", 1, None),
    "moments": (checkpoint, "write_files", 3, 2),
    "the list of files": (checkpoints, "write_json", 2, 0),
    "the rename": (checkpoints, "rename", 3, 2),
    "the summary": (Run, "write_summary", 1, STEPS),
}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    small = SmallRuns(tmp_path_factory.mktemp("disk"))
    assert small.train(*WORDS, "--save.keep", 9) == 0
    return small


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_ends_the_run_with_one_line_and_the_earlier_checkpoint(
    complete: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    name, (owner, function, call, saved) = f"full-{what.replace(' ', '-')}", FULL[what]
    with monkeypatch.context() as patch:
        inject(patch, owner, function, call, no_space)
        assert complete.train(*WORDS, "--save.keep", 9, "--name", name) == 2
    shown = capsys.readouterr().err
    assert "the disk is full" in shown and shown.count("\n") == 1 and "resume" in shown
    assert checkpoints.last_intact(complete.runs / name) == (saved, [])
    assert complete.resume(name) == 0
    complete.same_run("small", name, STEPS)


@contextmanager
def files_below(size: int) -> Iterator[None]:
    """As under `ulimit -f`."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("process", mostly_slow(["same", "separate"], quick=["same"]))
def test_a_file_size_limit_ends_the_run(complete: SmallRuns, capsys: pytest.CaptureFixture[str], process: str) -> None:
    name = f"limited-{process}"
    moments = (complete.checkpoint(STEPS) / "optimizer.safetensors").stat().st_size
    with files_below(moments - 1):
        assert complete.train(*WORDS, "--save.keep", 9, "--name", name, "--train.process", process) == 2
    shown = capsys.readouterr().err
    assert "ulimit -f" in shown and shown.count("assay: ") == 1 and "Traceback" not in shown and "resume" in shown
    assert checkpoints.last_intact(complete.runs / name) == (0, [])
    assert complete.resume(name, "--train.process", "same") == 0
    complete.same_run("small", name, STEPS)


def flip(file: Path, bit: int = 100) -> None:
    """Flip one bit of a file; called again, it restores the file."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def test_a_run_resumes_from_the_last_checkpoint_that_is_not_damaged(
    complete: SmallRuns, stdout_of: Callable[..., str]
) -> None:
    shutil.copytree(complete.runs / "small", complete.runs / "damaged")
    flip(complete.checkpoint(STEPS, "damaged") / "model/model.safetensors")
    (complete.checkpoint(4, "damaged") / "state.json").unlink()
    shown = stdout_of(complete.resume("damaged"))
    assert "step-000005/model/model.safetensors is" in shown and "from step 2" in shown
    complete.same_run("small", "damaged", STEPS)


def test_an_invalid_file_with_valid_checksums_ends_the_command_with_one_line(
    complete: SmallRuns, refused: Callable[..., str]
) -> None:
    shutil.copytree(complete.runs / "small", complete.runs / "forged")
    folder = checkpoints.folder(complete.runs / "forged", STEPS)
    (folder / "optimizer.safetensors").write_bytes(b"no tensors")
    checkpoints.write_marker(folder)
    complete.lose_summary("forged")
    assert "the checkpoint of step 5 is invalid" in refused(complete.resume("forged"))


@pytest.mark.slow
def test_a_damaged_reference_is_refused_and_can_be_replaced_by_the_first_checkpoint(
    complete: SmallRuns, capsys: pytest.CaptureFixture[str], stderr_of: Callable[..., str]
) -> None:
    assert complete.train(*WORDS, "--algo.kl_coef", 0.1, "--name", "kl") == 0
    run = complete.runs / "kl-damaged"
    shutil.copytree(complete.runs / "kl", run)
    shutil.rmtree(checkpoints.folder(run, STEPS))
    (run / "reference" / "complete.json").rename(run / "marker")  # without checksums it is not trusted either
    assert complete.resume(run.name) == 2 and "complete.json is damaged" in capsys.readouterr().err
    (run / "marker").rename(run / "reference" / "complete.json")
    flip(run / "reference" / "model.safetensors")
    shown, start = stderr_of(complete.resume(run.name)), f"run:{run}@0"
    assert "reference/model.safetensors is damaged" in shown and shown.count("\n") == 1
    assert f"--algo.reference {start}" in shown and complete.resume(run.name, "--algo.reference", start) == 0
    complete.same_run("kl", run.name, STEPS)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_restarted(
    complete: SmallRuns, stderr_of: Callable[..., str]
) -> None:
    shutil.copytree(complete.runs / "small", complete.runs / "all-damaged")
    for step in checkpoints.steps(complete.runs / "all-damaged"):
        flip(checkpoints.folder(complete.runs / "all-damaged", step) / "model/model.safetensors")
    metrics = complete.metrics("all-damaged")
    shown = stderr_of(complete.resume("all-damaged"))
    assert "no checkpoint of" in shown and "to start from step 0" in shown and shown.count("\n") == 1
    assert complete.metrics("all-damaged") == metrics
    shutil.rmtree(complete.runs / "all-damaged" / "checkpoints")
    assert complete.resume("all-damaged") == 0
    complete.same_run("small", "all-damaged", STEPS)


LOADERS: dict[str, tuple[object, ...]] = {
    "export": ("export", "run:flipped@last", "exported"),
    "eval": ("eval", "run:flipped@last", "--eval.final_examples", 2),
    "train": ("train", "small.toml", "--model", "run:flipped@5", "--name", "next"),
    "reference": ("train", "small.toml", "--algo.kl_coef", 0.1, "--algo.reference", "run:flipped@5", "--name", "next"),
}


@pytest.fixture(scope="module")
def flipped(complete: SmallRuns) -> SmallRuns:
    """With a copy of the complete run."""
    shutil.copytree(complete.runs / "small", complete.runs / "flipped")
    return complete


def flips(run: Path, count: int) -> Iterator[tuple[Path, int]]:
    """`count` random bits of every file, or all bits if there are fewer."""
    chance = random.Random(0)
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        bits = 8 * file.stat().st_size
        for bit in chance.sample(range(bits), min(count, bits)):
            yield file, bit


@pytest.mark.parametrize(
    ("name", "file"),
    [*((name, "model.safetensors") for name in LOADERS), ("export", "config.json"), ("export", "tokenizer.json")],
)
def test_loading_a_checkpoint_with_a_flipped_bit_is_refused(
    flipped: SmallRuns, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    monkeypatch.chdir(flipped.folder)
    damaged = flipped.checkpoint(STEPS, "flipped") / "model" / file
    flip(damaged)
    try:
        assert flipped(*LOADERS[name]) == 2
    finally:
        flip(damaged)
    said = capsys.readouterr().err
    assert f"{damaged} is damaged; use run:flipped@4, which is intact" in said and said.count("assay: ") == 1
    assert not (flipped.folder / "exported").exists() and not (flipped.runs / "next").exists()


def folder_of(path: str) -> tuple[str, dict[str, bytes]]:
    return Path(path).parent.name, {file.name: file.read_bytes() for file in Path(path).iterdir()}


@pytest.mark.slow
def test_no_bit_flip_changes_which_model_is_loaded(flipped: SmallRuns) -> None:
    """4 bits of each file, or all of them."""
    runs = flipped.runs
    tags = ("@0", "@2", "@4", "@5", "@last", "@best", "")
    intact = {tag: folder_of(resolve_model(f"run:small{tag}", runs)) for tag in tags}
    for file, bit in flips(runs / "flipped", 4):
        flip(file, bit)
        refused = 0
        for tag in tags:
            try:
                model = resolve_model(f"run:flipped{tag}", runs)
            except UserError:
                refused += 1
            else:
                assert folder_of(model) == intact[tag], (file, bit)
        flip(file, bit)
        assert refused or not file.match("checkpoints/*/model/*"), (file, bit)
