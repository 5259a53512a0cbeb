"""Compare what `assay train --dry-run` predicts with what a run takes: seconds per step, and in total.

    python bench/dry_run.py configs/demo.toml examples/my_task.toml examples/my_env.toml --json FILE
    python bench/dry_run.py configs/gsm8k-smollm2.toml --set "--model FILE --train.steps 3" --json FILE

Each config is predicted, run, and predicted again, in processes of their own: other work on the machine changes both.
The predictions are averaged. Steps are compared by their median, without those that evaluate.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from assay.bench.results import describe_machine, describe_versions

UNITS = {"h": 3600, "m": 60, "s": 1}


def assay(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "assay", "train", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return done.stdout + done.stderr


def predicted(words: list[str]) -> tuple[float, float]:
    """Seconds per step and in total."""
    output = assay(*words, "--dry-run")
    step = re.search(r"a step: ([\d.,]+) s", output)
    total = re.search(r": about (\S+)", output)
    assert step and total, output
    return float(step[1].replace(",", "")), sum(
        int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)([hms])", total[1])
    )


def measured(words: list[str]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        assay(*words, "--runs_dir", folder, "--name", "measured")
        path = Path(folder) / "measured"
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        steps = [row["time/step"] for row in rows if "time/step" in row and "eval/accuracy" not in row]
        return median(steps), float(json.loads((path / "summary.json").read_text())["wall_s"])


def compared(config: str, options: list[str]) -> dict[str, Any]:
    words = [config, *options]
    before, actual, after = predicted(words), measured(words), predicted(words)
    row: dict[str, Any] = {"config": config, "options": shlex.join(options)}
    for index, name in enumerate(("step_s", "total_s")):
        guess = fmean((before[index], after[index]))
        row[name] = {
            "predicted": round(guess, 2),
            "measured": round(actual[index], 2),
            "ratio": round(guess / actual[index], 2),
        }
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--set", default="", help="options of assay train, for all configs")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    args = parser.parse_args()
    rows = [compared(config, shlex.split(args.set)) for config in args.configs]
    if args.json:
        earlier = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        known = {(row["config"], row["options"]) for row in rows}
        rows = [row for row in earlier if (row["config"], row["options"]) not in known] + rows
        facts = {"machine": describe_machine(), "versions": describe_versions(), "command": shlex.join(sys.argv)}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
