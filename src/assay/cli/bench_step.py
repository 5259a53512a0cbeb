"""`assay bench step`: seconds of a whole GRPO step, and tokens a second of training alone."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from assay.cli.bench_rows import Job, add_output, measured, print_table, ratios_text
from assay.runs.console import Console
from assay.types import UserError

if TYPE_CHECKING:
    from assay.bench.step import Sequences
    from assay.bench.trainer import StepOptions
    from assay.bench.workload import Workload

HELP = "measure training: seconds of a whole GRPO step by parts, memory, tokens a second"
STANDARD = {"prompts": 16, "samples": 64, "prompt_tokens": 128, "new": 256, "temperature": 1.0}
STANDARD_TRAINING = {"sequences": 16, "tokens": 1024}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_work(parser.add_argument_group("what is done in a step"))
    group = parser.add_argument_group("how it is measured")
    group.add_argument("--device", default="auto", help="auto, cuda, cuda:N, mps or cpu [auto]")
    group.add_argument("--dtype", default="auto", help="of engine and computation: auto, float32 or bfloat16 [auto]")
    group.add_argument("--steps", type=int, default=3, help="timed ones, after a first that is told apart [3]")
    group.add_argument("--kl", type=float, default=0.0, metavar="WEIGHT", help="above 0: with a reference model [0]")
    group.add_argument("--peer", choices=("trl",), help="the same steps by this trainer, in turns, if it is installed")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE[,VALUE...]",
        help="a setting of the updater, e.g. token_budget; with several values a row for each (may be repeated)",
    )
    group.add_argument("--table", action="store_true", help="instead: the standard step and trainings, one by one")
    add_output(parser, "JSON lines of another trainer's benchmark of the standard step")


def add_work(group: argparse._ArgumentGroup) -> None:
    model = group.add_mutually_exclusive_group()
    model.add_argument("--shape", default="0.5b", help="0.5b, 1.5b, tiny-llama or tiny, with random weights [0.5b]")
    model.add_argument("--model", metavar="SOURCE", help="a model to load instead: folder, .gguf or hub id")
    group.add_argument("--prompts", type=int, help="[16]")
    group.add_argument("--samples", type=int, help="of each prompt [64]")
    group.add_argument("--prompt-tokens", type=int, help="[128]")
    group.add_argument("--new", type=int, help="tokens of each sample [256]")
    group.add_argument("--temperature", type=float, help="[1]")
    group.add_argument("--seed", type=int, default=0, help="of weights, prompts and draws [0]")
    group.add_argument("--train-only", action="store_true", help="no generation: train on given sequences, packed")
    group.add_argument("--sequences", type=int, help="of --train-only [16]")
    group.add_argument("--tokens", type=int, help="of --train-only, in each sequence [1024]")


def run(args: argparse.Namespace) -> int:
    from assay.bench.results import peer_steps
    from assay.bench.workload import words_of

    work, options = work_of(args), options_of(args)
    peers = [] if args.peer_rows is None else peer_steps(args.peer_rows)
    words = ["--table"] if args.table else ["--train-only"] * args.train_only + words_of(work)
    words += words_of(replace(options[0], set=())) + [word for text in args.set for word in ("--set", text)]
    rows = measured(args, peers, jobs_of(args, work, options), words, "--set token_budget=..., --samples or --new")
    print_rows(rows, Console())
    return 0


def work_of(args: argparse.Namespace) -> Workload | Sequences:
    """Options that are for the other kind of work are mistakes, not ignored."""
    from assay.bench.step import Sequences
    from assay.bench.workload import Workload

    own, others = (STANDARD_TRAINING, STANDARD) if args.train_only else (STANDARD, STANDARD_TRAINING)
    shared = {name: getattr(args, name) for name in ("shape", "model", "seed")}
    chosen = {name: getattr(args, name) for name in (*own, *others) if getattr(args, name) is not None}
    wrong = [f"--{name.replace('_', '-')}" for name in chosen if name in others]
    if args.table and (chosen or args.train_only or shared != {"shape": "0.5b", "model": None, "seed": 0}):
        raise UserError("--table has work of its own: leave out --train-only, the model and all sizes")
    if wrong:
        raise UserError(f"{wrong[0]} is {'not for' if args.train_only else 'for'} --train-only: leave it out")
    values: dict[str, Any] = shared | own | chosen
    return Sequences(**values) if args.train_only else Workload(**values)


def options_of(args: argparse.Namespace) -> list[StepOptions]:
    """One for each combination of the values to try."""
    from assay.bench.trainer import StepOptions

    choices = [
        [f"{name}={value}" for value in text.split(",")] for name, _, text in (s.partition("=") for s in args.set)
    ]
    plain = {field.name: getattr(args, field.name) for field in fields(StepOptions) if field.name != "set"}
    if (args.train_only or args.table) and args.peer:
        raise UserError("--peer is for one whole step: leave out --train-only and --table")
    if args.train_only and args.kl:
        raise UserError("--kl is for whole steps: leave out --train-only")
    return [StepOptions(**plain, set=chosen) for chosen in product(*choices)]


def jobs_of(args: argparse.Namespace, work: Workload | Sequences, options: list[StepOptions]) -> list[Job]:
    from assay.bench.step import TABLE, Sequences, measure_step, measure_training
    from assay.bench.workload import Workload

    works: tuple[Workload | Sequences, ...] = (Workload(), *TABLE) if args.table else (work,)
    jobs: list[Job] = []
    for what, how in product(works, options):
        note = " ".join((describe(what), *how.set))
        if isinstance(what, Sequences):
            jobs.append((note, partial(measure_training, what, replace(how, kl=0.0))))
        else:
            jobs.append((note, partial(measure_step, what, how)))
    return jobs


def describe(work: Workload | Sequences) -> str:
    from assay.bench.step import Sequences

    if isinstance(work, Sequences):
        return f"{work.label}: training on {work.sequences} sequences of {work.tokens} tokens"
    answers = f"{work.samples} answers of {work.new} tokens"
    return f"{work.label}: a step with {work.prompts} prompts of {work.prompt_tokens} tokens, {answers} to each"


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    print_table([cells_of(row) for row in rows], console)


def cells_of(row: dict[str, Any]) -> dict[str, str]:
    def text(name: str, form: str, values: dict[str, Any] = row) -> str:
        return "" if values.get(name) is None else format(values[name], form)

    parts = row.get("parts_s", {})
    return {
        "id": row["id"],
        "system": row["system"],
        "step s": text("step_s", ".3f"),
        "first": text("first_step_s", ".2f"),
        **{
            name: text(name, ".3f", parts) if parts.get(name) else ""
            for name in ("generation", "scoring", "reference", "training", "sync")
        },
        "tokens/s": text("tokens_per_s", ",.0f"),
        "tokens trained": text("trained_tokens", ",d"),
        "GiB": text("peak_gib", ".2f"),
        "reserved": text("peak_reserved_gib", ".2f"),
        "ours": ratios_text(row),
    }
