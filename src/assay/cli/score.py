"""Judge the completions in a JSONL file, and print a summary as JSON.

Each row has 'completion' and 'gold' or 'answer' (for countdown 'nums' and 'target', for code 'tests'), or is a row of
a run's rollouts/step-N.jsonl. It is written with its 'verdict' to OUT.jsonl, in the same order.

With --reward judge, a model at an OpenAI-compatible endpoint judges: see the settings of [judge]. With --config, the
task and the judge come from a training config; options override them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

from assay.build.measure import ScoreConfig, as_item, inherited_settings
from assay.cli.eval import add_config
from assay.config.settings import load_settings
from assay.evals import wilson
from assay.rewards import EXTRACTORS, FunctionJudge, Judge, JudgePanel, Judging, MathVerifyJudge, check_verdicts
from assay.rewards.pool import Item
from assay.runs.console import Console, aligned
from assay.runs.files import atomic_write, print_json, reported
from assay.tasks import Task, make_task
from assay.tasks.registry import MODEL_JUDGE, TASK_JUDGE, build_judge_pool, judge_pool, reward_functions
from assay.tasks.sources import DataRow, read_rows
from assay.types import Status, UserError, Verdict, excerpt, plural, unknown_name

SETTINGS = ScoreConfig
SHOWN_DISAGREEMENTS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    forms = "|".join(EXTRACTORS)
    parser.add_argument("file", metavar="FILE", help="the completions: JSONL, or Parquet")
    parser.add_argument("--task", metavar="NAME", help="gsm8k, math, countdown, abacus, code, or my_file.py:MyTask")
    parser.add_argument("--lenient", action="store_true", help="accept other answer formats, or the last number")
    for option, key, metavar, text in (  # short for settings
        ("extract", "extract", forms, "required answer format (default: the task's)"),
        ("reward", "function", "FILE.py:FN", "a reward function instead of the task's judge, or 'judge'"),
        ("correct", "correct", "R", "reward of a correct answer (default 1)"),
        ("wrong", "wrong", "R", "reward of a wrong answer (default 0)"),
        ("unparsable", "unparsable", "R", "reward of an unparsable answer (default 0)"),
        ("timeout", "timeout_s", "S", "time limit per answer in seconds (default 5)"),
        ("workers", "workers", "N", "judge processes (default 2)"),
    ):
        parser.add_argument(f"--{option}", dest=f"reward.{key}", metavar=metavar, help=text)
    add_sandbox_arguments(parser)
    add_config(parser)
    parser.add_argument("--out", required=True, metavar="OUT.jsonl", help="output file")
    parser.add_argument("--force", action="store_true", help="replace an existing OUT.jsonl")
    parser.add_argument(
        "--against",
        metavar="KIND",
        help=f"compare with a second judge and list disagreements: {forms}|lenient|math-verify, or FILE.py:FN",
    )


def add_sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    text = "see the setting reward.sandbox (default auto)"
    parser.add_argument("--sandbox", dest="reward.sandbox", choices=("auto", "strict", "off"), default=None, help=text)
    text = "an environment variable to pass to the judge"
    parser.add_argument("--pass-env", dest="reward.pass_env", action="append", metavar="NAME", help=text)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    source, out = Path(args.file), Path(args.out)
    check_output(out, source, args.force)
    cfg = settings_of(args)
    functions, _ = reward_functions(cfg.reward)
    if TASK_JUDGE in functions and not cfg.task.name:
        raise UserError(
            "no judge: give --task NAME (gsm8k, math, countdown, abacus, code), --reward FILE.py:FUNCTION, or a "
            "--config that names a task"
        )
    if TASK_JUDGE not in functions and (args.lenient or "reward.extract" in args.overrides):
        raise UserError("--extract and --lenient have no effect with a reward function: leave them out")
    task = make_task(cfg.task.name, cfg.task.path or None, **cfg.task.args) if cfg.task.name else None
    other = second_judge(args.against, task, cfg.reward.extract)
    rows = read_rows(source)
    items = [as_item(row, task, optional_gold=functions == [MODEL_JUDGE]) for row in rows]
    verdicts = judge_all(build_judge_pool(cfg.reward, task, cfg.judge), items, "judging")
    check_verdicts(verdicts)
    audited = judge_all(judge_pool(other, cfg.reward), items, f"judging with {args.against}") if other else None
    write_rows(out, rows, verdicts)
    form = f"{cfg.reward.extract or 'default'}{'' if cfg.reward.strict else ', lenient'}"
    used = form if functions == [TASK_JUDGE] else ", ".join(functions)
    summary = {"file": args.file, "out": str(out), "task": cfg.task.name or None, "judge": used, **summarize(verdicts)}
    if audited is not None:
        check_verdicts(audited)
        summary |= audit(verdicts, audited, rows, args.against)
    summary["seconds"] = round(time.perf_counter() - started, 3)
    print_json(summary)
    report_failures(verdicts, rows)
    return 0


def settings_of(args: argparse.Namespace) -> ScoreConfig:
    """The settings of --config, then the options."""
    overrides = args.overrides
    if args.task is not None:
        overrides["task"] = args.task
    if args.lenient:
        overrides["reward.strict"] = False
    if getattr(args, "reward.function") is not None:  # replaces all functions of the config
        overrides |= {"reward.functions": [], "reward.weights": []}

    def is_used(key: str) -> bool:
        return key.partition(".")[0] in ScoreConfig.model_fields

    inherited = inherited_settings((), overrides, False, is_used, args.config)
    return load_settings(ScoreConfig, None, {**inherited, **overrides})


def second_judge(kind: str | None, task: Task | None, extract: str) -> Judge | None:
    if kind is None:
        return None
    if kind == "math-verify":
        return MathVerifyJudge()
    if ":" in kind:
        return FunctionJudge(kind)
    if kind not in EXTRACTORS and kind != "lenient":
        raise unknown_name(
            "judge", kind, [*EXTRACTORS, "lenient", "math-verify", "FILE.py:FUNCTION"], where="for --against"
        )
    if task is None:
        raise UserError(f"--against {kind} needs --task")
    if kind == "lenient":
        return task.judge(extract or None, strict=False)
    return task.judge(kind, strict=True)


def judge_all(judging: Judging, items: Sequence[Item], what: str) -> list[Verdict]:
    with judging, Console(sys.stderr) as console:
        verdicts = judging.judge(items, partial(console.progress, what, unit="answers"))
        if isinstance(judging, JudgePanel):
            console.note(judging.describe_usage())
        return verdicts


def check_output(out: Path, source: Path, force: bool) -> None:
    """Check that --out can be written, before any work. Existing files need --force; the input is never replaced."""
    if not source.exists():
        raise UserError(f"{source} does not exist")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: give a file")
    if out.exists() and os.path.samefile(out, source):
        raise UserError(f"--out {out} is the input file: choose another name")
    if out.is_file() and not force:
        raise UserError(f"--out {out} exists: choose another name, or --force to replace it")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist")
    target = out.parent if not out.exists() or out.is_file() else out
    if not os.access(target, os.W_OK):
        raise UserError(f"--out {out} cannot be written: {target} is not writable")


def write_rows(out: Path, rows: Sequence[DataRow], verdicts: Sequence[Verdict]) -> None:
    def write_to(file: IO[bytes]) -> None:
        for row, verdict in zip(rows, verdicts, strict=True):
            file.write(json.dumps({**row.values, "verdict": asdict(verdict)}).encode("ascii") + b"\n")

    with reported(out, "choose another --out"):
        if out.exists() and not out.is_file():  # a device or a pipe cannot be replaced
            with out.open("wb") as device:
                write_to(device)
        else:
            with atomic_write(out.resolve()) as file:
                write_to(file)


def summarize(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    n = len(verdicts)
    correct = sum(verdict.correct for verdict in verdicts)
    counts = Counter(verdict.status.value for verdict in verdicts)
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "ci95": list(wilson(correct, n)),
        "mean_reward": sum(verdict.reward for verdict in verdicts) / n,
        "status": {status.value: counts[status.value] for status in Status},
    }


def audit(
    verdicts: Sequence[Verdict], audited: Sequence[Verdict], rows: Sequence[DataRow], kind: str
) -> dict[str, Any]:
    """Rows to which the two judges give a different status, and whether that changes correctness."""
    disagreements = [
        {
            "row": index,
            "where": row.where,
            "status": first.status.value,
            "parsed": first.parsed,
            "against_status": second.status.value,
            "against_parsed": second.parsed,
            "changes_correctness": first.correct != second.correct,
        }
        for index, (first, second, row) in enumerate(zip(verdicts, audited, rows, strict=True))
        if first.status is not second.status
    ]
    print_disagreements(disagreements, kind, len(verdicts))
    same_correctness = len(verdicts) - sum(bool(entry["changes_correctness"]) for entry in disagreements)
    return {
        "against": kind,
        "against_accuracy": sum(verdict.correct for verdict in audited) / len(audited),
        "same_status": len(verdicts) - len(disagreements),
        "same_correctness": same_correctness,
        "agreement": same_correctness / len(verdicts),
        "disagreements": disagreements,
    }


def print_disagreements(disagreements: Sequence[Mapping[str, Any]], kind: str, rows: int) -> None:
    changed = sum(bool(entry["changes_correctness"]) for entry in disagreements)
    line = f"{plural(len(disagreements), 'disagreement')} with {kind} in {plural(rows, 'row')}"
    print(f"{line}, of which {changed} change correctness" if disagreements else line, file=sys.stderr)
    if not disagreements:
        return
    table = [("row", "status", "parsed", "against", "parsed")]
    for entry in disagreements[:SHOWN_DISAGREEMENTS]:
        first, second = (
            "-" if parsed is None else excerpt(parsed, 32) for parsed in (entry["parsed"], entry["against_parsed"])
        )
        table.append((str(entry["row"]), entry["status"], first, entry["against_status"], second))
    print("\n".join(aligned(table)), file=sys.stderr)
    if len(disagreements) > SHOWN_DISAGREEMENTS:
        print(f"... and {len(disagreements) - SHOWN_DISAGREEMENTS} more, in the summary", file=sys.stderr)


def report_failures(verdicts: Sequence[Verdict], rows: Sequence[DataRow]) -> None:
    failures = [(v, row) for v, row in zip(verdicts, rows, strict=True) if v.status is Status.ERROR]
    if failures:
        verdict, row = failures[0]
        detail = verdict.detail.encode("ascii", "backslashreplace").decode()
        print(f"{plural(len(failures), 'row')} could not be judged; the first, {row.where}: {detail}", file=sys.stderr)
