"""Measure generation, training and episodes on this machine, with random weights or a given model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from assay.bench import workload
from assay.bench.workload import (
    EpisodeOptions,
    Episodes,
    Options,
    Sequences,
    StepOptions,
    Workload,
    command_options,
    option_name,
)
from assay.runs.console import Console
from assay.types import Progress, UserError, plural

ENGINE_HELP = "measure generation: tokens per second, memory, start-up time, agreement with the trainer"
STEP_HELP = "measure training: seconds per GRPO step by parts, memory, tokens per second"
EPISODES_HELP = "measure episodes: engine steps when each continues at its own pace, and when all wait for each other"
MODEL = ("shape", "model")  # of which only one can be given

Rows = list[dict[str, Any]]
Job = tuple[str, Callable[[Progress], Rows]]  # what to print, and what to measure then


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="engine|step|episodes")
    add_engine_arguments(commands.add_parser("engine", help=ENGINE_HELP, description=ENGINE_HELP))
    add_step_arguments(commands.add_parser("step", help=STEP_HELP, description=STEP_HELP))
    add_episodes_arguments(commands.add_parser("episodes", help=EPISODES_HELP, description=EPISODES_HELP))
    # With another prefix than "-" all words are positional arguments; `run` names the script.
    commands.add_parser("recipes", add_help=False, prefix_chars="\0").add_argument("words", nargs="*")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    add_model(group)
    Workload.add_to(group, *(field.name for field in fields(Workload) if field.name not in MODEL))
    group = parser.add_argument_group("measurement")
    Options.add_to(group)
    which = group.add_mutually_exclusive_group()
    which.add_argument("--startup", action="store_true", help="measure seconds from process start to the first token")
    which.add_argument("--table", action="store_true", help="measure the standard workloads and start-up, one by one")
    output = add_output(parser, "JSON lines of another system's benchmark, to compare with")
    output.add_argument("--first-token", action="store_true", help=argparse.SUPPRESS)


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("work per step")
    add_model(group)
    Workload.add_to(group, "prompts", "samples", "prompt_tokens", "new", "temperature", "seed")
    group.add_argument("--train-only", action="store_true", help="no generation: train on random sequences, packed")
    Sequences.add_to(group, "sequences", "tokens")
    group = parser.add_argument_group("measurement")
    StepOptions.add_to(group)
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE[,VALUE...]",
        help="a setting of the run, e.g. train.token_budget; several values give one row each (may be repeated)",
    )
    group.add_argument("--table", action="store_true", help="measure the standard step and trainings, one by one")
    add_output(parser, "JSON lines of another trainer's benchmark of the standard step, to compare with")


def add_episodes_arguments(parser: argparse.ArgumentParser) -> None:
    Episodes.add_to(parser.add_argument_group("workload: episodes of one to eight actions by a random policy"))
    EpisodeOptions.add_to(parser.add_argument_group("measurement"))
    add_output(parser)


def add_model(group: argparse._ArgumentGroup) -> None:
    Workload.add_to(group.add_mutually_exclusive_group(), *MODEL)


def add_output(parser: argparse.ArgumentParser, peers: str = "") -> argparse._ArgumentGroup:
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE, or add them to it")
    if peers:
        output.add_argument("--peer-rows", type=Path, metavar="FILE", help=peers)
    return output


def run(args: argparse.Namespace) -> int:
    if args.bench_command == "recipes":
        raise UserError("bench recipes is now a script: run python bench/recipes.py with the same arguments")
    return {"engine": run_engine, "step": run_step, "episodes": run_episodes}[args.bench_command](args)


def run_engine(args: argparse.Namespace) -> int:
    from assay.bench.engine import print_first_token
    from assay.bench.results import peer_rows
    from assay.models import pick_device

    work, options = engine_work(args), Options(**Options.given(args))
    if args.first_token:
        print_first_token(work, options)
        return 0
    if options.parts and pick_device(options.device).type != "cuda":
        Console().warn("--parts needs CUDA: it is ignored")
    peers = [] if args.peer_rows is None else peer_rows(args.peer_rows)
    words = ["--table"] if args.table else command_options(work) + ["--startup"] * args.startup
    words = ["assay", "bench", "engine", *words, *command_options(options)]
    print_engine_rows(run_jobs(args, engine_jobs(args, work, options), words, "--max-batch, --samples or --new", peers))
    return 0


def engine_work(args: argparse.Namespace) -> Workload:
    given = Workload.given(args)
    work = Workload(**(workload.STANDARD[given.get("lengths", workload.FIXED)] | given))
    if args.table and (words := command_options(work)):
        raise UserError(f"--table has its own workloads: leave out {' '.join(words)}")
    return work


def engine_jobs(args: argparse.Namespace, work: Workload, options: Options) -> list[Job]:
    from assay.bench.engine import measure, measure_startup

    speeds = workload.TABLE if args.table else () if args.startup else (work,)
    starts = (workload.STARTUP,) if args.table else (work,) if args.startup else ()
    jobs: list[Job] = [(describe_engine(what), partial(measure, what, options)) for what in speeds]
    return jobs + [(f"{w.label}: two starts of a new process", partial(measure_startup, w, options)) for w in starts]


def describe_engine(work: Workload) -> str:
    lengths = f"{work.new} new tokens each"
    if work.is_longtail:
        lengths = f"1 to {work.new} new tokens, mean {work.mean_new:.1f}"
    prompts = f"{plural(work.prompts, 'prompt')} of {plural(work.prompt_tokens, 'token')}"
    return f"{work.label}: {plural(work.sequences, 'sequence')} from {prompts}, {lengths}, at most {work.batch} running"


def run_step(args: argparse.Namespace) -> int:
    from assay.bench.results import peer_steps

    work, options = step_work(args), step_options(args)
    peers = [] if args.peer_rows is None else peer_steps(args.peer_rows)
    words = ["--table"] if args.table else ["--train-only"] * args.train_only + command_options(work)
    words = ["assay", "bench", "step", *words, *step_words(args, options)]
    print_step_rows(run_jobs(args, step_jobs(args, work, options), words, STEP_MEMORY, peers))
    return 0


STEP_MEMORY = "--set train.token_budget=..., --samples or --new"  # options that reduce the memory of a step


def step_words(args: argparse.Namespace, options: Sequence[StepOptions]) -> list[str]:
    """Options of the measurement, with --set as it was given."""
    return command_options(replace(options[0], set=())) + [word for text in args.set for word in ("--set", text)]


def step_work(args: argparse.Namespace) -> Workload | Sequences:
    """Options that are only for the other kind of work are errors."""
    kind, other = (Sequences, Workload) if args.train_only else (Workload, Sequences)
    given = kind.given(args)
    if args.table and (args.train_only or kind(**given) != Workload()):
        raise UserError("--table has its own workloads: leave out --train-only, the model and all sizes")
    if wrong := [name for name in other.given(args) if name not in given]:
        use = "not for" if args.train_only else "only for"
        raise UserError(f"{option_name(wrong[0])} is {use} --train-only: leave it out")
    if args.train_only and getattr(args, "kl", 0.0):
        raise UserError("--kl is not for --train-only: leave it out")
    return kind(**given)


def step_options(args: argparse.Namespace) -> list[StepOptions]:
    """One for each combination of the values of --set."""
    settings = [text.partition("=") for text in args.set]
    choices = [[f"{name}={value}" for value in values.split(",")] for name, _, values in settings]
    return [StepOptions(**(StepOptions.given(args) | {"set": chosen})) for chosen in product(*choices)]


def step_jobs(args: argparse.Namespace, work: Workload | Sequences, options: Sequence[StepOptions]) -> list[Job]:
    from assay.bench import step

    works: tuple[Workload | Sequences, ...] = (Workload(), *workload.TRAINING_TABLE) if args.table else (work,)
    jobs: list[Job] = []
    for what, how in product(works, options):
        note = " ".join((describe_step(what), *how.set))
        if isinstance(what, Sequences):
            jobs.append((note, partial(step.measure_training, what, replace(how, kl=0.0))))
        else:
            jobs.append((note, partial(step.measure_step, what, how)))
    return jobs


def describe_step(work: Workload | Sequences) -> str:
    if isinstance(work, Sequences):
        return f"{work.label}: training on {plural(work.sequences, 'sequence')} of {plural(work.tokens, 'token')}"
    samples = f"{plural(work.samples, 'sample')} of {plural(work.new, 'token')} per prompt"
    prompts = f"{plural(work.prompts, 'prompt')} of {plural(work.prompt_tokens, 'token')}"
    return f"{work.label}: a step with {prompts}, {samples}"


def run_episodes(args: argparse.Namespace) -> int:
    from assay.bench.engine import measure_episodes

    work, options = Episodes(**Episodes.given(args)), EpisodeOptions(**EpisodeOptions.given(args))
    actions = f"actions of up to {plural(work.step_tokens, 'token')}"
    sizes = f"{plural(work.episodes, 'episode')}, at most {work.max_batch} running, {actions}"
    jobs = [(f"{work.shape}: {sizes}", partial(measure_episodes, work, options))]
    words = ["assay", "bench", "episodes", *command_options(work, options)]
    print_table([episode_cells(row) for row in run_jobs(args, jobs, words, "--max-batch")])
    return 0


def run_jobs(
    args: argparse.Namespace, jobs: Sequence[Job], words: Sequence[str], smaller: str, peers: Sequence[Any] = ()
) -> Rows:
    """Run all jobs and return their rows. They are written after each job: an interrupted benchmark keeps them.

    `words` is the command; `smaller` names options that need less memory.
    """
    import torch

    from assay.bench.results import describe_machine, describe_versions, earlier_rows, save, with_ratios

    console = Console(live=False)  # a live display would take time from what is measured
    machine, versions = describe_machine(), describe_versions()
    if args.json is not None:
        earlier_rows(args.json, machine, versions)  # raises before anything is measured
    files = [("--peer-rows", getattr(args, "peer_rows", None)), ("--json", args.json)]
    command = shlex.join([*words, *(word for option, path in files if path for word in (option, str(path)))])
    rows = list(peers)
    for note, job in jobs:
        console.note(note)
        try:
            rows += job(console.progress)
        except torch.OutOfMemoryError:
            raise UserError(f"out of GPU memory: choose a smaller {smaller}") from None
        if args.json is not None:
            save(args.json, machine, versions, command, rows)
    return with_ratios(rows)


def print_table(cells: Sequence[dict[str, str]]) -> None:
    """Empty columns are left out."""
    used = [name for name in cells[0] if any(cell[name] for cell in cells)]
    Console().table("Results", used, [[cell[name] for name in used] for cell in cells])


def print_engine_rows(rows: Rows) -> None:
    print_table([engine_cells(row) for row in rows])
    if profiled := [row for row in rows if row.get("parts_ms")]:
        names = list(profiled[0]["parts_ms"])
        cells = [[row["id"], *(f"{row['parts_ms'][name]:.3f}" for name in names)] for row in profiled]
        Console().table("Kernels of a decode step, ms", ["id", *names], cells)


def print_step_rows(rows: Rows) -> None:
    print_table([step_cells(row) for row in rows])


def engine_cells(row: dict[str, Any]) -> dict[str, str]:
    runs = row.get("runs", []) if "tokens_per_s" in row else []
    return {
        "id": row["id"],
        "system": row["system"] + ("" if row.get("logprobs", True) else " (no log-probs)"),
        "tokens/s": cell(row, "tokens_per_s", ",.0f"),
        "min - max": f"{min(runs):,.0f} - {max(runs):,.0f}" if runs else "",
        "first run": cell(row, "first_run_tokens_per_s", ",.0f"),
        "seconds": cell(row, "seconds", ".2f"),
        "cold": cell(row, "seconds_cold", ".2f"),
        "GiB": cell(row, "peak_memory_gib", ".2f"),
        "KV waste": cell(row, "kv_waste", ".2%"),
        "mismatch": cell(row, "mismatch_mean_abs", ".1e"),
        "max ratio": cell(row, "mismatch_max_ratio", ".4f"),
        "speed-up": speedups(row),
    }


def step_cells(row: dict[str, Any]) -> dict[str, str]:
    parts = {name: seconds or None for name, seconds in row.get("parts_s", {}).items()}
    return {
        "id": row["id"],
        "system": row["system"],
        "step s": cell(row, "step_s", ".3f"),
        "first": cell(row, "first_step_s", ".2f"),
        **{name: cell(parts, name, ".3f") for name in ("generation", "scoring", "reference", "training", "sync")},
        "tokens/s": cell(row, "tokens_per_s", ",.0f"),
        "trained tokens": cell(row, "trained_tokens", ",d"),
        "GiB": cell(row, "peak_gib", ".2f"),
        "reserved": cell(row, "peak_reserved_gib", ".2f"),
        "speed-up": speedups(row),
    }


def episode_cells(row: dict[str, Any]) -> dict[str, str]:
    same = row.get("same_as_in_rounds")
    return {
        "id": row["id"],
        "steps": f"{row['decode_steps']:,}",
        "rows per step": f"{row['rows_a_step']:.1f}",
        "tokens": f"{row['decoded_tokens']:,}",
        "actions": f"{row['actions']:,}",
        "tokens per action": f"median {row['action_tokens_median']}, max {row['action_tokens_max']}",
        "seconds": f"{row['seconds']:.2f}",
        "first run": f"{row['first_run_s']:.2f}",
        "same as in rounds": "" if same is None else f"{same:,} of {row['episodes']:,}",
    }


def cell(row: dict[str, Any], name: str, form: str) -> str:
    return "" if row.get(name) is None else format(row[name], form)


def speedups(row: dict[str, Any]) -> str:
    ratios = {name.removeprefix("ratio_to_"): value for name, value in row.items() if name.startswith("ratio_to_")}
    return ", ".join(f"{value:.2f} x {name}" for name, value in ratios.items())
