"""The error of gradients that are summed in bfloat16 (`optim.precision` "8bit" or "bfloat16") instead of float32.

    python bench/gradient_error.py --shape tiny-llama --sequences 64 --tokens 64 --json FILE

Gradients of one batch, divided into more and more micro-batches, all computed in bfloat16. The relative error of a sum
in bfloat16 is that against the sum in float32; for comparison, the error of the computation itself is that of the sum in
float32 against a computation in float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from assay.bench.results import describe_machine, describe_versions
from assay.bench.step import make_config, make_learner, make_policy
from assay.bench.workload import SHAPES, Sequences, StepOptions
from assay.models.device import pick_device
from assay.training.learner.pack import rows_of


def gradients(work: Sequences, precision: str, dtype: str, budget: int, device: torch.device) -> dict[str, Tensor]:
    """The gradient of each parameter, in float32, with micro-batches of at most `budget` tokens."""
    options = StepOptions(device=device.type, dtype=dtype, set=(f"optim.precision={precision}",))
    cfg = make_config(options)
    cfg.train.token_budget = budget
    learner = make_learner(make_policy(work, cfg, device), cfg, lambda *_: None)
    rows = rows_of([work.group(learner.policy.vocab_size, 0)], learner.algo)
    learner.updater._accumulate(rows, learner.algo)
    return {name: p.grad.float().cpu() for name, p in learner.policy.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference, relative to the norm."""
    difference = sum((found[name] - value).double().square().sum() for name, value in expected.items())
    return float((difference / sum(value.double().square().sum() for value in expected.values())) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny-llama", choices=sorted(SHAPES))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work, device = Sequences(shape=args.shape, sequences=args.sequences, tokens=args.tokens), pick_device(args.device)
    exact = gradients(work, "float32", "float32", args.sequences * args.tokens, device)
    rows, parts = [], 1
    while parts <= args.sequences:
        budget = args.sequences * args.tokens // parts
        wide = gradients(work, "float32", "bfloat16", budget, device)
        narrow = gradients(work, "8bit", "bfloat16", budget, device)
        rows.append(
            {"micro_batches": parts, "of_the_sum": error(narrow, wide), "of_the_computation": error(wide, exact)}
        )
        print(f"{parts:3} micro-batches: sum in bfloat16 {rows[-1]['of_the_sum']:.4%}, "
              f"computation in bfloat16 {rows[-1]['of_the_computation']:.4%}", flush=True)  # fmt: skip
        parts *= 4
    if args.json:
        facts = {"machine": describe_machine(), "versions": describe_versions(), "shape": args.shape}
        facts |= {"sequences": args.sequences, "tokens": args.tokens}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
