"""Train one config synchronously and asynchronously with several limits of staleness, and compare what is learned.

    python bench/staleness.py configs/demo.toml --staleness 0 1 2 4 --seeds 3 --json found.json
    python bench/staleness.py --draw found.json other.json --png found.png

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
    parser.add_argument("config", nargs="?")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="JSON", help="draw these results, one row of plots each"
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs_dir", default="runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args, options = parser.parse_known_args()
    if args.draw and args.png:
        draw([read_json(file)["runs"] for file in args.draw], args.png)
    elif args.config and args.json:
        compare(args, options)
    else:
        parser.error("give CONFIG and --json FILE, or --draw FILES and --png FILE")


def compare(args: argparse.Namespace, options: list[str]) -> None:
    kinds = ["sync", *map(str, args.staleness)]
    rows = [train(args.config, args.runs_dir, kind, seed, options) for seed in range(args.seeds) for kind in kinds]
    content = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "command": shlex.join(["python", "bench/staleness.py", *sys.argv[1:]]),
        "over_seeds": {kind: over_seeds(own) for kind, own in by_kind(rows).items()},
        "runs": rows,
    }
    write_json(args.json, content)
    for kind, values in content["over_seeds"].items():
        print(kind, json.dumps(values))


def by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}


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


def draw(results: list[list[dict[str, Any]]], path: Path) -> None:
    """For each result: mean rewards of the steps, accuracies with intervals, and the share of groups by staleness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4 * len(results)), layout="constrained")
    for rows, axes in zip(results, figure.subplots(len(results), 3, squeeze=False), strict=True):
        draw_row(by_kind(rows), *axes)
    figure.savefig(path, dpi=110)


def draw_row(found: dict[str, list[dict[str, Any]]], curve: Any, points: Any, shares: Any) -> None:
    for index, (kind, rows) in enumerate(found.items()):
        label = "synchronous" if kind == "sync" else f"staleness up to {kind}"
        rewards = [fmean(values) for values in zip(*(row["reward"] for row in rows), strict=True)]
        smooth = [fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
        curve.plot(range(1, len(smooth) + 1), smooth, label=label, color=f"C{index}")
        for seed, row in enumerate(rows):
            ends = [[abs(row["accuracy"] - end)] for end in row["ci95"]]
            place = index + 0.15 * (seed - (len(rows) - 1) / 2)
            points.errorbar([place], [row["accuracy"]], ends, fmt="o", color=f"C{index}", capsize=3)
        ages = sorted({int(age) for row in rows for age in row["staleness"]})
        if ages:
            heights = [fmean(row["staleness"].get(str(age), 0.0) for row in rows) for age in ages]
            shares.plot(ages, heights, "o-", color=f"C{index}")
    curve.set(xlabel="step", ylabel="mean reward (last 5 steps)")
    curve.legend(frameon=False, fontsize=8)
    points.set(xlabel="source", ylabel="accuracy at the end, each seed")
    points.set_xticks(range(len(found)), ["sync", *(f"≤ {kind}" for kind in found if kind != "sync")])
    shares.set(xlabel="staleness in steps", ylabel="share of groups")


if __name__ == "__main__":
    main()
