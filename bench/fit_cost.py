"""Fit the factors of `assay.build.plan` to measured rows, and check them on rows that were not used.

    python bench/fit_cost.py --json bench/results/plan-h200.json

Reads bench/results/engine-h200.json, step-h200.json and low-memory-h200.json. Prints the factors, which belong into
`assay/build/plan.py`, and for each row the predicted and the measured value.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from assay.bench.workload import SHAPES, Workload
from assay.build import plan
from assay.build.cost import Line
from assay.build.plan import GPUS, MEASURED_ON, Cluster, StepWork, decode_features, decoding, prefill, train_features
from assay.build.simulate import Pipeline, Simulation

RESULTS = Path(__file__).parent / "results"
GPU = GPUS[MEASURED_ON]
FITTED = {  # ids of rows
    "gen-0.5b-16x64x256", "gen-1.5b-16x64x256", "gen-0.5b-one-sequence", "step-7b-16x64x256-8bit",
    "train-0.5b-16x1024", "train-1.5b-16x1024", "train-7b-16x1024-8bit-budget8192",
    "train-0.6b-1x16384-precisionfloat32-token_budget16384",
}  # fmt: skip
NAMES = (
    "DECODE_LAYER_S",
    "DECODE_MATMUL",
    "DECODE_CACHE",
    "DECODE_ROW",
    "TRAIN_MATMUL",
    "TRAIN_ATTENTION",
    "TRAIN_ROW",
)


def rows() -> Iterator[dict[str, Any]]:
    for name in ("engine-h200", "step-h200", "low-memory-h200"):
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            # Products in 8 bits are not part of the model; flash attention is not used any more.
            if row["system"] == "assay" and not re.search("fp8|flash", row["id"]):
                yield row


def least_squares(features: list[tuple[float, ...]], seconds: list[float]) -> np.ndarray:
    """Factors with the least relative errors."""
    matrix = np.array(features) / np.array(seconds)[:, None]
    return np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]


def fit_decoding(found: dict[str, dict[str, Any]]) -> list[float]:
    features, seconds, cache = [], [], []
    for name in FITTED & found.keys():
        if not name.startswith(("gen", "step")):
            continue
        row = found[name]
        shape, prompts, samples, new = re.match(r"\w+-([\d.]+b)-(?:(\d+)x(\d+)x(\d+)|one)", name).groups()  # type: ignore[union-attr]
        count, new = int(prompts or 1) * int(samples or 1), int(new or 512)
        position = row["parts_s"]["generation"] / new if "parts_s" in row else count / row["tokens_per_s"]
        spec = SHAPES[shape]()
        position += spec.layers * plan.FEW_ROWS_S * (count <= plan.few_rows_of(spec, GPU))
        parts = decode_features(spec, GPU, count, 128 + new / 2)
        features.append(parts)
        seconds.append(position)
        if "parts_ms" in row and count > 1:
            cache.append(row["parts_ms"]["attention"] / 1e3 / parts[2])
    share = float(np.mean(cache))  # of the KV cache: kernels of attention alone
    rest = [second - share * part[2] for part, second in zip(features, seconds, strict=True)]
    layer, matmul, other = least_squares([(part[0], part[1], part[3]) for part in features], rest)
    return [layer, matmul, share, other]


def fit_training(found: dict[str, dict[str, Any]]) -> list[float]:
    features, seconds = [], []
    for name in FITTED & found.keys():
        if name.startswith("train"):
            shape, tokens = re.match(r"train-([\d.]+b)-\d+x(\d+)", name).groups()  # type: ignore[union-attr]
            features.append(train_features(SHAPES[shape](), GPU, int(tokens)))
            seconds.append(1 / found[name]["tokens_per_s"])
    return list(least_squares(features, seconds))


def generation_seconds(work: Workload) -> float:
    spec = SHAPES[work.shape]()
    pipeline = Pipeline(
        engines=1,
        max_batch=work.batch,
        decoding=decoding(spec, GPU),
        prefill=prefill(spec, GPU, work.prompt_tokens),
        prompts=work.prompts,
        samples=work.sequences // work.prompts,
        prompt_tokens=work.prompt_tokens,
        lengths=work.new_tokens,
        update=Line(0.0, 0.0),
        sync=0.0,
        staleness=0,
    )
    simulation = Simulation(pipeline)
    simulation.step()
    return simulation.time


def predicted(row: dict[str, Any]) -> tuple[str, float, float] | None:
    """What is compared, its prediction and its measurement."""
    name = row["id"]
    if re.search("lora|rank|checkpointing|deterministic|startup", name):
        return None
    shape, size = re.match(r"\w+-([\d.]+b)-(\w+)", name).groups()  # type: ignore[union-attr]
    if name.startswith("gen"):
        given = {
            key: row[key] for key in ("prompts", "samples", "prompt_tokens", "new", "lengths", "requests") if key in row
        }
        work = Workload(shape=shape, **given)
        return "tokens/s", sum(work.new_tokens) / generation_seconds(work), row["tokens_per_s"]
    if name.startswith("train"):
        length = int(size.split("x")[1])
        return "tokens/s", 1 / plan.train_seconds(SHAPES[shape](), GPU, length), row["tokens_per_s"]
    prompts, samples, new = map(int, size.split("x"))
    spec, work = SHAPES[shape](), StepWork(prompts, samples, 128, new, [new])
    learner = plan.fit_learner(spec, work, Cluster(), 1)
    assert learner is not None
    tokens = prompts * (128 + samples * new)
    update = plan.update_line(spec, work, Cluster(), learner).at(tokens)
    generation = generation_seconds(Workload(shape=shape, prompts=prompts, samples=samples, new=new))
    return "s per step", generation + update + plan.sync_seconds(spec, Cluster()), row["step_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {row["id"]: row for row in rows()}
    factors = dict(zip(NAMES, map(float, [*fit_decoding(found), *fit_training(found)]), strict=True))
    for name, value in factors.items():
        print(f"{name} = {value:.4g}, in use: {getattr(plan, name):.4g}")
    compared = []
    for row in found.values():
        if (values := predicted(row)) is not None:
            what, expected, measured = values
            compared.append(
                {
                    "id": row["id"],
                    "fitted": row["id"] in FITTED,
                    "what": what,
                    "predicted": float(f"{expected:.4g}"),
                    "measured": measured,
                    "ratio": round(expected / measured, 3),
                }
            )
            marked = "fitted" if row["id"] in FITTED else ""
            print("{id:42}{what:>11}{predicted:12,.2f}{measured:12,.2f}{ratio:8.3f}".format(**compared[-1]), marked)
    if args.json:
        args.json.write_text(
            json.dumps({"command": "python bench/fit_cost.py", "factors": factors, "rows": compared}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
