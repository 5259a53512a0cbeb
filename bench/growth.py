"""How speed and memory grow with the batch, the length of answers and the model, and what `assay plan` predicts.

    python bench/growth.py measure --json bench/results/growth-h200.json    # on a GPU, in about four minutes
    python bench/growth.py plot --json bench/results/growth-h200.json --image docs/images/growth.png

Generation: prompts of 128 tokens. Training: one micro-batch without activation checkpointing, AdamW in float32 (7B:
`optim.precision` 8bit).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fit_cost import generation_seconds

from assay.bench.results import describe_machine, describe_versions
from assay.bench.workload import SHAPES, Options, Sequences, StepOptions, Workload

GIB = 2**30
SIZES = ("0.5b", "1.5b", "7b")
BATCHES = (1, 8, 64, 256, 1024)
ANSWERS = (256, 1024, 4096)
LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Point:
    series: str
    x: int
    row: dict[str, Any]  # of the benchmark


def generation(series: str, shape: str, prompts: int, samples: int, new: int, x: int, device: str) -> Point:
    from assay.bench import engine

    work = Workload(shape=shape, prompts=prompts, samples=samples, new=new)
    (row,) = engine.measure(work, Options(device=device, repeat=1, mismatch=False))
    return Point(series, x, row)


def training(series: str, shape: str, sequences: int, tokens: int, x: int, device: str) -> Point:
    from assay.bench import step

    precision = "8bit" if shape == "7b" else "float32"
    settings = (f"optim.precision={precision}", f"train.token_budget={sequences * tokens}")
    work = Sequences(shape=shape, sequences=sequences, tokens=tokens)
    (row,) = step.measure_training(work, StepOptions(device=device, steps=2, set=settings))
    return Point(series, x, row)


def measured(row: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second and GiB."""
    return row["tokens_per_s"], row.get("peak_gib") or row.get("peak_memory_gib") or 0.0


def predicted(row: dict[str, Any]) -> tuple[float, float]:
    """The same by the factors of `assay plan`. Of memory: the sum of what is needed at some time."""
    import torch

    from assay.build.cost import kv_bytes
    from assay.build.models import activation_bytes
    from assay.build.plan import STATES, Cluster, LearnerFit, StepWork, update_line

    spec = SHAPES[row["shape"]]()
    if "new" in row:
        work = Workload(**{key: row[key] for key in ("shape", "prompts", "samples", "new")})
        cache = kv_bytes(spec, torch.bfloat16) * work.batch * work.max_length
        return sum(work.new_tokens) / generation_seconds(work), (2 * spec.parameters + cache) / GIB
    sequences, length = row["sequences"], row["tokens"]
    tokens = sequences * length
    trained = StepWork(prompts=sequences, samples=1, prompt_tokens=0, limit=length, lengths=[length])
    learner = LearnerFit(gpus=1, precision=row["precision"], recompute=False, budget=tokens)
    seconds = update_line(spec, trained, Cluster(), learner).at(tokens)
    state = STATES[row["precision"]] + 2.0 * (row["precision"] == "float32")
    activations = tokens * activation_bytes(spec, torch.bfloat16, False, compiled=True)
    return tokens / seconds, (state * spec.parameters + activations) / GIB


def points(device: str, quick: bool) -> Iterator[Callable[[], Point]]:
    if quick:
        yield lambda: generation("generation by batch, tiny", "tiny", 1, 2, 8, 2, device)
        yield lambda: training("training by length, tiny", "tiny", 1, 64, 64, device)
        return
    for batch in BATCHES:
        prompts = min(16, batch)
        yield lambda b=batch, p=prompts: generation("generation by batch, 0.5b", "0.5b", p, b // p, 256, b, device)
    for new in ANSWERS:
        yield lambda n=new: generation("generation by answer, 1.5b x 64", "1.5b", 8, 8, n, n, device)
    for shape in SIZES:
        size = SHAPES[shape]().parameters
        yield lambda s=shape, z=size: generation("generation by model, x 256", s, 16, 16, 256, z, device)
        yield lambda s=shape, z=size: training("training by model, 4 x 1,024", s, 4, 1024, z, device)
    for length in LENGTHS:
        yield lambda n=length: training("training by length, 0.6b", "0.6b", 1, n, n, device)


def measure(args: argparse.Namespace) -> None:
    found: list[dict[str, Any]] = []
    for make in points(args.device, args.quick):
        point = make()
        found.append(asdict(point))
        show(found[-1])
        facts = {"machine": describe_machine(), "versions": describe_versions(), "command": shlex.join(sys.argv)}
        args.json.write_text(json.dumps({**facts, "points": found}, indent=1) + "\n")


def show(point: dict[str, Any]) -> None:
    (speed, size), (speed_expected, size_expected) = measured(point["row"]), predicted(point["row"])
    print(
        f"{point['series']:36}{point['x']:>14,}{speed:12,.0f}/s ({speed_expected:,.0f}){size:8.1f} GiB "
        f"({size_expected:.1f})",
        flush=True,
    )


def plot(args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    by_series: dict[str, list[dict[str, Any]]] = {}
    for point in json.loads(args.json.read_text())["points"]:
        show(point)
        by_series.setdefault(point["series"], []).append(point)
    figure = Figure(figsize=(3.2 * len(by_series), 6), layout="constrained")
    axes = figure.subplots(2, len(by_series), squeeze=False)
    for column, (series, found) in enumerate(by_series.items()):
        found.sort(key=lambda point: point["x"])
        for row, unit in enumerate(("tokens/s", "peak memory, GiB")):
            ax, x = axes[row][column], [point["x"] for point in found]
            values = [measured(point["row"])[row] for point in found]
            ax.plot(x, values, "o-", label="measured")
            ax.plot(x, [predicted(point["row"])[row] for point in found], "x--", label="predicted")
            ax.set_xscale("log")
            if max(values) > 20 * min(values):
                ax.set_yscale("log")
            else:
                ax.set_ylim(bottom=0)
            ax.set_xticks(x, [f"{n / 1e9:.2g}B" if n > 1e8 else f"{n:,}" for n in x], minor=False)
            ax.set_xticks([], minor=True)
            ax.set_title(series, size=9)
            ax.set_ylabel(unit)
            ax.grid(alpha=0.3)
            ax.legend()
    figure.savefig(args.image, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "plot"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="two points of a tiny model, to try the script")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--image", type=Path)
    args = parser.parse_args()
    (measure if args.action == "measure" else plot)(args)


if __name__ == "__main__":
    main()
