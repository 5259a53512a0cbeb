"""Predict memory, seconds per step and the best division of GPUs between engines and learners, without a GPU.

  assay plan 7b --gpus 64 --answer-tokens 8192
  assay plan Qwen2.5-7B-Instruct/ --gpus 8 --gpu h100 --lengths my_run

MODEL is a folder with a config.json, a GGUF file, a preset, or a shape.
The division is found by simulating the steps of an asynchronous run; colocated GPUs sample and train in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from assay.bench.workload import SHAPES
from assay.build.cost import model_spec
from assay.build.plan import GPUS, MEASURED_ON, Cluster, Layout, StepWork, assumptions, layouts, steps_of, sync_seconds
from assay.build.simulate import drawn_lengths, simulate
from assay.cli.runs import add_runs_dir
from assay.config import TrainConfig
from assay.models.gguf import gguf_spec
from assay.models.spec import ModelSpec
from assay.runs.console import count
from assay.runs.files import print_json
from assay.runs.rollouts import read_rollouts, rollout_steps
from assay.types import UserError, plural
from assay.web.folder import find_folder

SHOWN = 6  # divisions
DELTA = 0.02  # share of the bytes that change in a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"model, or one of the shapes {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs [1]")
    parser.add_argument("--gpu", default=MEASURED_ON, help=f"kind of GPU: {', '.join(GPUS)} [{MEASURED_ON}]")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs per node [8]")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step [64]")
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt [8]")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of a prompt [256]")
    parser.add_argument("--answer-tokens", type=int, default=1024, help="longest answer in tokens [1024]")
    parser.add_argument("--mean-tokens", type=int, help="mean length of answers [half of the longest]")
    parser.add_argument("--lengths", metavar="RUN", help="take the lengths of answers from the last step of this run")
    parser.add_argument("--staleness", type=int, default=1, help="source.max_staleness; 0: only colocated [1]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_runs_dir(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("gpus", "per_node", "prompts", "samples", "prompt_tokens", "answer_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.staleness < 0:
        raise UserError(f"--staleness must be at least 0, not {args.staleness}")
    spec, work = spec_of(args.model), work_of(args)
    cluster = Cluster(args.gpus, args.gpu, args.per_node)
    found = layouts(spec, work, cluster, args.staleness)
    sync = sync_seconds(spec, cluster, DELTA)
    delta = sync, simulate(replace(found[0].pipeline, sync=sync), *steps_of(work)).step
    if args.json:
        print_json(as_json(spec, work, cluster, found, delta))
        return 0
    for line in report(spec, work, cluster, found, delta, args.model):
        print(line)
    return 0


def spec_of(name: str) -> ModelSpec:
    if name in SHAPES:
        return SHAPES[name]()
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        spec = gguf_spec(path)
    else:
        spec = model_spec(TrainConfig.model_validate({"model": name}))
    if spec is None:
        raise UserError(
            f"the shape of {name} is not known: give a folder with the config.json of a supported architecture, or one "
            f"of {', '.join(SHAPES)}"
        )
    return spec


def work_of(args: argparse.Namespace) -> StepWork:
    amounts = args.prompts, args.samples, args.prompt_tokens
    if args.lengths:
        if args.mean_tokens:
            raise UserError("--lengths and --mean-tokens exclude each other: leave out one of them")
        folder = find_folder(args.lengths, args.dir)
        steps = rollout_steps(folder)
        if not steps:
            raise UserError(f"{folder} has kept no rollouts: give a run with save.rollouts above 0")
        lengths = [rollout.length for group in read_rollouts(folder, steps[-1]) for rollout in group.rollouts]
        return StepWork(*amounts, max(lengths), lengths)
    mean = args.mean_tokens or max(args.answer_tokens / 2, 1)
    if not 1 <= mean <= args.answer_tokens:
        raise UserError(f"--mean-tokens must be between 1 and --answer-tokens {args.answer_tokens}, not {mean:g}")
    return StepWork(*amounts, args.answer_tokens, drawn_lengths(mean, args.answer_tokens))


def report(
    spec: ModelSpec, work: StepWork, cluster: Cluster, found: list[Layout], delta: tuple[float, float], name: str
) -> Iterator[str]:
    """`delta`: seconds of a weight sync and of a step if only the bytes that change are sent."""
    best = found[0]
    yield (
        f"{name}: {count(spec.parameters)} parameters on {cluster.gpus} x {cluster.gpu.upper()}; "
        f"{plural(work.prompts, 'prompt')} x {plural(work.samples, 'answer')} per step"
    )
    yield ""
    yield "engines + learners   s per step   tokens/s   engines   learner   sync   age   limited by"
    for made in found[:SHOWN]:
        result = made.result
        gpus = "all in turns" if made.colocated else f"{made.engine_gpus} + {made.learner.gpus}"
        yield (
            f"{gpus:>18}{result.step:13,.1f}{result.tokens_per_s:11,.0f}{result.engines_busy:9.0%} "
            f"{result.learner_busy:9.0%} {result.syncing:6.0%} {result.staleness:5.1f}   {result.bottleneck}"
        )
    yield ""
    engine, learner = best.engine, best.learner
    yield (
        f"engine: {plural(engine.tp, 'GPU')} each, with {engine.weights:.1f} GiB of weights and room for "
        f"{engine.rows:,} answers in {engine.cache:.1f} GiB; {best.result.rows:.0f} at a time on average"
    )
    parts = ", ".join(f"{part} {size:.1f}" for part, size in learner.parts.items())
    yield f"learner: {learner.peak:.1f} GiB per GPU ({parts})"
    settings = {"optim.precision": learner.precision, "train.token_budget": learner.budget}
    settings |= {"train.activation_checkpointing": "true"} if learner.recompute else {}
    if best.colocated:
        settings |= {"engine.sleep_while_training": "true", "engine.kv_cache_gib": int(engine.cache)}
    else:
        settings |= {"source": "async", "source.max_staleness": best.pipeline.staleness}
    yield "settings: " + " ".join(f"--{key} {value}" for key, value in settings.items())
    if cluster.gpus > 1:
        yield (
            f"weight sync: {best.pipeline.sync:.2f} s; if only {DELTA:.0%} of the bytes were sent, {delta[0]:.2f} s, "
            f"and {delta[1]:,.1f} s per step"
        )
    for line in assumptions(work, cluster):
        yield f"assumed: {line}"


def as_json(
    spec: ModelSpec, work: StepWork, cluster: Cluster, found: list[Layout], delta: tuple[float, float]
) -> dict[str, Any]:
    return {
        "parameters": spec.parameters,
        "cluster": asdict(cluster),
        "mean_tokens": work.mean,
        "layouts": [
            {
                "engine_gpus": made.engine_gpus,
                "learner_gpus": made.learner.gpus,
                "colocated": made.colocated,
                "engine": asdict(made.engine),
                "learner": asdict(made.learner),
                "sync_s": made.pipeline.sync,
                **asdict(made.result),
                "bottleneck": made.result.bottleneck,
            }
            for made in found
        ],
        "delta": {"sync_s": delta[0], "step_s": delta[1]},
        "assumptions": list(assumptions(work, cluster)),
    }
