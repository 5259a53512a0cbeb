"""How speed and memory grow with the batch, the length of answers and the model, and what `assay plan` predicts.

    python bench/growth.py measure --json bench/results/growth-h200.json    # on a GPU, in about ten minutes
    python bench/growth.py plot --json bench/results/growth-h200.json --image docs/images/growth.png

Generation: prompts of 128 tokens. Training: one micro-batch without activation checkpointing, AdamW in float32 (7B:
`optim.precision` 8bit).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    tokens_per_s: float
    peak_gib: float
    predicted_tokens_per_s: float
    predicted_gib: float
    row: dict[str, Any]  # of the benchmark


def generation(series: str, shape: str, prompts: int, samples: int, new: int, x: int, device: str) -> Point:
    from assay.bench import engine

    work = Workload(shape=shape, prompts=prompts, samples=samples, new=new)
    (row,) = engine.measure(work, Options(device=device, repeat=1, mismatch=False))
    return Point(series, x, row["tokens_per_s"], row["peak_memory_gib"] or 0.0, *predicted_generation(work), row)


def predicted_generation(work: Workload) -> tuple[float, float]:
    import torch
    from fit_cost import generation_seconds

    from assay.build.cost import kv_bytes

    spec = SHAPES[work.shape]()
    cache = kv_bytes(spec, torch.bfloat16) * work.batch * work.max_length
    return sum(work.new_tokens) / generation_seconds(work), (2 * spec.parameters + cache) / GIB


def training(series: str, shape: str, sequences: int, tokens: int, x: int, device: str) -> Point:
    from assay.bench import step

    precision = "8bit" if shape == "7b" else "float32"
    settings = (f"optim.precision={precision}", f"train.token_budget={sequences * tokens}")
    work = Sequences(shape=shape, sequences=sequences, tokens=tokens)
    (row,) = step.measure_training(work, StepOptions(device=device, steps=2, set=settings))
    expected = predicted_training(shape, sequences, tokens, precision)
    return Point(series, x, row["tokens_per_s"], row["peak_gib"], *expected, row)


def predicted_training(shape: str, sequences: int, length: int, precision: str) -> tuple[float, float]:
    import torch
    from fit_cost import GPU

    from assay.build.models import activation_bytes
    from assay.build.plan import OPTIMIZER_BYTES, STATES, train_seconds

    spec, tokens = SHAPES[shape](), sequences * length
    state = STATES[precision] + 2.0 * (precision == "float32")
    size = state * spec.parameters + tokens * activation_bytes(spec, torch.bfloat16, False)
    seconds = OPTIMIZER_BYTES * spec.parameters / GPU.bandwidth + tokens * train_seconds(spec, GPU, length)
    return tokens / seconds, size / GIB


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
        print(f"{point.series:36}{point.x:>14,}{point.tokens_per_s:12,.0f}/s ({point.predicted_tokens_per_s:,.0f})"
              f"{point.peak_gib:8.1f} GiB ({point.predicted_gib:.1f})", flush=True)  # fmt: skip
        facts = {"machine": describe_machine(), "versions": describe_versions(), "command": "python bench/growth.py"}
        args.json.write_text(json.dumps({**facts, "points": found}, indent=1) + "\n")


def plot(args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    by_series: dict[str, list[dict[str, Any]]] = {}
    for point in json.loads(args.json.read_text())["points"]:
        by_series.setdefault(point["series"], []).append(point)
    figure = Figure(figsize=(4 * len(by_series), 6.5), layout="constrained")
    axes = figure.subplots(2, len(by_series), squeeze=False)
    for column, (series, found) in enumerate(by_series.items()):
        found.sort(key=lambda point: point["x"])
        for row, (key, unit) in enumerate((("tokens_per_s", "tokens/s"), ("gib", "peak memory, GiB"))):
            measured = "peak_gib" if key == "gib" else key
            ax, x = axes[row][column], [point["x"] for point in found]
            ax.loglog(x, [point[measured] for point in found], "o-", label="measured")
            ax.loglog(x, [point[f"predicted_{key}"] for point in found], "x--", label="predicted")
            ax.set(title=series, ylabel=unit)
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
