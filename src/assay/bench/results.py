"""Where figures were measured: the machine, and versions of what ran on it.

Files of figures: machine, versions and command, and a row for each thing measured by each system.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from assay import __version__
from assay.runs.files import write_text
from assay.types import UserError


def describe_machine() -> dict[str, Any]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "gpus": gpus,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": memory_gib(),
    }


def describe_versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "transformers": version_of("transformers"),
        "assay": __version__,
    }


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def memory_gib() -> int | None:
    """Whole ones: the last digits change from boot to boot."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None


OURS = "assay"
PEER_WORKLOAD = "16x64x256"  # what other systems' benchmarks run
PEER_MODE = "hf"  # of a trainer's benchmark: it generates by transformers; other modes stand in the system's name
Row = dict[str, Any]
Facts = Mapping[str, Any]


def save(path: Path, machine: Facts, versions: Facts, command: str, rows: Sequence[Row]) -> None:
    """Rows take the place of those with the same id and system; the others of the file stay."""
    merged = with_ratios(merge(earlier_rows(path, machine, versions), rows))
    write(path, {"machine": dict(machine), "versions": dict(versions), "command": command, "rows": merged})


def earlier_rows(path: Path, machine: Facts, versions: Facts) -> list[Row]:
    """Of a file that may be added to; an error where it cannot be, so call this before measuring anything."""
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    if not path.exists():
        return []
    content = read(path)
    for name, now in (("machine", machine), ("versions", versions)):
        before = content[name]
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            listed = ", ".join(f"{key} {before.get(key)}, now {now.get(key)}" for key in changed)
            raise UserError(f"{path} has figures of other {name} ({listed}): give another --json file, or delete it")
    return content["rows"]


def read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    kinds = {"machine": dict, "versions": dict, "rows": list}
    fits = isinstance(content, dict) and all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    if not fits or not all(isinstance(row, dict) and {"id", "system"} <= row.keys() for row in content["rows"]):
        raise UserError(f"{path} is no file of benchmark figures: give another --json file, or delete it")
    return content


def key_of(row: Row) -> tuple[str, str, bool]:
    """A system may be measured with log-probabilities and without."""
    return row["id"], row["system"], bool(row.get("logprobs", True))


def merge(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Rows measured again keep their place."""
    merged = {key_of(row): row for row in earlier}
    for row in rows:
        merged[key_of(row)] = row
    return list(merged.values())


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Our rows say how many times as fast they are as other systems: in generation, as those with log-probabilities."""
    peers = {
        (row["id"], row["system"]): row
        for row in rows
        if row["system"] != OURS and (row.get("logprobs") or "step_s" in row)
    }
    return [row if row["system"] != OURS else row | ratios(row, peers) for row in rows]


def ratios(row: Row, peers: Mapping[tuple[str, str], Row]) -> dict[str, float]:
    return {
        f"ratio_to_{system}": round(speed(row) / speed(peer), 3)
        for (row_id, system), peer in peers.items()
        if row_id == row["id"] and ("tokens_per_s" in row or "step_s" in row)
    }


def speed(row: Row) -> float:
    return row["tokens_per_s"] if "tokens_per_s" in row else 1 / row["step_s"]


def peer_rows(path: Path) -> list[Row]:
    """From JSON lines as another system's benchmark prints them, among whatever else it says."""
    runs: dict[tuple[str, str, bool], list[float]] = {}
    for found in figures(path, {"engine", "shape", "logprobs", "tokens_per_s"}, "tokens_per_s"):
        key = (f"gen-{found['shape']}-{PEER_WORKLOAD}", found["engine"], bool(found["logprobs"]))
        runs.setdefault(key, []).append(found["tokens_per_s"])
    if not runs:
        raise UserError(f'{path} has no line such as {{"engine": "vllm", "shape": "0.5b", "logprobs": true, ...}}')
    return [
        {"id": row_id, "system": system, "logprobs": logprobs, "tokens_per_s": median(values), "runs": values}
        for (row_id, system, logprobs), values in runs.items()
    ]


def peer_steps(path: Path) -> list[Row]:
    """The same for whole steps: a line a step, of which the first of each mode is its warm-up."""
    steps: dict[str, list[Row]] = {}
    for found in figures(path, {"system", "mode", "step_s", "peak_gib"}, "step_s"):
        plain = found["mode"] == PEER_MODE
        steps.setdefault(found["system"] if plain else f"{found['system']}-{found['mode']}", []).append(found)
    if not any(len(lines) > 1 for lines in steps.values()):
        example = '{"system": "trl", "mode": "hf", "step_s": 20.5, "peak_gib": 30.1}'
        raise UserError(f"{path} has no two lines such as {example}: one for the warm-up, then one a step")
    return [
        {
            "id": f"step-0.5b-{PEER_WORKLOAD}",
            "system": system,
            "step_s": median(line["step_s"] for line in timed),
            "runs": [line["step_s"] for line in timed],
            "first_step_s": first["step_s"],
            "peak_gib": max(line["peak_gib"] for line in (first, *timed)),
        }
        for system, (first, *timed) in steps.items()
        if timed
    ]


def figures(path: Path, names: set[str], value: str) -> Iterator[Row]:
    """The objects in a file's lines that have these names and a figure as `value`."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        fits = isinstance(found, dict) and names <= found.keys()
        if fits and isinstance(found[value], int | float) and found[value] > 0:
            yield found


def write(path: Path, content: Facts) -> None:
    """Either the whole file appears under its name, or nothing changes."""
    try:
        write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
