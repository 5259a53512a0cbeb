"""Result files of benchmarks: machine, versions, command, and one row per measurement and system."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from assay import __version__
from assay.runs.environment import cpu_model, memory_gib, usable_cores, version_of
from assay.runs.files import json_object, reported, write_text
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


OURS = "assay"
PEER_WORKLOAD = "16x64x256"  # of other systems' benchmarks
PEER_MODE = "hf"  # a trainer that generates with transformers; other modes become part of the system's name
Row = dict[str, Any]
Facts = Mapping[str, Any]


def summarize(name: str, first_name: str, values: Sequence[float], digits: int) -> Row:
    """The median of all values but the first, which is the warm-up, and the values themselves."""
    first, *runs = (round(value, digits) for value in values)
    return {name: round(median(values[1:]), digits), "runs": runs, first_name: first}


def save(path: Path, machine: Facts, versions: Facts, command: str, rows: Sequence[Row]) -> None:
    """Add rows to a file. Rows with the same id and system are replaced."""
    earlier = earlier_rows(path, machine, versions)
    # Rows that were measured again keep their position.
    merged = with_ratios([*{key_of(row): row for row in (*earlier, *rows)}.values()])
    write(path, {"machine": dict(machine), "versions": dict(versions), "command": command, "rows": merged})


def earlier_rows(path: Path, machine: Facts, versions: Facts) -> list[Row]:
    """Rows of a file that results can be added to. Raises UserError if they cannot: call this before measuring."""
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not path.exists():
        return []
    content = read(path)
    for name, now in (("machine", machine), ("versions", versions)):
        before = content[name]
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            listed = ", ".join(f"{key} {before.get(key)}, now {now.get(key)}" for key in changed)
            raise UserError(f"{path} has results of other {name} ({listed}): give another --json file, or delete it")
    return content["rows"]


def read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    kinds = {"machine": dict, "versions": dict, "rows": list}
    fits = isinstance(content, dict) and all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    if not fits or not all(isinstance(row, dict) and {"id", "system"} <= row.keys() for row in content["rows"]):
        raise UserError(f"{path} is not a file of benchmark results: give another --json file, or delete it")
    return content


def key_of(row: Row) -> tuple[str, str, bool]:
    """A system may have two rows: with and without log-probabilities."""
    return row["id"], row["system"], bool(row.get("logprobs", True))


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Add to our rows the speed relative to other systems (for generation, of those that return log-probabilities)."""
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
    """Rows from the JSON lines in the output of another system's generation benchmark; other lines are ignored."""
    runs: dict[tuple[str, str, bool], list[float]] = {}
    for line in json_lines(path, {"engine", "shape", "logprobs", "tokens_per_s"}, "tokens_per_s"):
        key = (f"gen-{line['shape']}-{PEER_WORKLOAD}", line["engine"], bool(line["logprobs"]))
        runs.setdefault(key, []).append(line["tokens_per_s"])
    if not runs:
        raise UserError(f'{path} has no line such as {{"engine": "vllm", "shape": "0.5b", "logprobs": true, ...}}')
    return [
        {"id": row_id, "system": system, "logprobs": logprobs, "tokens_per_s": median(values), "runs": values}
        for (row_id, system, logprobs), values in runs.items()
    ]


def peer_steps(path: Path) -> list[Row]:
    """Rows from a trainer's benchmark: one line per step, of which the first of each mode is the warm-up."""
    steps: dict[str, list[Row]] = {}
    for line in json_lines(path, {"system", "mode", "step_s", "peak_gib"}, "step_s"):
        suffix = "" if line["mode"] == PEER_MODE else f"-{line['mode']}"
        steps.setdefault(line["system"] + suffix, []).append(line)
    if not any(len(lines) > 1 for lines in steps.values()):
        example = '{"system": "trl", "mode": "hf", "step_s": 20.5, "peak_gib": 30.1}'
        raise UserError(f"{path} needs at least two lines such as {example}: the warm-up, then one per step")
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


def json_lines(path: Path, names: set[str], value: str) -> Iterator[Row]:
    """Lines of a file that are objects with these keys and a positive number as `value`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    for line in lines:
        row = json_object(line) or {}
        if names <= row.keys() and isinstance(row[value], int | float) and row[value] > 0:
            yield row


def write(path: Path, content: Facts) -> None:
    """Write atomically: a failure leaves an existing file unchanged."""
    with reported(path, "give another --json file"):
        write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
