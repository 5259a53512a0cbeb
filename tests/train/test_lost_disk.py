"""A disk that fills up, or bites: the run stops with one line, or passes over what is damaged; nothing else is lost."""

from __future__ import annotations

import errno
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_run import SmallRuns, strike_at

from assay.runs import checkpoints

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS = 5
WORDS = ("--train.steps", STEPS, "--save.every", 2, "--eval.every", 2)
SAVING = "assay.train.checkpoint"
# What cannot be written any more, in which call, and the last checkpoint then.
FULL: dict[str, tuple[str, int, int | None]] = {
    "the first metrics": ("assay.runs.directory:Run.log", 1, None),
    "metrics": ("assay.runs.directory:Run.log", 4, 2),
    "an evaluation": ("assay.train.evaluation:rollouts.write_rollouts", 7, 2),
    "the token arrays": ("assay.runs.rollouts:np.savez", 3, 2),
    "the first model": (f"{SAVING}.save_model", 1, None),
    "a model": (f"{SAVING}.save_model", 3, 2),
    "the tokenizer": ("assay.text:Tokenizer.save", 3, 2),
    "moments": (f"{SAVING}.write_files", 3, 2),
    "the state": (f"{SAVING}.write_state", 3, 2),
    "the list of files": ("assay.runs.checkpoints.write_json", 2, 0),
    "the note of the best": ("assay.runs.checkpoints.write_json", 3, 2),
    "the rename": ("assay.runs.checkpoints.rename", 3, 2),
    "the summary": ("assay.runs.directory:Run.write_summary", 1, STEPS),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    small = SmallRuns(tmp_path_factory.mktemp("disk"))
    assert small.train(*WORDS, "--save.keep", 9) == 0
    return small


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_ends_the_run_with_one_line_and_the_earlier_checkpoint(
    whole: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    name, (target, call, saved) = f"full-{what.replace(' ', '-')}", FULL[what]
    with monkeypatch.context() as patch:
        strike_at(patch, target, call, no_space)
        assert whole.train(*WORDS, "--save.keep", 9, "--name", name) == 2
    said = capsys.readouterr().err
    assert "the disk is full" in said and said.count("\n") == 1 and "resume" in said
    assert checkpoints.last_sound(whole.runs / name) == (saved, [])
    assert whole.resume(name) == 0
    whole.same_run("small", name, STEPS)


def test_a_disk_that_is_really_full(whole: SmallRuns) -> None:
    """On a file system of 6 MB: the second checkpoint with moments does not fit."""
    small = "mount -t tmpfs -o size=6m none runs"
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    folder = whole.folder / "tiny"
    (folder / "runs").mkdir(parents=True)
    train = f"{sys.executable} -m assay train {whole.config} {' '.join(map(str, WORDS))} --name full --save.keep 9"
    script = f"{small} && {train}; code=$?; cp -r runs/full saved; df runs; exit $code"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done
    assert "assay: the disk is full" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    shutil.move(folder / "saved", whole.runs / "full")
    assert checkpoints.last_sound(whole.runs / "full") == (2, [])
    assert whole.resume("full") == 0
    whole.same_run("small", "full", STEPS)


@contextmanager
def files_below(size: int) -> Iterator[None]:
    """As under `ulimit -f`."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("process", ["same", "separate"])
def test_files_that_may_not_grow_that_large(whole: SmallRuns, capsys: pytest.CaptureFixture[str], process: str) -> None:
    name = f"limited-{process}"
    moments = (whole.checkpoint(STEPS) / "optimizer.safetensors").stat().st_size
    with files_below(moments - 1):
        assert whole.train(*WORDS, "--save.keep", 9, "--name", name, "--train.process", process) == 2
    said = capsys.readouterr().err
    assert "ulimit -f" in said and said.count("\n") == 1 and "resume" in said
    assert checkpoints.last_sound(whole.runs / name) == (0, [])
    assert whole.resume(name, "--train.process", "same") == 0
    whole.same_run("small", name, STEPS)


def test_a_model_that_cannot_be_exported_is_told_in_one_line(
    whole: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_below(1000):
        assert whole("export", "run:small@last", whole.folder / "exported") == 2
    said = capsys.readouterr().err
    assert "ulimit -f" in said and said.count("\n") == 1
    assert not (whole.folder / "exported").exists()


FILES = ("model/model.safetensors", "model/config.json", "optimizer.safetensors", "state.json", "complete.json")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [cut_short, flip, Path.unlink])
def test_a_damaged_newest_checkpoint_is_passed_over(whole: SmallRuns, tmp_path: Path, damage, file: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.runs / "small", run)
    damage(checkpoints.folder(run, STEPS) / file)
    step, complaints = checkpoints.last_sound(run)
    assert step == 4 and complaints and "step-000005" in complaints[0]


@pytest.mark.parametrize(
    ("damage", "file"),
    [(cut_short, "optimizer.safetensors"), (flip, "model/model.safetensors"), (Path.unlink, "state.json")],
)
def test_and_the_run_goes_on_from_the_one_before(
    whole: SmallRuns, capsys: pytest.CaptureFixture[str], damage, file: str
) -> None:
    name = f"damaged-{damage.__name__}"
    shutil.copytree(whole.runs / "small", whole.runs / name)
    damage(checkpoints.folder(whole.runs / name, STEPS) / file)
    assert whole.resume(name) == 0
    said = capsys.readouterr().out
    assert f"step-000005/{file} is" in said and "going on from an earlier checkpoint" in said and "from step 4" in said
    whole.same_run("small", name, STEPS)


def test_a_damaged_reference_is_refused_and_the_start_stands_in_for_it(
    whole: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whole.train(*WORDS, "--algo.kl_coef", 0.1, "--name", "kl") == 0
    run = whole.runs / "kl-damaged"
    shutil.copytree(whole.runs / "kl", run)
    shutil.rmtree(checkpoints.folder(run, STEPS))
    (run / "reference" / "complete.json").rename(run / "marker")  # without checksums it is not trusted either
    assert whole.resume(run.name) == 2 and "complete.json is damaged" in capsys.readouterr().err
    (run / "marker").rename(run / "reference" / "complete.json")
    flip(run / "reference" / "model.safetensors")
    assert whole.resume(run.name) == 2
    said, start = capsys.readouterr().err, f"run:{run}@0"
    assert "reference/model.safetensors is damaged" in said and said.count("\n") == 1
    assert f"--algo.reference {start}" in said and whole.resume(run.name, "--algo.reference", start) == 0
    whole.same_run("kl", run.name, STEPS)


def test_a_run_without_any_sound_checkpoint_is_not_begun_again_unasked(
    whole: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole.runs / "small", whole.runs / "all-damaged")
    for step in checkpoints.steps(whole.runs / "all-damaged"):
        flip(checkpoints.folder(whole.runs / "all-damaged", step) / "model/model.safetensors")
    metrics = whole.metrics("all-damaged")
    assert whole.resume("all-damaged") == 2
    said = capsys.readouterr().err
    assert "no checkpoint of" in said and "to begin again" in said and said.count("\n") == 1
    assert whole.metrics("all-damaged") == metrics
    shutil.rmtree(whole.runs / "all-damaged" / "checkpoints")
    assert whole.resume("all-damaged") == 0
    whole.same_run("small", "all-damaged", STEPS)
