"""The demo's throughput, read from its run directory: python bench/demo.py runs/demo > bench/results/demo-cpu.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median


def main(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    environment = json.loads((folder / "environment.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "reward/mean" in row]
    samples = summary["tokens"] / sum(row["length/mean"] for row in steps)  # answers per step
    rows = [
        {
            "id": "demo",
            "system": "assay",
            "wall_s": summary["wall_s"],
            "before": summary["before"]["accuracy"],
            "after": summary["after"]["accuracy"],
            "p_value": summary["paired"]["p_value"],
            "sft_s": summary["sft"]["wall_s"],
            "sft_step_s": round(summary["sft"]["wall_s"] / summary["sft"]["steps"], 4),
            "step_s": round(median(row["time/step"] for row in steps), 3),
            "generate_s": round(median(row["time/generate"] for row in steps), 3),
            "judge_s": round(median(row["time/judge"] for row in steps), 4),
            "train_s": round(median(row["time/train"] for row in steps), 3),
            "generated_tokens_per_s": round(
                median(samples * row["length/mean"] / row["time/generate"] for row in steps)
            ),
            "logprob_abs_diff_max": max(row["mismatch/logprob_abs_diff_max"] for row in steps),
        }
    ]
    machine = {key: environment["machine"][key] for key in ("cpu", "cores", "memory_gib", "gpus", "system")}
    content = {"machine": machine, "versions": environment["versions"], "measured": environment["started"]}
    print(json.dumps(content | {"command": "make demo", "rows": rows}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
