"""Files of figures: machine, versions and command, and a row for each thing measured by each system."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from assay.types import UserError

OURS = "assay"
PEER_WORKLOAD = "16x64x256"  # what other systems' benchmarks run
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
    """Our rows say how they compare with other systems' figures that include log-probabilities, as ours do."""
    peers = {(row["id"], row["system"]): row for row in rows if row["system"] != OURS and row.get("logprobs")}
    return [row if row["system"] != OURS else row | ratios(row, peers) for row in rows]


def ratios(row: Row, peers: Mapping[tuple[str, str], Row]) -> dict[str, float]:
    return {
        f"ratio_to_{system}": round(row["tokens_per_s"] / peer["tokens_per_s"], 3)
        for (row_id, system), peer in peers.items()
        if row_id == row["id"] and "tokens_per_s" in row
    }


def peer_rows(path: Path) -> list[Row]:
    """From JSON lines as another system's benchmark prints them, among whatever else it says."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    runs: dict[tuple[str, str, bool], list[float]] = {}
    for line in lines:
        if (found := figure(line)) is not None:
            key = (f"gen-{found['shape']}-{PEER_WORKLOAD}", found["engine"], bool(found["logprobs"]))
            runs.setdefault(key, []).append(found["tokens_per_s"])
    if not runs:
        raise UserError(f'{path} has no line such as {{"engine": "vllm", "shape": "0.5b", "logprobs": true, ...}}')
    return [
        {"id": row_id, "system": system, "logprobs": logprobs, "tokens_per_s": median(values), "runs": values}
        for (row_id, system, logprobs), values in runs.items()
    ]


def figure(line: str) -> Row | None:
    """The object in a line, if it is one of ours to read."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or not {"engine", "shape", "logprobs", "tokens_per_s"} <= found.keys():
        return None
    speed = found["tokens_per_s"]
    return found if isinstance(speed, (int, float)) and speed > 0 else None


def write(path: Path, content: Facts) -> None:
    """Either the whole file appears under its name, or nothing changes."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
