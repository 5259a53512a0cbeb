from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.runs import checkpoints
from assay.types import UserError


def save(run: Path, step: int, content: str = "weights") -> None:
    with checkpoints.saving(run, step) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_text(f"{content} {step}")
        (folder / "state.json").write_text("{}")


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_a_checkpoint_has_a_marker_with_sizes_and_checksums(tmp_path: Path) -> None:
    save(tmp_path, 12)
    folder = tmp_path / "checkpoints" / "step-000012"
    assert checkpoints.folder(tmp_path, 12) == folder
    marker = json.loads((folder / "complete.json").read_text())
    assert marker["step"] == 12
    assert set(marker["files"]) == {"model/model.safetensors", "state.json"}
    entry = marker["files"]["model/model.safetensors"]
    assert entry == {"bytes": 10, "sha256": hashlib.sha256(b"weights 12").hexdigest()}
    assert names(tmp_path) == {"step-000012"}


def test_files_are_flushed_before_a_checkpoint_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise metrics could be shorter after a power failure than the checkpoint says."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    on_disk: list[int] = []
    fsync, rename = os.fsync, checkpoints.rename

    def named(old: Path, new: Path) -> None:
        files = {path.stat().st_ino for path in (metrics, *old.rglob("*"), old)}
        assert files <= set(on_disk)
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda file: (on_disk.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(checkpoints, "rename", named)
    save(tmp_path, 1)
    assert checkpoints.saved_metrics(tmp_path, 1) == metrics.read_bytes()
    assert {tmp_path.stat().st_ino, (tmp_path / "checkpoints").stat().st_ino} <= set(on_disk)


def test_a_failed_save_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt), checkpoints.saving(tmp_path, 2) as folder:
        (folder / "big").write_bytes(b"x" * 1000)
        raise KeyboardInterrupt
    assert names(tmp_path) == {"step-000001"}


def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(UserError, match="disk is full"), checkpoints.saving(tmp_path, 2):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), checkpoints.saving(tmp_path, 2):
        raise PermissionError(errno.EACCES, "no")
    assert checkpoints.steps(tmp_path) == [1]


@pytest.mark.parametrize("damage", ["marker", "missing", "shorter"])
def test_an_incomplete_checkpoint_is_ignored(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    folder = checkpoints.folder(tmp_path, 2)
    if damage == "marker":
        (folder / "complete.json").unlink()
    elif damage == "missing":
        (folder / "state.json").unlink()
    else:
        (folder / "model" / "model.safetensors").write_text("")
    assert checkpoints.steps(tmp_path) == [1]
    step, complaints = checkpoints.last_intact(tmp_path)
    assert step == 1
    assert len(complaints) == 1
    assert "step-000002" in complaints[0]


def test_flipped_bits_are_found_by_checksum(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = checkpoints.folder(tmp_path, 2) / "model" / "model.safetensors"
    file.write_text("Weights 2")
    assert checkpoints.last(tmp_path) == 2  # sizes are right
    assert checkpoints.problems(checkpoints.folder(tmp_path, 2)) == [f"{file} is damaged"]
    assert checkpoints.problems(checkpoints.folder(tmp_path, 1)) == []
    assert checkpoints.last_intact(tmp_path) == (1, [f"{file} is damaged"])


@pytest.mark.parametrize("name", ["complete.json", "best.json"])
def test_bit_flips_in_marker_or_best_are_detected(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    checkpoints.set_best(tmp_path, 2, 0.5)
    file = next(tmp_path.glob(f"checkpoints/**/step-000002/{name}"), tmp_path / "checkpoints" / name)
    content = file.read_bytes()
    for bit in range(0, 8 * len(content), 61):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        if name == "best.json":
            assert checkpoints.read_best(tmp_path) is None
        else:
            (complaint,) = checkpoints.problems(checkpoints.folder(tmp_path, 2))
            assert "complete.json" in complaint and checkpoints.steps(tmp_path) == [1]


def test_verify_checks_folders_with_a_marker_and_their_subfolders(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = checkpoints.folder(tmp_path, 1)
    for path in (folder, folder / "model", tmp_path):
        checkpoints.verify(path)
    (folder / "state.json").write_text("{{")
    assert checkpoints.problems(folder) == [f"{folder / 'state.json'} is damaged"]
    assert checkpoints.problems(folder, "model") == []  # reads only this part
    (folder / "model" / "model.safetensors").write_text("Weights 1")
    checkpoints.verify(tmp_path)  # without checksums of its own
    for path in (folder, folder / "model"):
        with pytest.raises(UserError, match=r"model\.safetensors is damaged: restore it"):
            checkpoints.verify(path)


def test_best_is_recorded_and_requires_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoints.set_best(tmp_path, 5, 0.5)
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best.pop("sha256") and best == {"step": 5, "value": 0.5}
    assert checkpoints.read_best(tmp_path) == {"step": 5, "value": 0.5}
    checkpoints.set_best(tmp_path, 6, 0.6)
    assert checkpoints.read_best(tmp_path) is None  # there is no such checkpoint


@pytest.mark.parametrize(
    ("keep_last", "best", "left"),
    [(2, None, [0, 10, 2_000_000]), (1, 9, [0, 9, 2_000_000]), (1, 2_000_000, [0, 2_000_000]), (0, None, None)],
)
def test_prune_keeps_the_first_the_last_and_the_best_checkpoints(
    tmp_path: Path, keep_last: int, best: int | None, left: list[int] | None
) -> None:
    saved = [0, 8, 9, 10, 2_000_000]  # ordered as numbers
    for step in saved:
        save(tmp_path, step)
    if best:
        checkpoints.set_best(tmp_path, best, 1.0)
    deleted = checkpoints.prune(tmp_path, keep_last)
    assert checkpoints.steps(tmp_path) == (left or saved) and checkpoints.last(tmp_path) == 2_000_000
    assert sorted(deleted + (left or saved)) == saved
    assert names(tmp_path) - {"best.json"} == {f"step-{step:06d}" for step in left or saved}


# Saves step 1, then dies in the middle of saving step `second`, at the place that is asked for.
_DYING_SAVER = """
import os, signal, sys
from pathlib import Path
from assay.runs import checkpoints
run, place, second = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def save(step, text):
    with checkpoints.saving(run, step) as folder:
        (folder / "model").write_text(text)
        if place == "body" and text == "new": die()
save(1, "old")
if place == "marker": checkpoints.write_json = die
if place == "rename": checkpoints.rename = die
if place == "between renames":
    rename = checkpoints.rename
    def once(source, target):
        rename(source, target)
        die()
    checkpoints.rename = once
save(second, "new")
"""


@pytest.mark.parametrize("place", ["body", "marker", "rename"])
def test_kill_while_saving(tmp_path: Path, place: str) -> None:
    done = subprocess.run([sys.executable, "-c", _DYING_SAVER, str(tmp_path), place, "2"], check=False)
    assert done.returncode == -9
    assert checkpoints.last_intact(tmp_path) == (1, [])
    assert checkpoints.steps(tmp_path) == [1]
    assert names(tmp_path) == {"step-000001", ".saving-step-000002"}
    save(tmp_path, 3)
    whole = {"step-000002"} if place == "rename" else set()  # it was complete but for its name
    assert names(tmp_path) == {"step-000001", "step-000003"} | whole
    assert checkpoints.last_intact(tmp_path) == (3, [])


def test_kill_while_replacing_the_only_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _DYING_SAVER, str(tmp_path), "between renames", "1"], check=False)
    assert done.returncode == -9
    checkpoints.recover(tmp_path)
    assert checkpoints.last_intact(tmp_path) == (1, [])
    assert (checkpoints.folder(tmp_path, 1) / "model").read_text() == "new"
    assert names(tmp_path) == {"step-000001"}


def test_an_interrupt_between_the_two_renames_of_a_replacement_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, "first")
    rename = checkpoints.rename

    def interrupted(source: Path, target: Path) -> None:
        if source.name.startswith(".saving-"):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "rename", interrupted)
        save(tmp_path, 1, "second")
    checkpoints.recover(tmp_path)
    assert checkpoints.last_intact(tmp_path) == (1, [])
    assert (checkpoints.folder(tmp_path, 1) / "model" / "model.safetensors").read_text() == "second 1"
