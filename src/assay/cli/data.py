"""Prepare, show or check the problems of a task."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.cli.score import add_sandbox_arguments
from assay.rewards import JudgePool
from assay.runs.files import json_line, print_json, reported, write_text
from assay.tasks import SPLITS, Task, make_task, overlap
from assay.tasks.base import ALL, ANSWER_FORMS, LazyPrompts, NoSuchSplit, is_gold, prompts_of, seeded_shuffle
from assay.tasks.sources import DEFAULT_VALIDATION, MANIFEST, jsonl_text, manifest_of, prepared_row
from assay.types import Prompt, Status, UserError, plural

PREPARABLE = ("gsm8k", "math", "countdown", "abacus", "code")
GENERATED_TRAIN_SIZE = 10_000
HELD_OUT = DEFAULT_VALIDATION
LAZY_CHECKED = 1_000  # gold answers that are checked of an endless split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="prepare|show|check")
    prepare = commands.add_parser("prepare", help="write train, validation and a fixed evaluation file")
    prepare.add_argument("name", choices=PREPARABLE)
    prepare.add_argument("--out", type=Path, help="folder to write to (default data/NAME)")
    prepare.add_argument(
        "--eval-size", type=int, help=f"problems of the evaluation file, sampled from test (default {HELD_OUT}, or all)"
    )
    prepare.add_argument(
        "--val-size",
        type=int,
        help=f"validation problems from train, or 0 (default {HELD_OUT}, or a tenth of fewer than {10 * HELD_OUT:,})",
    )
    prepare.add_argument("--train-size", type=int, help=f"generated tasks only (default {GENERATED_TRAIN_SIZE})")
    prepare.add_argument("--seed", type=int, default=0, help="seed of the splits, the sample and the generator")
    prepare.add_argument("--force", action="store_true", help="replace existing files")
    add_task_arguments(prepare)
    show = commands.add_parser("show", help="print a few problems")
    show.add_argument("name", help="a task's name, or a dotted path such as my_file.py:MyTask")
    add_task_arguments(show)
    show.add_argument("--split", choices=(*SPLITS, ALL), help="[train, or all of a single file]")
    show.add_argument("-n", type=int, default=3)
    show.add_argument("--json", action="store_true", help="print JSON lines, with all fields")
    check = commands.add_parser("check", help="judge every gold answer, and search for train problems in test")
    check.add_argument("name", help="a task's name, or a dotted path such as my_file.py:MyTask")
    add_task_arguments(check)
    check.add_argument(
        "--limit", type=int, help=f"gold answers per split (default all, or {LAZY_CHECKED} if generated)"
    )
    add_sandbox_arguments(check)


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", help="local file or folder (default: the Hugging Face hub, or the generator)")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the task, e.g. --arg max_steps=4",
    )


def task_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs; a value that is not JSON is a string."""
    parsed = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f'--arg needs NAME=VALUE, not "{pair}"')
        try:
            parsed[name] = json.loads(value)
        except (ValueError, RecursionError):
            parsed[name] = value
    return parsed


def run(args: argparse.Namespace) -> int:
    commands = {"prepare": run_prepare, "show": run_show, "check": run_check}
    return commands[args.data_command](args)


def run_prepare(args: argparse.Namespace) -> int:
    for option, size, least in (("--eval-size", args.eval_size, 1), ("--val-size", args.val_size, 0)):
        if size is not None and size < least:
            raise UserError(f"{option} must be at least {least}")
    out: Path = args.out or Path("data") / args.name
    sized = "*" if args.eval_size is None else args.eval_size
    patterns = ("train.jsonl", "validation.jsonl", f"test{sized}.jsonl", MANIFEST)
    present = [file.name for pattern in patterns for file in sorted(out.glob(pattern))]
    if present and not args.force:
        raise UserError(f"{out} already holds {', '.join(present)}: choose another --out, or --force to replace them")
    task, splits = prepare_splits(args)
    names = ("train.jsonl", "validation.jsonl", f"test{len(splits[2])}.jsonl")
    texts = {
        name: jsonl_text([prepared_row(prompt, task.bare_question(prompt)) for prompt in prompts])
        for name, prompts in zip(names, splits, strict=True)
        if prompts
    }
    manifest = {
        "task": task.name,
        "source": args.path or ("generated" if isinstance(task.prompts("train"), LazyPrompts) else "hub"),
        "seed": args.seed,
        "args": manifest_of(args.path).get("args", {}) | task_arguments(args.arg),  # also those of a prepared source
        "judge": task.judge_kind,
        "extract": task.default_extract,
        "files": {
            name: {"rows": text.count("\n"), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in texts.items()
        },
    }
    texts[MANIFEST] = json.dumps(manifest, indent=2) + "\n"  # written last, when the others are complete
    with reported(out, "choose another --out"):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(out / name, text)
        if names[1] not in texts:
            (out / names[1]).unlink(missing_ok=True)  # of files that --force replaces
    print_json({"out": str(out), **manifest})
    return 0


def prepare_splits(
    args: argparse.Namespace,
) -> tuple[Task, tuple[Sequence[Prompt], Sequence[Prompt], Sequence[Prompt]]]:
    """Train, validation and evaluation problems; the last are the first ones of a seeded shuffle of test."""
    extra = task_arguments(args.arg)
    generated = args.name == "abacus" or (args.name in ("countdown", "code") and args.path is None)
    if generated:
        task = make_task(args.name, args.path, **{"seed": args.seed, **extra})
        train, validation, test = (task.prompts(split) for split in ("train", "validation", "test"))
        train_size = args.train_size if args.train_size is not None else GENERATED_TRAIN_SIZE
        if train_size < 1:
            raise UserError("--train-size must be at least 1")
        val_size = args.val_size if args.val_size is not None else HELD_OUT
        held_out = validation[:val_size], test[: args.eval_size or HELD_OUT]
        return task, (train[:train_size], *held_out)
    if args.path is not None and Path(args.path).is_file():
        raise UserError(f"{args.path} is a single file: give a folder with train.jsonl and test.jsonl")
    if args.train_size is not None:
        raise UserError(
            "--train-size is only for generated tasks: the train file has all problems but those of validation"
        )
    task = make_task(args.name, args.path, **{"seed": args.seed, "val_size": args.val_size, **extra})
    test = task.prompts("test")
    if args.eval_size is not None and args.eval_size > len(test):
        raise UserError(f"--eval-size {args.eval_size} exceeds the {plural(len(test), 'problem')} of the test split")
    chosen = seeded_shuffle(len(test), args.seed)[: args.eval_size or HELD_OUT]
    validation = present_splits(task).get("validation", ())  # absent with val_size = 0
    return task, (task.prompts("train"), validation, [test[index] for index in chosen])


def run_show(args: argparse.Namespace) -> int:
    if args.n < 1:
        raise UserError("-n must be at least 1")
    task = make_task(args.name, args.path, **task_arguments(args.arg))
    for prompt in prompts_of(task, args.split or (ALL if task.has_all else "train"))[: args.n]:
        if args.json:
            print(json_line(asdict(prompt)), end="")
            continue
        print(f"--- {prompt.id}")
        for message in prompt.messages:
            print(f"[{message['role']}] {message['content']}")
        print(f"[answer] {prompt.answer}")
        if prompt.solution is not None:
            print(f"[solution] {prompt.solution}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise UserError("--limit must be at least 1")
    task = make_task(args.name, args.path, **task_arguments(args.arg))
    splits = present_splits(task)
    judged = {ALL: task.prompts(ALL)} if task.has_all else splits  # a single file is checked whole, in its own order
    sandbox, pass_env = getattr(args, "reward.sandbox"), getattr(args, "reward.pass_env")
    with JudgePool(task.judge(), sandbox=sandbox or "auto", pass_env=pass_env or ()) as pool:
        golds = {split: check_split_golds(task, prompts, pool, args.limit) for split, prompts in judged.items()}
    train = splits.get("train")
    against = {split: prompts for split, prompts in splits.items() if split != "train" and train is not None}
    summary = {
        "task": task.name,
        "gold": golds,
        "overlap_with_train": {split: asdict(overlap(train, prompts)) for split, prompts in against.items() if train},
        "missing_splits": [split for split in SPLITS if split not in splits],
        "ok": not any(gold["failed"] for gold in golds.values()),
    }
    print_json(summary)
    for split, gold in golds.items():
        if gold["failed"]:
            print(describe_failed_golds(task, split, gold), file=sys.stderr)
    return 0 if summary["ok"] else 1


def describe_failed_golds(task: Task, split: str, gold: Mapping[str, Any]) -> str:
    """One line about gold answers that are not judged correct, with the first one and what to change."""
    first, advice = gold["examples"][0], "fix the gold answers, the worked solutions or the judge"
    if first["status"] == Status.NO_ANSWER and task.default_extract in ANSWER_FORMS:
        advice = (
            f"its worked solution has no {ANSWER_FORMS[task.default_extract] % 'ANSWER'}: set another form (jsonl: "
            f"--arg extract=FORM, one of {', '.join(ANSWER_FORMS)}) or judge (--arg judge=file.py:function)"
        )
    return (
        f"{gold['failed']} of {plural(gold['checked'], 'gold answer')} in split {split} not judged correct; the first: "
        f"{first['id']}, status {first['status']}: {advice}"
    )


def present_splits(task: Task) -> dict[str, Sequence[Prompt]]:
    """The splits that the task has; a single file may be too short for all three."""
    splits, reasons = {}, []
    for split in SPLITS:
        try:
            splits[split] = task.prompts(split)
        except NoSuchSplit as error:
            reasons.append(str(error))
    if not splits:
        raise UserError("; ".join(reasons))
    return splits


def check_split_golds(task: Task, prompts: Sequence[Prompt], pool: JudgePool, limit: int | None) -> dict[str, Any]:
    if limit is None and isinstance(prompts, LazyPrompts):
        limit = LAZY_CHECKED
    chosen = list(prompts[:limit])
    verdicts = pool.judge([(task.gold_completion(prompt), prompt.answer, pool.fields(prompt)) for prompt in chosen])
    failed = [
        {
            "id": prompt.id,
            "status": str(verdict.status),
            "parsed": verdict.parsed,
            "answer": prompt.answer,
            "detail": verdict.detail,
        }
        for prompt, verdict in zip(chosen, verdicts, strict=True)
        if not is_gold(verdict)
    ]
    return {"problems": len(prompts), "checked": len(chosen), "failed": len(failed), "examples": failed[:10]}
