"""Simulate asynchronous training on 8 to 4,096 GPUs: utilisation, staleness, weight syncs and the bottleneck.

    python bench/scaling.py --lengths RUN --stretch 16 --json bench/results/scaling.json

The answers are as long as those of a run, times `--stretch`. Batches grow with the GPUs (`--per-gpu` prompts each), or
stay as they are (`--prompts`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.bench.workload import SHAPES
from assay.build.plan import Cluster, StepWork, layouts, steps_of, sync_seconds
from assay.build.simulate import simulate
from assay.runs.rollouts import read_rollouts, rollout_steps

SHARE = 0.02  # of the bytes of the weights that change in a step


def lengths_of(run: Path, stretch: float) -> list[int]:
    groups = [group for step in rollout_steps(run) for group in read_rollouts(run, step)]
    return [max(1, round(stretch * rollout.length)) for group in groups for rollout in group.rollouts]


def row(shape: str, gpus: int, prompts: int, samples: int, lengths: list[int], staleness: int) -> dict[str, Any]:
    spec, cluster = SHAPES[shape](), Cluster(gpus)
    work = StepWork(prompts, samples, 256, max(lengths), lengths)
    best = next(made for made in layouts(spec, work, cluster, staleness) if not made.colocated)
    turns = next((made.result.step for made in layouts(spec, work, cluster, 0)), None)
    found, delta = best.result, sync_seconds(spec, cluster, SHARE)
    made = {
        "shape": shape,
        "gpus": gpus,
        "engines": best.engine_gpus,
        "learners": best.learner.gpus,
        "answers": prompts * samples,
        "max_staleness": staleness,
        "step_s": round(found.step, 2),
        "in_turns_step_s": turns and round(turns, 2),
        "tokens_per_s": round(found.tokens_per_s),
        "engines_busy": round(found.engines_busy, 3),
        "rows_per_engine": round(found.rows, 1),
        "learner_busy": round(found.learner_busy, 3),
        "staleness": round(found.staleness, 2),
        "restarted": round(found.restarted, 1),
        "sync_s": round(best.pipeline.sync, 2),
        "delta_sync_s": round(delta, 2),
        "delta_step_s": round(simulate(replace(best.pipeline, sync=delta), *steps_of(work)).step, 2),
        "bottleneck": found.bottleneck,
    }
    print(json.dumps(made), flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["7b"])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--per-gpu", type=int, default=8, help="prompts per step and GPU")
    parser.add_argument("--prompts", type=int, help="prompts per step, whatever the number of GPUs")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1])
    parser.add_argument("--lengths", type=Path, required=True, help="folder of a run")
    parser.add_argument("--stretch", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lengths = lengths_of(args.lengths, args.stretch)
    rows = [
        row(shape, gpus, args.prompts or args.per_gpu * gpus, args.samples, lengths, staleness)
        for shape in args.shapes
        for gpus in args.gpus
        for staleness in args.staleness
    ]
    if args.json:
        answers = {"count": len(lengths), "mean": round(sum(lengths) / len(lengths)), "longest": max(lengths)}
        content = {"command": "python bench/scaling.py", "options": vars(args) | {"lengths": answers, "json": None}}
        args.json.write_text(json.dumps(content | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
