"""Train one config synchronously and asynchronously with several limits of staleness, and compare what is learned.

    python bench/staleness.py configs/demo.toml --staleness 0 1 2 4 --seeds 3 --json found.json --png found.png

All runs sample the same number of answers. "sync" is `source = "on_policy"`; every other run is `source = "async"` with
`source.max_staleness`. Runs of one seed alternate, so that changes of the machine's speed concern all of them. Finished
runs are kept. Any setting of `assay train` can be changed with --section.key VALUE.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from assay.bench.results import describe_machine, describe_versions
from assay.runs.files import read_json, write_json

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # quantiles of Student's t for the interval of a mean, by sample size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs_dir", default="runs")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--png", type=Path)
    args, options = parser.parse_known_args()
    kinds = ["sync", *map(str, args.staleness)]
    rows = [train(args.config, args.runs_dir, kind, seed, options) for seed in range(args.seeds) for kind in kinds]
    found = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    content = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "command": shlex.join(["python", "bench/staleness.py", *sys.argv[1:]]),
        "over_seeds": {kind: over_seeds(own) for kind, own in found.items()},
        "runs": rows,
    }
    write_json(args.json, content)
    for kind, values in content["over_seeds"].items():
        print(kind, json.dumps(values))
    if args.png:
        draw(found, args.png)


def train(config: str, runs_dir: str, kind: str, seed: int, options: list[str]) -> dict[str, Any]:
    name = f"staleness-{kind}-seed{seed}"
    path = Path(runs_dir) / name
    source = [] if kind == "sync" else ["--source", "async", "--source.max_staleness", kind]
    words = ["train", config, "--name", name, "--runs_dir", runs_dir, "--seed", str(seed), *source, *options]
    if not read_json(path / "summary.json"):
        subprocess.run([sys.executable, "-m", "assay", *words], check=True)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    summary = read_json(path / "summary.json") or {}
    shares = {key: fmean(row.get(key, 0.0) for row in steps) for key in sorted({k for row in steps for k in row})}
    counted = ("async/engine_idle", "async/learner_idle", "async/restarted", "async/expired", "time/step")
    return {
        "kind": kind,
        "seed": seed,
        "accuracy": summary["after"]["accuracy"],
        "ci95": summary["after"]["ci95"],
        "before": summary["before"]["accuracy"],
        "answers": summary["answers"],
        "train_s": summary["train_s"],
        "wall_s": summary["wall_s"],
        "staleness": {k.rpartition("_")[2]: round(v, 4) for k, v in shares.items() if is_share(k)},
        "means": {key: round(shares[key], 4) for key in counted if key in shares},
        "reward": [round(row["reward/mean"], 4) for row in steps],
        "eval": [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row],
    }


def is_share(key: str) -> bool:
    return key.startswith("async/staleness_") and key.rpartition("_")[2].isdigit()


def over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = [row["accuracy"] for row in rows]
    half = T95[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) in T95 else None
    return {
        "accuracy": round(fmean(values), 4),
        "half_width_95": None if half is None else round(half, 4),
        "train_s": round(fmean(row["train_s"] for row in rows), 1),
    }


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Mean rewards of the steps, accuracies of the seeds, and the share of groups by staleness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    curve, points, shares = figure.subplots(1, 3)
    for index, (kind, rows) in enumerate(found.items()):
        label = "synchronous" if kind == "sync" else f"staleness up to {kind}"
        rewards = [fmean(values) for values in zip(*(row["reward"] for row in rows), strict=True)]
        smooth = [fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
        curve.plot(range(1, len(smooth) + 1), smooth, label=label, color=f"C{index}")
        points.plot([index] * len(rows), [row["accuracy"] for row in rows], "o", color=f"C{index}")
        ages = sorted({int(age) for row in rows for age in row["staleness"]})
        if ages:
            heights = [fmean(row["staleness"].get(str(age), 0.0) for row in rows) for age in ages]
            shares.plot(ages, heights, "o-", color=f"C{index}")
    curve.set(xlabel="step", ylabel="mean reward (last 5 steps)")
    curve.legend(frameon=False, fontsize=8)
    points.set(xlabel="source", ylabel="accuracy at the end, each seed")
    points.set_xticks(range(len(found)), ["sync", *(f"≤ {kind}" for kind in found if kind != "sync")])
    shares.set(xlabel="staleness in steps", ylabel="share of groups")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
