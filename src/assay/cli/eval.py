"""Evaluate one or several models on the same problems.

For a checkpoint of a run (run:NAME@best), the run's task, environment, prompt and reward settings are used. With
--config, the settings of a training config are used instead. Options override them.
  assay eval Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --task.path data/gsm8k
  assay eval Qwen/Qwen2.5-0.5B-Instruct --config configs/seeds/dr_grpo.toml
  assay eval run:demo@0 run:demo@last --eval.samples 8 --eval.temperature 1
With --engine openai, MODEL is the name of a model at an OpenAI-compatible endpoint (--openai.url URL).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.build.measure import answer_rows, measure_models, measure_settings, result_table
from assay.config import MeasureConfig
from assay.runs.console import Console, percent
from assay.types import UserError

SETTINGS = MeasureConfig
STDOUT = "-"  # in place of a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, hub id, GGUF file or run:NAME@STEP")
    parser.add_argument(
        "--data", metavar="FILE", help="file with the problems (JSONL, Parquet), e.g. of assay data prepare"
    )
    parser.add_argument(
        "--split", choices=("train", "validation", "test", "all"), help="split of the task [test; with --data: all]"
    )
    add_config(parser)
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON; -: to standard output")
    parser.add_argument("--answers", metavar="FILE", help="write every answer and its verdict as JSONL")
    add_trust(parser)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="use task, environment, prompt and judge of this training config"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="use code, files and hosts that the run's settings name")


def run(args: argparse.Namespace) -> int:
    cfg = settings_of(args)
    for file in (None if args.json == STDOUT else args.json, args.answers):
        check_new(file)
    with Console(sys.stderr if args.json == STDOUT else None) as console:
        console.announce(f"loading {args.models[0]}")
        results: list[dict[str, Any]] = []
        for measured in measure_models(args.models, cfg, console, data=args.data or ""):
            if args.answers:
                with Path(args.answers).open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps(row) + "\n" for row in answer_rows(measured.model, measured.groups))
            results.append(measured.entry)
        console.table(*result_table(results))
        for entry in results if results[0]["samples"] > 1 else ():
            console.note(f"pass@k of {entry['model']}  {curve_of(entry)}")
    if args.json == STDOUT:
        print(json.dumps(results, indent=1))
    elif args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def settings_of(args: argparse.Namespace) -> MeasureConfig:
    """The settings of --config or of the first model that is a run's checkpoint, then the options."""
    if args.data and not Path(args.data).is_file():
        raise UserError(f"no file at {args.data}: --data takes a JSONL or Parquet file with one problem per row")
    split = {"eval.final_split": args.split} if args.split else {}
    overrides = {**args.overrides, **split}
    return measure_settings(args.models, overrides, data=args.data or "", config=args.config, trust=args.trust)


def check_new(file: str | None) -> None:
    if file and Path(file).exists():
        raise UserError(f"{file} exists: choose another name, or remove it")
    if file and not Path(file).absolute().parent.is_dir():
        raise UserError(f"the folder {Path(file).absolute().parent} does not exist: create it first")


def curve_of(entry: Mapping[str, Any]) -> str:
    """pass@k for every k, each with its interval."""
    bounds = entry["pass_at_k_ci95"]
    return "  ".join(
        f"{k}: {percent(value)} ({100 * bounds[k][0]:.1f} to {100 * bounds[k][1]:.1f})"
        for k, value in entry["pass_at_k"].items()
    )
