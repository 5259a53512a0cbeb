"""Diagnosis of a run: rules on results and on the machine, all rules together, and what the files of answers show.

Damaged or missing files are left out: what can be read is diagnosed. The best throughput that runs with the same work
have reached on this machine is in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from assay.checks import steps
from assay.checks.causes import (
    FIRST,
    LONG,
    MIN_STEPS,
    Diagnosis,
    Row,
    RunHistory,
    Window,
    at_least,
    mean_of,
    now,
    percent,
    ranked,
    values,
)
from assay.runs.console import finite
from assay.runs.directory import Run, RunFiles, setting
from assay.runs.files import make_folder, read_json, user_folder, write_json
from assay.runs.rollouts import rollout_path, rollout_steps
from assay.types import Status, describe_error, excerpt

# Results of a finished run

HIGHEST_RATE = 0.03  # above which a higher learning rate is no advice for any model
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
    rate, count = ("optim.lr", "train.steps") if steps else ("sft.lr", "sft.steps")
    keys = [rate, count] if (setting(config, rate) or 0) < HIGHEST_RATE else [count]
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
    batch = now(run.config, "engine.max_batch")
    for name, what, more in (
        ("memory/gpu", "GPU memory", f"train.activation_checkpointing = true, {batch}"),
        ("memory/host", "main memory", "reward.workers"),
    ):
        if window := run.lasting(at_least(name, FULL), MIN_STEPS):
            listed = f"{window.now('train.token_budget')}, {window.now('engine.kv_cache_gib')}"
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
MACHINE_FACTS = ("host", "cpu", "usable_cores", "gpus")


def record_speed(files: RunFiles, rows: Sequence[Row], config: Mapping[str, Any]) -> None:
    """Store the throughput of a finished run if it is the best so far. Without a cache directory, do nothing."""
    speed, file = measured(rows), cache_file(files, config)
    if speed is None or file is None or speed <= best_speed(file):
        return
    with suppress(OSError):
        make_folder(file.parent)
        write_json(file, {"tokens_per_s": speed, "run": files.path.resolve().name})


def slower_than_best(files: RunFiles, rows: Sequence[Row], config: Mapping[str, Any]) -> Diagnosis | None:
    """A run that is much slower than the best one with the same work."""
    speed, file = measured(rows), cache_file(files, config)
    if speed is None or file is None or speed >= SLOW * (best := best_speed(file)):
        return None
    run = read_json(file).get("run")
    return explain_slow(speed, f"{best:,.0f} in run {run} with the same work on this machine", config)


def measured(rows: Sequence[Row]) -> float | None:
    return throughput([row for row in rows if "reward/mean" in row][WARM_UP:])


def best_speed(file: Path) -> float:
    value = read_json(file).get("tokens_per_s")
    return float(value) if isinstance(value, int | float) else 0.0


def cache_file(files: RunFiles, config: Mapping[str, Any]) -> Path | None:
    """Named after a hash of machine and work; None if the machine of the run is not known."""
    environment = files.document("environment.json")
    last = (environment.get("resumed") or [environment])[-1]
    machine = {key: setting(last, f"machine.{key}") for key in MACHINE_FACTS}
    if machine["host"] is None:
        return None
    work = {key: setting(config, key) or None for key in WORK}  # files leave empty values out
    text = json.dumps([machine, setting(last, "threads"), work], sort_keys=True, default=str)
    try:
        cache = user_folder("XDG_CACHE_HOME", ".cache")
    except RuntimeError:
        return None
    return cache / "speed" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


# All rules

Rule = Callable[[RunHistory], Diagnosis | None]
# Rules that do not apply to a run whose accuracy has increased significantly, up to its end.
LEARNING: tuple[Rule, ...] = (
    steps.cannot_learn,
    steps.judge_often_fails,
    steps.stale_or_mismatched,
    steps.learning_rate_high,
    steps.entropy_collapse,
    steps.length_collapse,
    steps.length_explosion,
    steps.kl_blow_up,
    steps.always_clipped,
    steps.truncated,
    steps.few_useful_groups,
)
MACHINE: tuple[Rule, ...] = (memory_full, slower_than_before, starving)


def diagnose(
    rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None = None
) -> list[Diagnosis]:
    """Causes that keep the run from learning or harm it, most important first; empty if nothing is wrong.

    A cause that is only a consequence of another one in the list is left out. `rows`: lines of metrics.jsonl; of a long
    run, the first and the last steps are enough. `summary`: of a finished run, for which any number of steps is
    evidence. If its accuracy has increased significantly and is not far below the best one during the run, only causes
    that concern the machine remain.
    """
    run = RunHistory([row for row in rows if "reward/mean" in row], config, finished=summary is not None)
    fallen = fell_from_best(run)
    gained = summary is not None and has_gained(summary) and fallen is None
    found = [fallen, *(rule(run) for rule in (*(() if gained else LEARNING), *MACHINE))]
    if summary is not None and not gained:
        found.append(not_significant(summary, config))
        if not Window(run.steps[FIRST:], run.first, config).improving:
            found.append(unchanged_accuracy(summary, config))
    return ranked(cause for cause in found if cause is not None)


# Run folders

UNEXPECTED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)  # values of a damaged file
SHOWN = 3  # examples of a cause
EXAMPLE_CHARS = 160  # of the end of an answer, where the final answer is
QUOTED = 60  # characters of a detail or an extracted answer
MAX_FILES = 200  # rollout files whose prompts are compared with evaluations, spread over the run
JUDGED = (Status.NO_ANSWER, Status.UNPARSABLE, Status.WRONG)
# Causes that answers illustrate, and the statuses of these answers. None: answers that were cut off.
ILLUSTRATED: dict[str, tuple[Status, ...] | None] = {
    "judge_fails": (Status.ERROR, Status.TIMEOUT),
    "no_answer": (Status.NO_ANSWER, Status.UNPARSABLE),
    "never_rewarded": JUDGED,
    "equal_rewards": JUDGED,
    "truncated": None,
}


def diagnose_run(run: Run) -> list[Diagnosis]:
    """Diagnose a run folder, finished or not."""
    return diagnose_files(RunFiles(run.path))


def diagnose_files(
    files: RunFiles,
    rows: Sequence[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    leakage: bool = True,
) -> list[Diagnosis]:
    """Diagnose what can be read. Afterwards, `files.problems` says what cannot.

    `rows` (of metrics.jsonl), `config`, `summary`: read from the files unless they are given. `leakage`: also compare
    the prompts of training and evaluations.
    """
    rows = files.readable_metrics() if rows is None else rows
    config = files.config() if config is None else config
    summary = files.document("summary.json") or None if summary is None else summary
    found: list[Diagnosis] = []

    def attempt(rules: Callable[[], Iterable[Diagnosis | None]]) -> None:
        try:
            found.extend(filter(None, rules()))
        except UNEXPECTED as error:
            files.add_problem(f"some rules cannot be applied: a file has unexpected values ({describe_error(error)})")

    attempt(lambda: diagnose(rows, config, summary))
    attempt(lambda: [slower_than_best(files, rows, config)])
    if leakage:
        attempt(lambda: [shared_prompts(files, config)])
    return [with_examples(cause, files) for cause in ranked(found)]


# Examples


def with_examples(cause: Diagnosis, files: RunFiles) -> Diagnosis:
    """The cause with three answers of the last step that show it, and the most frequent reason of their verdicts."""
    if cause.name not in ILLUSTRATED or cause.examples:
        return cause
    steps = rollout_steps(files.path)
    lines = [*files.lines(rollout_path(files.path, steps[-1]))] if steps else []
    statuses = ILLUSTRATED[cause.name]
    if statuses is None:
        lines = [line for line in lines if line.get("truncated")]
        return replace(cause, examples=tuple(map(example, spread(lines))))
    kinds = Counter(kind for line in lines if (kind := failure(line))[0] in statuses)
    if not kinds:
        return cause
    (kind, count), *_ = kinds.most_common(1)
    detail = f" ({excerpt(kind[1], QUOTED)})" if kind[1] else ""
    shown = spread([line for line in lines if failure(line) == kind])
    evidence = f"{cause.evidence}; in step {steps[-1]}, {percent(count / len(lines))} of the verdicts are {kind[0]}"
    return replace(cause, evidence=evidence + detail, examples=tuple(map(example, shown)))


def failure(line: Mapping[str, Any]) -> tuple[str, str]:
    """Status and detail of a verdict."""
    status, detail = (setting(line, f"verdict.{name}") for name in ("status", "detail"))
    return str(status or ""), str(detail or "")


def spread(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Answers to different prompts, as far as there are any."""
    by_prompt = {str(line.get("prompt_id")): line for line in reversed(lines)}
    others = [line for line in lines if line not in by_prompt.values()]
    return [*reversed(by_prompt.values()), *others][:SHOWN]


def example(line: Mapping[str, Any]) -> str:
    """One line: the prompt, the end of the answer, what was extracted from it, and the expected answer."""
    parsed = setting(line, "verdict.parsed")
    expected = f", expected {excerpt(str(line['answer']), QUOTED)}" if line.get("answer") else ""
    found = "" if parsed is None else f", extracted {excerpt(str(parsed), QUOTED)}"
    text = str(line.get("text", "")).strip()
    end = text if len(text) <= EXAMPLE_CHARS else f"... {text[-EXAMPLE_CHARS:]}"
    return f"{line.get('prompt_id')}: {json.dumps(end, ensure_ascii=False)}{found}{expected}"


# Leakage


def shared_prompts(files: RunFiles, config: Mapping[str, Any]) -> Diagnosis | None:
    """Problems that the run was trained on and evaluated on, by their text.

    Episodes of environments may begin with the same text, and are not compared.
    """
    if setting(config, "env.name"):
        return None
    trained: dict[str, str] = {}
    steps = rollout_steps(files.path)
    for step in steps[:: max(len(steps) // MAX_FILES, 1)]:
        for line in files.lines(rollout_path(files.path, step)):
            if line.get("sample") in (0, None):
                trained.setdefault(prompt_text(line), str(line.get("prompt_id")))
    for label in ("before", "eval"):
        for file in sorted((files.path / "evals").glob(f"step-*-{label}-*.jsonl"))[:1] if trained else ():
            split = file.stem.rpartition("-")[2]
            if split not in ("train", "all"):
                ids = {prompt_text(line): str(line.get("prompt_id")) for line in files.lines(file)}
                if shared := [(prompt_id, trained[text]) for text, prompt_id in ids.items() if text in trained]:
                    return explain_leakage(split, len(shared), len(ids), shared[0])
    return None


def prompt_text(line: Mapping[str, Any]) -> str:
    """The text of the user's messages, without differences in case and white space."""
    messages = line.get("messages")
    parts = [part for part in messages if isinstance(part, Mapping)] if isinstance(messages, list) else []
    words = (str(part.get("content")).casefold().split() for part in parts if part.get("role") == "user")
    return " ".join(chain.from_iterable(words))


def explain_leakage(split: str, shared: int, count: int, example: Sequence[str]) -> Diagnosis:
    """`example`: ids of the same problem in the evaluation and in the train split."""
    return Diagnosis(
        "leakage",
        f"{shared} of the {count} {split} problems are also in the train split (e.g. {' and '.join(example)}), so the "
        "accuracy on them is too high",
        "remove them from the train split: give task.path a folder with train.jsonl and test.jsonl that share no "
        "problem, or choose other task.args",
        "error" if shared == count else "warning",
    )
