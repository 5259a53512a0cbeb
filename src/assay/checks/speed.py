"""The best throughput that runs with the same work have reached on this machine, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from assay.checks.causes import Diagnosis, setting
from assay.checks.history import Row
from assay.checks.results import SLOW, WARM_UP, explain_slow, throughput
from assay.runs.files import make_folder, read_json, write_json

# Settings that throughput depends on. Runs that differ in one of them are not compared.
WORK = (
    *("model.source", "model.max_length", "lora.rank", "task.name", "task.path", "task.args", "env.name", "env.args"),
    *("device", "dtype", "threads", "train.prompts", "train.samples", "parallel.tp"),
    *("sampling.max_new_tokens", "sampling.temperature"),
    *("engine.name", "engine.dtype", "engine.max_batch", "engine.kv_cache_gib", "vllm.servers", "server.servers"),
)
MACHINE = ("host", "cpu", "usable_cores", "gpus")


def record_speed(path: Path, rows: Sequence[Row], config: Mapping[str, Any]) -> None:
    """Store the throughput of a finished run if it is the best so far. Without a cache directory, do nothing."""
    speed, file = measured(rows), cache_file(path, config)
    if speed is None or file is None or speed <= best_speed(file):
        return
    with suppress(OSError):
        make_folder(file.parent)
        write_json(file, {"tokens_per_s": speed, "run": path.resolve().name})


def slower_than_best(path: Path, rows: Sequence[Row], config: Mapping[str, Any]) -> Diagnosis | None:
    """A run that is much slower than the best one with the same work."""
    speed, file = measured(rows), cache_file(path, config)
    if speed is None or file is None or speed >= SLOW * (best := best_speed(file)):
        return None
    run = read_json(file).get("run")
    return explain_slow(speed, f"{best:,.0f} in run {run} with the same work on this machine", config)


def measured(rows: Sequence[Row]) -> float | None:
    return throughput([row for row in rows if "reward/mean" in row][WARM_UP:])


def best_speed(file: Path) -> float:
    value = read_json(file).get("tokens_per_s")
    return float(value) if isinstance(value, int | float) else 0.0


def cache_file(path: Path, config: Mapping[str, Any]) -> Path | None:
    """Named after a hash of machine and work; None if the machine of the run is not known."""
    environment = read_json(path / "environment.json")
    last = (environment.get("resumed") or [environment])[-1]
    machine = {key: setting(last, f"machine.{key}") for key in MACHINE}
    if machine["host"] is None:
        return None
    work = {key: setting(config, key) or None for key in WORK}  # files leave empty values out
    text = json.dumps([machine, setting(last, "threads"), work], sort_keys=True, default=str)
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = given if given.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return None
    return cache / "assay" / "speed" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
