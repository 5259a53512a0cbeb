"""`assay bench episodes`: steps of the engine for episodes at their own pace, and in rounds."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from typing import Any

from assay.cli.bench_rows import add_file, measured, print_table
from assay.runs.console import Console

HELP = "measure episodes: steps of the engine when each goes on at its own pace, and when all wait for all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is played: one to eight actions each, of a random policy")
    group.add_argument("--shape", default="nano", help="nano, or 0.5b, 1.5b... with a letter for a token [nano]")
    group.add_argument("--episodes", type=int, default=2048, help="[2048]")
    group.add_argument("--samples", type=int, default=8, help="episodes that begin alike [8]")
    group.add_argument("--step-tokens", type=int, default=64, help="the longest action [64]")
    group.add_argument("--max-batch", type=int, default=256, help="episodes at once [256]")
    group.add_argument("--seed", type=int, default=0, help="of draws [0]")
    group = parser.add_argument_group("how it is measured")
    group.add_argument("--device", default="auto", help="auto, cuda, cuda:N, mps or cpu [auto]")
    group.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 [auto]")
    group.add_argument("--repeat", type=int, default=1, help="timed runs of each, after a first that is told apart [1]")
    add_file(parser.add_argument_group("output"))


def run(args: argparse.Namespace) -> int:
    from assay.bench.episodes import EpisodeOptions, Episodes, measure_episodes
    from assay.bench.workload import words_of

    work = Episodes(**{field.name: getattr(args, field.name) for field in fields(Episodes)})
    options = EpisodeOptions(**{field.name: getattr(args, field.name) for field in fields(EpisodeOptions)})
    played = f"{work.episodes} episodes, {work.max_batch} at once, actions of up to {work.step_tokens} tokens"
    parts = [(f"{work.shape}: {played}", partial(measure_episodes, work, options))]
    rows = measured(args, [], parts, words_of(work) + words_of(options), "--max-batch")
    print_table([cells_of(row) for row in rows], Console())
    return 0


def cells_of(row: dict[str, Any]) -> dict[str, str]:
    same = row.get("same_as_in_rounds")
    return {
        "id": row["id"],
        "steps": f"{row['decode_steps']:,}",
        "rows a step": f"{row['rows_a_step']:.1f}",
        "tokens": f"{row['decoded_tokens']:,}",
        "actions": f"{row['actions']:,}",
        "tokens of one": f"{row['action_tokens_median']}, at most {row['action_tokens_max']}",
        "seconds": f"{row['seconds']:.2f}",
        "first run": f"{row['first_run_s']:.2f}",
        "as in rounds": "" if same is None else f"{same:,} of {row['episodes']:,}",
    }
