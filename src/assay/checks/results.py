"""Rules on the results of a finished run, and on the machine: memory and throughput.

The best throughput that runs with the same work have reached on this machine is in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from assay.checks.causes import (
    FIRST,
    LONG,
    MIN_STEPS,
    Diagnosis,
    Row,
    RunHistory,
    at_least,
    mean_of,
    now,
    percent,
    values,
)
from assay.runs.console import finite
from assay.runs.files import make_folder, read_json, write_json
from assay.runs.reading import setting

MIN_PROBLEMS = 20  # of an evaluation, for verdicts that all stay the same to count
SIGNIFICANT = 0.05
POWER = (1.96, 0.84)  # normal quantiles of a two-sided test at 5 %, and of a power of 80 %
FULL = 0.95  # of the memory: the next longer batch may not fit
SLOW = 0.25  # of the best throughput; other processes on the same cores explain a factor of 2
STARVING = 0.5  # share of the time in which one half of an asynchronous run waits for the other
SPEED = "time/tokens_per_s"
WARM_UP = 2  # steps that compile and allocate
MIN_GENERATE_S = 1.0  # seconds of generation per step: of shorter ones, the overhead is measured


def results_of(summary: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """before, after and paired; empty if they are missing."""
    before, after, paired = (summary.get(key) for key in ("before", "after", "paired"))
    return tuple(part if isinstance(part, dict) else {} for part in (before, after, paired))  # type: ignore[return-value]


def has_gained(summary: Mapping[str, Any]) -> bool:
    """Whether the accuracy increased significantly."""
    before, after, paired = results_of(summary)
    gain = after.get("accuracy", 0.0) - before.get("accuracy", 0.0)
    return gain > 0 and paired.get("p_value", 1.0) < SIGNIFICANT


def fell_from_best(run: RunHistory) -> Diagnosis | None:
    """The last evaluation is far below an earlier one: their 95 % intervals do not overlap."""
    evals = [
        row for row in run.steps if all(finite(row, f"eval/{name}") is not None for name in ("accuracy", "low", "high"))
    ]
    best = max(evals, key=lambda row: row["eval/low"], default=None)
    if best is None or best["eval/low"] <= evals[-1]["eval/high"]:
        return None
    earlier, last = (f"{100 * row['eval/accuracy']:.1f} % in step {row['step']}" for row in (best, evals[-1]))
    return Diagnosis(
        "fell_from_best",
        f"the accuracy in evaluations during the run fell from {earlier} to {last}",
        f"keep the best checkpoint (save.best = true), end earlier ({now(run.config, 'train.steps')}), or lower "
        f"{now(run.config, 'optim.lr')}",
    )


def unchanged_accuracy(summary: Mapping[str, Any], config: Mapping[str, Any]) -> Diagnosis | None:
    """Not one problem was gained or lost, although there were updates."""
    before, after, paired = results_of(summary)
    if not paired or paired.get("gained") or paired.get("lost") or after.get("accuracy") == 1.0:
        return None
    if after.get("n", 0) < MIN_PROBLEMS or before.get("statuses") != after.get("statuses"):
        return None  # with other statuses, the answers have changed: unreadable ones became readable, for example
    steps = summary.get("steps")
    keys = ("optim.lr", "train.steps") if steps else ("sft.lr", "sft.steps")
    same_length = before.get("mean_length") == after.get("mean_length")
    return Diagnosis(
        "no_change",
        f"the verdict on all {after.get('n')} evaluated problems is the same as before the training"
        + (", and so is the length of the answers" if same_length else ""),
        f"raise {' or '.join(now(config, key) for key in keys)}"
        + ("" if same_length or not steps else "; see whether reward/mean increases in curves.png"),
    )


def not_significant(summary: Mapping[str, Any], config: Mapping[str, Any]) -> Diagnosis | None:
    """The difference between before and after may be chance, and more problems could show whether it is."""
    before, after, paired = results_of(summary)
    count, p_value = after.get("n", 0), paired.get("p_value")
    gained, lost = paired.get("gained", 0), paired.get("lost", 0)
    difference = after.get("accuracy", 0.0) - before.get("accuracy", 0.0)
    if not count or p_value is None or p_value < SIGNIFICANT or not difference:
        return None
    needed = problems_needed(count, gained, lost, difference)
    if config.get("eval", {}).get("final_examples") == 0:
        more = f"about {needed:,} problems would be needed, and all {count:,} were used"
    else:
        more = f"evaluate on about {needed:,} problems ({now(config, 'eval.final_examples')}, 0 means all)"
    return Diagnosis(
        "not_significant",
        f"the accuracy changed by {100 * difference:+.1f} points on {count} problems ({gained} gained, {lost} lost), "
        f"which may be chance (p = {p_value:.2g})",
        f"{more}; sample several answers per problem ({now(config, 'eval.samples')}), or train longer "
        f"({now(config, 'train.steps')})",
    )


def problems_needed(count: int, gained: int, lost: int, difference: float) -> int:
    """Number of problems with which McNemar's test finds a difference like this one in 80 % of all cases (Connor 1987),
    if as large a fraction of the verdicts changes. Rounded up to two digits.
    """
    changed = max((gained + lost) / count, abs(difference))
    size = POWER[0] * math.sqrt(changed) + POWER[1] * math.sqrt(max(changed - difference**2, 0.0))
    needed = max((size / difference) ** 2, count + 1)
    unit = 10 ** max(math.floor(math.log10(needed)) - 1, 0)
    return math.ceil(needed / unit) * unit


def memory_full(run: RunHistory) -> Diagnosis | None:
    for name, what, keys in (
        ("memory/gpu", "GPU memory", ("train.token_budget", "engine.kv_cache_gib", "train.activation_checkpointing")),
        ("memory/host", "main memory", ("train.token_budget", "engine.kv_cache_gib", "reward.workers")),
    ):
        if window := run.lasting(at_least(name, FULL), MIN_STEPS):
            listed = ", ".join(map(window.now, keys[:2]))
            more = keys[2]
            if more == "train.activation_checkpointing":
                more = f"{more} = true, {window.now('engine.max_batch')}"
            return Diagnosis(
                "memory_full",
                f"{percent(max(values(window.rows, name)))} of the {what} was in use {window.span} ({name})",
                f"lower {listed} or {more}, or end other processes that use it; a longer answer may not fit",
            )
    return None


def throughput(rows: list[Row]) -> float | None:
    """Median of the generated tokens per second; None if steps are too short to measure it."""
    speeds = values(rows, SPEED)
    if len(speeds) < MIN_STEPS or mean_of(rows, "time/generate") < MIN_GENERATE_S:
        return None
    return median(speeds)


def slower_than_before(run: RunHistory) -> Diagnosis | None:
    """Generation has become much slower than in the first steps of the same run."""
    if len(run.steps) < FIRST + LONG:
        return None
    start, last = throughput([*run.first[WARM_UP:]]), throughput([*run.steps[-LONG:]])
    if start is None or last is None or last >= SLOW * start:
        return None
    return explain_slow(last, f"{start:,.0f} in the first steps", run.config)


def explain_slow(speed: float, best: str, config: Mapping[str, Any]) -> Diagnosis:
    device = setting(config, "device") or "auto"
    busy = "nvidia-smi" if str(device).startswith("cuda") else "top or nvidia-smi"
    return Diagnosis(
        "slow",
        f"{speed:,.0f} tokens per second were generated ({SPEED}), compared with {best}",
        f"see with {busy} whether other processes use the same device; check {now(config, 'threads')}, "
        f"{now(config, 'device')}, {now(config, 'engine.name')} and {now(config, 'engine.max_batch')}",
    )


def starving(run: RunHistory) -> Diagnosis | None:
    """In an asynchronous run, one of sampling and learning waits for the other most of the time."""
    servers = setting(run.config, "engine.name") in ("assay", "vllm", "sglang")  # else both share the same hardware
    more_servers = f"start more servers, lower {now(run.config, 'sampling.max_new_tokens')}, or train on fewer devices"
    more_groups = f"raise {now(run.config, 'source.max_staleness')}, or use fewer servers or more devices for training"
    for name, what, remedy in (
        ("async/learner_idle", "the learner waited for groups", more_servers if servers else ""),
        ("async/engine_idle", "the engine had nothing to sample", more_groups),
    ):
        if remedy and (window := run.lasting(at_least(name, STARVING), LONG)):
            share = percent(window.mean(name))
            return Diagnosis("starving", f"{what} {share} of the time {window.span} ({name})", remedy)
    return None


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
