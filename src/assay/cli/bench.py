"""`assay bench`: how fast the parts are, here, and how close engine and trainer agree."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from assay.cli import bench_episodes, bench_step
from assay.cli.bench_rows import Job, add_output, measured, print_table, ratios_text
from assay.runs.console import Console
from assay.types import UserError

if TYPE_CHECKING:
    from assay.bench.engine import Options
    from assay.bench.workload import Workload

HELP = "measure generation: tokens a second, memory, start-up, agreement with the trainer"

RECIPES_HELP = "train with several recipes and seeds from one start, and compare what they reach"
WITH_SETTINGS = ("recipes",)  # subcommands that `main` hands to a module of their own: they take settings as options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="engine|step|episodes|recipes")
    engine = commands.add_parser("engine", help=HELP, description=HELP)
    add_workload(engine.add_argument_group("what is generated"))
    add_measurement(engine.add_argument_group("how it is measured"))
    output = add_output(engine, "JSON lines of another system's benchmark")
    output.add_argument("--first-token", action="store_true", help=argparse.SUPPRESS)
    bench_step.add_arguments(commands.add_parser("step", help=bench_step.HELP, description=bench_step.HELP))
    episodes = commands.add_parser("episodes", help=bench_episodes.HELP, description=bench_episodes.HELP)
    bench_episodes.add_arguments(episodes)
    commands.add_parser("recipes", help=RECIPES_HELP)


def add_workload(group: argparse._ArgumentGroup) -> None:
    model = group.add_mutually_exclusive_group()
    model.add_argument("--shape", default="0.5b", help="0.5b, 1.5b, tiny-llama or tiny, with random weights [0.5b]")
    model.add_argument("--model", metavar="SOURCE", help="a model to load instead: folder, .gguf or hub id")
    group.add_argument("--prompts", type=int, help="distinct prompts [16; longtail: 64]")
    group.add_argument("--samples", type=int, default=64, help="of each prompt [64]")
    group.add_argument("--prompt-tokens", type=int, default=128, help="[128]")
    group.add_argument("--new", type=int, help="tokens a sequence [256]; longtail: the most of any [1024]")
    group.add_argument(
        "--lengths",
        choices=("fixed", "longtail"),
        default="fixed",
        help="longtail: each request one sample with a length of its own, from a log-normal distribution "
        "(sigma 1.1, median 0.115 of --new, cut off at --new: with 1024 a mean of about 200) [fixed]",
    )
    group.add_argument("--requests", type=int, default=4096, help="longtail only: the prompts, over and over [4096]")
    group.add_argument("--max-batch", type=int, help="sequences at once [all; longtail: 1024]")
    group.add_argument("--seed", type=int, default=0, help="of weights, prompts, lengths and draws [0]")
    group.add_argument("--temperature", type=float, default=1.0, help="[1]; 0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, help="[1: off]")
    group.add_argument("--top-k", type=int, default=0, help="[0: off]")
    group.add_argument("--min-p", type=float, default=0.0, help="[0: off]")


def add_measurement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", default="auto", help="auto, cuda, cuda:N, mps or cpu [auto]")
    group.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 [auto]")
    group.add_argument("--repeat", type=int, default=3, help="timed runs, after a first that is told apart [3]")
    group.add_argument("--compare", choices=("transformers",), help="the same work by transformers, in turns")
    group.add_argument("--parts", action="store_true", help="kernel time of a decode step by part (CUDA only)")
    group.add_argument(
        "--mismatch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare log-probabilities with the trainer's [on]",
    )
    which = group.add_mutually_exclusive_group()
    which.add_argument("--startup", action="store_true", help="instead: seconds from a fresh process to a first token")
    which.add_argument("--table", action="store_true", help="instead: the standard workloads and start-up, one by one")


def run(args: argparse.Namespace) -> int:
    if args.bench_command == "step":
        return bench_step.run(args)
    if args.bench_command == "episodes":
        return bench_episodes.run(args)
    from assay.bench.engine import Options

    work = workload(args)
    options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
    if args.first_token:
        from assay.bench.engine import print_first_token

        print_first_token(work, options)
        return 0
    from assay.bench.results import peer_rows
    from assay.models.device import pick_device

    console = Console()
    if options.parts and pick_device(options.device).type != "cuda":
        console.warn("--parts is for CUDA only: it is left out here")
    peers = [] if args.peer_rows is None else peer_rows(args.peer_rows)
    jobs = jobs_of(args, work, options)
    print_rows(measured(args, peers, jobs, words_for(args, work, options), "--max-batch, --samples or --new"), console)
    return 0


def workload(args: argparse.Namespace) -> Workload:
    from assay.bench.workload import STANDARD, Workload, words_of

    values = {field.name: getattr(args, field.name) for field in fields(Workload)}
    for name, standard in STANDARD[args.lengths].items():
        values[name] = standard if values[name] is None else values[name]
    work = Workload(**values)
    if args.table and (words := words_of(work)):
        raise UserError(f"--table has workloads of its own: leave out {' '.join(words)}")
    return work


def jobs_of(args: argparse.Namespace, work: Workload, options: Options) -> list[Job]:
    from assay.bench.engine import measure, measure_startup
    from assay.bench.workload import STARTUP, TABLE

    speeds = TABLE if args.table else () if args.startup else (work,)
    starts = (STARTUP,) if args.table else (work,) if args.startup else ()
    jobs: list[Job] = [(describe(what), partial(measure, what, options)) for what in speeds]
    return jobs + [(f"{w.label}: two starts of a fresh process", partial(measure_startup, w, options)) for w in starts]


def words_for(args: argparse.Namespace, work: Workload, options: Options) -> list[str]:
    from assay.bench.workload import words_of

    return (["--table"] if args.table else words_of(work) + ["--startup"] * args.startup) + words_of(options)


def describe(work: Workload) -> str:
    lengths = f"{work.new} new tokens each"
    if work.is_longtail:
        lengths = f"1 to {work.new} new tokens, {work.mean_new:.1f} in the mean"
    prompts = f"{work.prompts} prompts of {work.prompt_tokens} tokens"
    return f"{work.label}: {work.sequences} sequences from {prompts}, {lengths}, {work.batch} at once"


def print_rows(rows: Sequence[dict[str, Any]], console: Console) -> None:
    print_table([cells_of(row) for row in rows], console)
    parts = [row for row in rows if row.get("parts_ms")]
    if parts:
        names = list(parts[0]["parts_ms"])
        shown = [[row["id"], *(f"{row['parts_ms'][name]:.3f}" for name in names)] for row in parts]
        console.table("Kernels of a decode step, ms", ["id", *names], shown)


def cells_of(row: dict[str, Any]) -> dict[str, str]:
    def text(name: str, form: str) -> str:
        return "" if row.get(name) is None else format(row[name], form)

    runs = row.get("runs", []) if "tokens_per_s" in row else []
    return {
        "id": row["id"],
        "system": row["system"] + ("" if row.get("logprobs", True) else " (no log-probs)"),
        "tokens/s": text("tokens_per_s", ",.0f"),
        "from - to": f"{min(runs):,.0f} - {max(runs):,.0f}" if runs else "",
        "first run": text("first_run_tokens_per_s", ",.0f"),
        "seconds": text("seconds", ".2f"),
        "cold": text("seconds_cold", ".2f"),
        "GiB": text("peak_memory_gib", ".2f"),
        "KV waste": text("kv_waste", ".2%"),
        "mismatch": text("mismatch_mean_abs", ".1e"),
        "max ratio": text("mismatch_max_ratio", ".4f"),
        "ours": ratios_text(row),
    }
