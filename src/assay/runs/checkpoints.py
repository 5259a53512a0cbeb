"""Checkpoint folders, which are complete or absent.

`checkpoints/step-N/` is filled under a temporary name and renamed after all of it is on disk. `complete.json` lists the
sizes and checksums of its files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from assay.runs.files import disk_error, make_folder, read_json, remove_temporaries, rename, sync, sync_tree, write_json
from assay.types import UserError

MARKER = "complete.json"
BEST = "best.json"
OWN = "sha256"  # in complete.json and best.json: the checksum of the rest of the file
_STEP_NAME = re.compile(r"step-(\d+)")
_SAVING, _DELETING = ".saving-", ".deleting-"  # prefixes of folders that are being filled or deleted


def folder(run_path: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return run_path / "checkpoints" / f"step-{step:06d}"


def unfinished(target: Path) -> Path:
    """Temporary path of a folder while it is written."""
    return target.with_name(f"{_SAVING}{target.name}")


@contextmanager
def saving(run_path: Path, step: int) -> Iterator[Path]:
    """A folder to fill. It becomes the checkpoint of the step when the block ends, and is deleted after an error.

    Only one at a time. Processes that save together find the folder by its fixed name, `unfinished`.
    """
    target = folder(run_path, step)
    try:
        recover(run_path)
        facts = {"step": step, **_metrics_now(run_path), **_evaluations_now(run_path, step)}
        with atomic_folder(target, **facts) as temporary:
            yield temporary
    except BaseException as error:
        if cause_and_remedy := disk_error(error):
            cause, remedy = cause_and_remedy
            raise UserError(
                f"{cause}: the checkpoint of step {step} was not saved in {target.parent}, earlier ones are intact; "
                f"{remedy} and resume"
            ) from error
        raise


@contextmanager
def atomic_folder(target: Path, **facts: Any) -> Iterator[Path]:
    """A folder to fill. When the block ends, it gets a complete.json with `facts` and is renamed to `target`. After an
    error it is deleted.
    """
    temporary = unfinished(target)
    try:
        make_folder(target.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        write_marker(temporary, **facts)
        if target.exists():  # damaged, or saved twice; `recover` handles a crash between the two renames
            _delete(target)
        rename(temporary, target)
    except BaseException:
        if target.exists() or not is_complete(temporary):  # else it is the only one, and `recover` renames it
            shutil.rmtree(temporary, ignore_errors=True)  # also frees space on a full disk
        raise


def steps(run_path: Path) -> list[int]:
    """Steps with a complete checkpoint, in order. Compares file sizes only; `problems` compares checksums."""
    return [step for step in all_steps(run_path) if is_complete(folder(run_path, step))]


def all_steps(run_path: Path) -> list[int]:
    """Steps with a checkpoint folder, complete or damaged, in order."""
    paths = (run_path / "checkpoints").glob("step-*")
    return sorted(step_of(path) for path in paths if _STEP_NAME.fullmatch(path.name))


def step_of(checkpoint: Path) -> int:
    match = _STEP_NAME.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not named after a step"
    return int(match[1])


def last(run_path: Path) -> int | None:
    """Step of the newest complete checkpoint."""
    return next(reversed(steps(run_path)), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether all files are present with the sizes that complete.json lists."""
    files = _listed(checkpoint)
    return bool(files) and all(_size(checkpoint / name) == saved["bytes"] for name, saved in files.items())


def problems(checkpoint: Path, part: str = "") -> list[str]:
    """Compare the files of a checkpoint with their checksums. One line per missing or damaged file.

    `part`: check only this file, or the files in this subfolder, such as `model`.
    """
    files = _listed(checkpoint)
    if not files:
        return [f"{checkpoint} is incomplete, or its {MARKER} is damaged"]
    files = {name: saved for name, saved in files.items() if part in ("", name) or name.startswith(f"{part}/")}
    present = [name for name in files if _size(checkpoint / name) is not None]
    sums = dict(zip(present, _sha256_of([checkpoint / name for name in present]), strict=True))
    return [
        f"{checkpoint / name} is {'damaged' if name in sums else 'missing'}"
        for name, saved in files.items()
        if sums.get(name) != saved["sha256"]
    ]


def verify(path: Path) -> None:
    """Raise if a folder with checksums, or a subfolder of one, has a damaged file. Other folders are accepted."""
    path = path.resolve()  # a link, or "." within the folder, leads to the same files
    for checkpoint, part in ((path, ""), (path.parent, path.name)):
        if (checkpoint / MARKER).is_file():
            if damage := problems(checkpoint, part):
                raise UserError(f"{damage[0]}: restore it from a backup, or choose another checkpoint")
            return


def last_intact(run_path: Path) -> tuple[int | None, list[str]]:
    """Step of the newest checkpoint without problems, and the problems of newer ones."""
    newer: list[str] = []
    for step in reversed(all_steps(run_path)):
        damage = problems(folder(run_path, step))
        if not damage:
            return step, newer
        newer += damage
    return None, newer


def saved_metrics(run_path: Path, step: int) -> bytes | None:
    """The content of metrics.jsonl when the step was saved; None without that checkpoint, or if it changed since."""
    marker = _marker(folder(run_path, step))
    content = _metrics(run_path)[: marker.get("metrics_bytes")]
    return content if hashlib.sha256(content).hexdigest() == marker.get("metrics_sha256") else None


def first_evaluations(run_path: Path) -> dict[str, str]:
    """Checksums, by file name, of the evaluations that existed when step 0 was saved."""
    return _marker(folder(run_path, 0)).get("evaluations", {})


def evaluation_intact(run_path: Path, path: Path) -> bool:
    """Whether a file of `evals/` is unchanged since step 0 was saved. True if its checksum was not stored."""
    return first_evaluations(run_path).get(path.name) in (None, _sha256(path))


def set_best(run_path: Path, step: int, value: float) -> None:
    """Mark a step as the best one. Its checkpoint must be saved already."""
    _write_with_checksum(run_path / "checkpoints" / BEST, {"step": step, "value": value})


def read_best(run_path: Path) -> dict[str, Any] | None:
    """{"step", "value"} of the best checkpoint; None if that does not exist."""
    best = _read_with_checksum(run_path / "checkpoints" / BEST)
    step = best.get("step")
    return best if isinstance(step, int) and is_complete(folder(run_path, step)) else None


def prune(run_path: Path, keep_last: int) -> list[int]:
    """Delete all checkpoints except the last `keep_last` (0: all), the best one and the checkpoint of step 0.

    Step 0 has the weights of the evaluation "before". It is kept for comparisons, and has no optimizer state.
    """
    present, best = steps(run_path), read_best(run_path)
    kept = {0, *present[-keep_last:]}
    kept |= {best["step"]} if best else set()
    deleted = [step for step in present if step not in kept]
    for step in deleted:
        _delete(folder(run_path, step))
    return deleted


def truncate_after(run_path: Path, step: int) -> None:
    """Delete checkpoints later than `step`, newest first, and leftovers of interrupted saves."""
    for later in reversed(all_steps(run_path)):
        if later > step:
            _delete(folder(run_path, later))
    best = run_path / "checkpoints" / BEST
    if best.exists() and _read_with_checksum(best).get("step", math.inf) > step:  # of a later step, or damaged
        best.unlink()
        sync(best.parent)
    recover(run_path)


def recover(run_path: Path) -> None:
    """Clean up after interrupted saves and deletions. A run has one writer, so none of them is still in progress."""
    checkpoints = run_path / "checkpoints"
    for saved in checkpoints.glob(f"{_SAVING}step-*"):
        target = saved.with_name(saved.name.removeprefix(_SAVING))
        if is_complete(saved) and not target.exists():
            sync(saved)
            rename(saved, target)  # only the rename was missing
    for parent in (checkpoints, run_path):
        for leftover in (*parent.glob(f"{_SAVING}*"), *parent.glob(f"{_DELETING}*")):
            shutil.rmtree(leftover, ignore_errors=True)
        remove_temporaries(parent)


def write_marker(checkpoint: Path, **facts: Any) -> None:
    """Flush all files to disk, then write complete.json."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MARKER)
    assert paths, "an empty checkpoint"
    sync_tree(checkpoint)
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum}
        for path, checksum in zip(paths, _sha256_of(paths), strict=True)
    }
    facts["files"] = files
    _write_with_checksum(checkpoint / MARKER, facts)


def _delete(checkpoint: Path) -> None:
    """Rename the folder first: a partly deleted one must not look like a checkpoint."""
    renamed = checkpoint.with_name(f"{_DELETING}{checkpoint.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    rename(checkpoint, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def _listed(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The files that complete.json lists; none if it is missing or damaged."""
    return _marker(checkpoint).get("files", {})


def _marker(checkpoint: Path) -> dict[str, Any]:
    """The content of complete.json; empty if it is missing or damaged."""
    return _read_with_checksum(checkpoint / MARKER)


def _write_with_checksum(path: Path, facts: dict[str, Any]) -> None:
    write_json(path, {**facts, OWN: _digest(facts)})


def _read_with_checksum(path: Path) -> dict[str, Any]:
    """A JSON object that was written with its own checksum; empty if that is missing or wrong."""
    facts = read_json(path)
    return facts if facts.pop(OWN, None) == _digest(facts) else {}


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _metrics_now(run_path: Path) -> dict[str, Any]:
    """Size and checksum of metrics.jsonl, which is flushed to disk first."""
    content = _metrics(run_path)
    if content:
        sync(run_path / "metrics.jsonl")
    return {"metrics_bytes": len(content), "metrics_sha256": hashlib.sha256(content).hexdigest()}


def _metrics(run_path: Path) -> bytes:
    path = run_path / "metrics.jsonl"
    return path.read_bytes() if path.is_file() else b""


def _evaluations_now(run_path: Path, step: int) -> dict[str, Any]:
    """Checksums of the first evaluations, for the checkpoint of step 0, which is never pruned."""
    paths = sorted((run_path / "evals").glob("step-000000-*.jsonl")) if step == 0 else []
    return {"evaluations": {path.name: _sha256(path) for path in paths}} if paths else {}


def _size(path: Path) -> int | None:
    with suppress(FileNotFoundError):  # deleted between the two calls
        return path.stat().st_size if path.is_file() else None
    return None


def _sha256_of(paths: Sequence[Path]) -> list[str]:
    """In threads: reading and hashing release the interpreter lock."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with suppress(FileNotFoundError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return "deleted in the meantime"
