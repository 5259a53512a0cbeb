"""Checkpoints that are whole or absent.

`checkpoints/step-N/` appears by a rename, after all of it is on disk and `complete.json` lists sizes and checksums.
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

from assay.runs.files import make_folder, read_json, remove_temporaries, rename, sync, sync_tree, trouble, write_json
from assay.types import UserError

MARKER = "complete.json"
BEST = "best.json"
OWN = "sha256"  # in the marker and in best.json: the checksum of all else in the file
_STEP_NAME = re.compile(r"step-(\d+)")
_SAVING, _DELETING = ".saving-", ".deleting-"  # before the name of a folder that is being filled or deleted


def folder(run_path: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return run_path / "checkpoints" / f"step-{step:06d}"


def unfinished(run_path: Path, step: int) -> Path:
    """Where the checkpoint of a step is filled."""
    return _unfinished(folder(run_path, step))


@contextmanager
def saving(run_path: Path, step: int) -> Iterator[Path]:
    """A folder to fill; it becomes the step's checkpoint when the block ends well, and vanishes when it does not.

    One at a time. Processes that save parts together find the folder by its fixed name, `unfinished`.
    """
    target = folder(run_path, step)
    try:
        recover(run_path)
        with filling(target, step=step, **_metrics_now(run_path), **_evaluations_now(run_path, step)) as temporary:
            yield temporary
    except BaseException as error:
        if found := trouble(error):
            what, remedy = found
            raise UserError(
                f"{what}: no checkpoint of step {step} in {target.parent}, earlier ones are intact; {remedy} and resume"
            ) from error
        raise


@contextmanager
def filling(target: Path, **facts: Any) -> Iterator[Path]:
    """A folder to fill, which is sealed with `facts` and named `target` when the block ends well, else deleted."""
    temporary = _unfinished(target)
    try:
        make_folder(target.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        seal(temporary, **facts)
        if target.exists():  # damaged, or saved twice; `recover` mends a crash between the two renames
            _discard(target)
        rename(temporary, target)
    except BaseException:
        if target.exists() or not is_complete(temporary):  # else it is the only one, and `recover` gives it its name
            shutil.rmtree(temporary, ignore_errors=True)  # frees the space that ran out, among other things
        raise


def steps(run_path: Path) -> list[int]:
    """Steps with a complete checkpoint, in order (by sizes; `problems` reads every byte)."""
    return [step for step in all_steps(run_path) if is_complete(folder(run_path, step))]


def all_steps(run_path: Path) -> list[int]:
    """Steps with a checkpoint folder, complete or damaged, in order."""
    matches = [_STEP_NAME.fullmatch(path.name) for path in (run_path / "checkpoints").glob("step-*")]
    return sorted(int(match[1]) for match in matches if match)


def last(run_path: Path) -> int | None:
    """The newest complete checkpoint's step."""
    return next(reversed(steps(run_path)), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether all files are there in the size they were saved with."""
    files = _listed(checkpoint)
    return bool(files) and all(_size(checkpoint / name) == saved["bytes"] for name, saved in files.items())


def problems(checkpoint: Path, part: str = "") -> list[str]:
    """What is wrong with a checkpoint's files, by checksum: one line each, none for a sound one.

    `part`: check only this file, or the files in this subfolder, such as `model`.
    """
    files = _listed(checkpoint)
    if not files:
        return [f"{checkpoint} was never completed, or its {MARKER} is damaged"]
    files = {name: saved for name, saved in files.items() if part in ("", name) or name.startswith(f"{part}/")}
    there = [name for name in files if _size(checkpoint / name) is not None]
    sums = dict(zip(there, _sha256_of([checkpoint / name for name in there]), strict=True))
    complaints = {name: "missing" if name not in sums else "damaged" for name in files}
    return [
        f"{checkpoint / name} is {complaints[name]}"
        for name, saved in files.items()
        if sums.get(name) != saved["sha256"]
    ]


def verify(path: Path) -> None:
    """Refuse a folder with checksums, or a subfolder of one, that has a damaged file. Any other folder passes."""
    path = path.resolve()  # a link, or "." within the folder, leads to the same files
    for sealed, part in ((path, ""), (path.parent, path.name)):
        if (sealed / MARKER).is_file():
            if found := problems(sealed, part):
                raise UserError(f"{found[0]}: restore it from a backup, or choose another checkpoint")
            return


def last_sound(run_path: Path) -> tuple[int | None, list[str]]:
    """The newest checkpoint that passes its checksums, and what was wrong with newer ones."""
    complaints: list[str] = []
    for step in reversed(all_steps(run_path)):
        found = problems(folder(run_path, step))
        if not found:
            return step, complaints
        complaints += found
    return None, complaints


def metrics_bytes(run_path: Path, step: int) -> int | None:
    """How long metrics.jsonl was when the step was saved; None without that checkpoint."""
    return _marker(folder(run_path, step)).get("metrics_bytes")


def metrics_intact(run_path: Path, step: int) -> bool:
    """Whether metrics.jsonl still begins with what it held when the step was saved."""
    marker = _marker(folder(run_path, step))
    length, saved = marker.get("metrics_bytes"), marker.get("metrics_sha256")
    path = run_path / "metrics.jsonl"
    content = path.read_bytes()[:length] if path.is_file() else b""
    return len(content) == (length or 0) and saved in (None, hashlib.sha256(content).hexdigest())


def first_evaluations(run_path: Path) -> dict[str, str]:
    """Checksums of the evaluations that were made by the time step 0 was saved, by file name."""
    return _marker(folder(run_path, 0)).get("evaluations", {})


def evaluation_intact(run_path: Path, path: Path) -> bool:
    """Whether a file of `evals/` is what it was when step 0 was saved, as far as that is known."""
    return first_evaluations(run_path).get(path.name) in (None, _sha256(path))


def set_best(run_path: Path, step: int, value: float) -> None:
    """Point `best` at a step. Save the checkpoint first."""
    _write_sealed(run_path / "checkpoints" / BEST, {"step": step, "value": value})


def read_best(run_path: Path) -> dict[str, Any] | None:
    """{"step", "value"} of the best checkpoint, as long as that is there."""
    best = _read_sealed(run_path / "checkpoints" / BEST)
    step = best.get("step")
    return best if isinstance(step, int) and is_complete(folder(run_path, step)) else None


def prune(run_path: Path, keep_last: int, keep_every: int = 0) -> list[int]:
    """Delete all but the last `keep_last` (at least one), the best, the start, and multiples of `keep_every`.

    The start (step 0) is what "before" was measured on: it stays for comparisons, and carries no optimizer state.
    """
    found, best = steps(run_path), read_best(run_path)
    kept = {0, *found[-max(keep_last, 1) :]}
    kept |= {best["step"]} if best else set()
    kept |= {step for step in found if keep_every and step % keep_every == 0}
    dropped = [step for step in found if step not in kept]
    for step in dropped:
        _discard(folder(run_path, step))
    return dropped


def cut_back(run_path: Path, step: int) -> None:
    """Delete checkpoints later than `step`, newest first, and what dead attempts left."""
    for later in reversed(all_steps(run_path)):
        if later > step:
            _discard(folder(run_path, later))
    best = run_path / "checkpoints" / BEST
    if best.exists() and _read_sealed(best).get("step", math.inf) > step:  # of a later step, or damaged
        best.unlink()
        sync(best.parent)
    recover(run_path)


def recover(run_path: Path) -> None:
    """Clean up after savers and deleters that died. A run has one writer, so none of them is alive."""
    checkpoints = run_path / "checkpoints"
    for saved in checkpoints.glob(f"{_SAVING}step-*"):
        target = saved.with_name(saved.name.removeprefix(_SAVING))
        if is_complete(saved) and not target.exists():
            sync(saved)
            rename(saved, target)  # only its name was missing
    for place in (checkpoints, run_path):
        for leftover in (*place.glob(f"{_SAVING}*"), *place.glob(f"{_DELETING}*")):
            shutil.rmtree(leftover, ignore_errors=True)
        remove_temporaries(place)


def _unfinished(target: Path) -> Path:
    return target.with_name(f"{_SAVING}{target.name}")


def seal(checkpoint: Path, **facts: Any) -> None:
    """Put every file on disk and list them; the list comes last."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MARKER)
    assert paths, "an empty checkpoint"
    sync_tree(checkpoint)
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum}
        for path, checksum in zip(paths, _sha256_of(paths), strict=True)
    }
    facts["files"] = files
    _write_sealed(checkpoint / MARKER, facts)


def _discard(checkpoint: Path) -> None:
    """Rename first: a folder that is half deleted must not look like a checkpoint."""
    dying = checkpoint.with_name(f"{_DELETING}{checkpoint.name}")
    shutil.rmtree(dying, ignore_errors=True)
    rename(checkpoint, dying)
    shutil.rmtree(dying, ignore_errors=True)


def _listed(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The files that the marker promises; none without a marker."""
    return _marker(checkpoint).get("files", {})


def _marker(checkpoint: Path) -> dict[str, Any]:
    """What the marker says; nothing where it is missing or damaged."""
    return _read_sealed(checkpoint / MARKER)


def _write_sealed(path: Path, facts: dict[str, Any]) -> None:
    write_json(path, {**facts, OWN: _digest(facts)})


def _read_sealed(path: Path) -> dict[str, Any]:
    """A JSON object that was written with its own checksum; empty where that is missing or wrong."""
    facts = read_json(path)
    return facts if facts.pop(OWN, None) == _digest(facts) else {}


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _metrics_now(run_path: Path) -> dict[str, Any]:
    """Size and checksum of metrics.jsonl, all of which would survive a power cut."""
    path = run_path / "metrics.jsonl"
    if not path.is_file():
        return {"metrics_bytes": 0}
    sync(path)
    content = path.read_bytes()
    return {"metrics_bytes": len(content), "metrics_sha256": hashlib.sha256(content).hexdigest()}


def _evaluations_now(run_path: Path, step: int) -> dict[str, Any]:
    """For the checkpoint of step 0, which is never pruned: what the end of the run compares with."""
    paths = sorted((run_path / "evals").glob("step-000000-*.jsonl")) if step == 0 else []
    return {"evaluations": {path.name: _sha256(path) for path in paths}} if paths else {}


def _size(path: Path) -> int | None:
    with suppress(FileNotFoundError):  # deleted between the two looks
        return path.stat().st_size if path.is_file() else None
    return None


def _sha256_of(paths: Sequence[Path]) -> list[str]:
    """Side by side: at this size it is the reading and adding up that takes the time, and neither holds up others."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with suppress(FileNotFoundError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return "deleted meanwhile"
