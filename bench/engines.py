"""Train one config with several engines, one after the other, and record curves, times and log-probability gaps.

    python bench/engines.py configs/gsm8k-qwen1.5b.toml --engines native vllm --json engines.json --train.steps 12

Each engine gets a run of its own, in a process of its own, from the same weights and with the same prompts. Options of
one engine follow `--for ENGINE`, up to the next `--for`; all other settings apply to every run. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from assay.bench.results import describe_machine, describe_versions
from assay.runs.files import read_json, write_json

CURVES = (
    "reward/mean", "length/mean", "length/truncated", "policy/entropy", "policy/ratio_max",
    "mismatch/logprob_abs_diff", "mismatch/logprob_abs_diff_max", "mismatch/kl", "eval/accuracy",
)  # fmt: skip
TIMES = ("time/step", "time/generate", "time/judge", "time/train", "time/sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--engines", nargs="+", required=True, metavar="ENGINE", help="values of engine.name")
    parser.add_argument("--runs_dir", default="runs")
    parser.add_argument("--json", type=Path, required=True)
    args, rest = parser.parse_known_args()
    common, own = split_options(rest)
    rows = [train(args.config, args.runs_dir, name, [*common, *own.get(name, [])]) for name in args.engines]
    content = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "command": shlex.join(["python", "bench/engines.py", *sys.argv[1:]]),
        "runs": rows,
    }
    write_json(args.json, content)
    for row in rows:
        print(row["engine"], json.dumps(row["median_s"]), "last reward", row["curves"].get("reward/mean", [None])[-1])


def split_options(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Options of all runs, and those of single engines, by engine."""
    common: list[str] = []
    own: dict[str, list[str]] = {}
    target, words = common, list(words)
    while words:
        word = words.pop(0)
        if word == "--for":
            target = own.setdefault(words.pop(0), [])
        else:
            target.append(word)
    return common, own


def train(config: str, runs_dir: str, engine: str, options: list[str]) -> dict[str, Any]:
    name = f"engines-{engine}"
    path = Path(runs_dir) / name
    command = ["train", config, "--name", name, "--runs_dir", runs_dir, "--engine.name", engine, *options]
    if not read_json(path / "summary.json"):
        subprocess.run([sys.executable, "-m", "assay", *command], check=True, env=dict(os.environ))
    steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "time/generate" in row]
    summary = read_json(path / "summary.json") or {}
    return {
        "engine": engine,
        "command": shlex.join(["assay", *command]),
        "median_s": {key: median(row[key] for row in steps[1:]) for key in TIMES if all(key in row for row in steps)},
        "curves": {key: [row.get(key) for row in steps] for key in (*CURVES, *TIMES) if any(key in r for r in steps)},
        "summary": {key: summary.get(key) for key in ("steps", "wall_s", "train_s", "before", "after", "tokens")},
    }


if __name__ == "__main__":
    main()
