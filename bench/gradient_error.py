"""The error of gradients that are summed in bfloat16 (`optim.precision` "8bit" or "bfloat16") instead of float32.

    python bench/gradient_error.py --shape tiny-llama --sequences 1 4 16 64 256 --tokens 64 --json FILE

Each sequence is a micro-batch of its own. The sum in bfloat16 is that of an update. It is compared with the sum of the
same gradients in float32; and that sum with a computation in float32, whose weights are rounded to bfloat16 as well.
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
from assay.models import PolicyModel
from assay.models.device import pick_device
from assay.training.learner.pack import rows_of

Gradients = dict[str, Tensor]


def gradients(work: Sequences, precision: str, dtype: str, device: torch.device) -> tuple[Gradients, Gradients]:
    """Of each parameter: the gradient after all micro-batches, and the sum of their gradients in float64."""
    cfg = make_config(StepOptions(device=device.type, dtype=dtype, set=(f"optim.precision={precision}",)))
    cfg.train.token_budget = work.tokens
    policy = make_policy(work, cfg, device)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.bfloat16())
    learner = make_learner(policy, cfg, lambda *_: None)
    rows = rows_of([work.group(policy.vocab_size, 0)], learner.algo)
    sums: Gradients = {}
    for row in rows:
        learner.updater._accumulate([row], learner.algo)
        for name, gradient in current(policy).items():
            sums[name] = sums.get(name, 0.0) + gradient.double()
    learner.updater._accumulate(rows, learner.algo)
    return current(policy), sums


def current(policy: PolicyModel) -> Gradients:
    return {name: p.grad.float().cpu() for name, p in policy.named_parameters() if p.grad is not None}


def error(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference, relative to the norm."""
    difference = sum((found[name] - value).double().square().sum() for name, value in expected.items())
    return float((difference / sum(value.double().square().sum() for value in expected.values())) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny-llama", choices=sorted(SHAPES))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows = pick_device(args.device), []
    for sequences in args.sequences:
        work = Sequences(shape=args.shape, sequences=sequences, tokens=args.tokens)
        found, summed = gradients(work, "bfloat16", "bfloat16", device)
        _, exact = gradients(work, "float32", "float32", device)
        rows.append({"micro_batches": sequences, "of_the_sum": error(found, summed)})
        rows[-1]["of_the_computation"] = error(summed, exact)
        print(f"{sequences:3} micro-batches: sum in bfloat16 {rows[-1]['of_the_sum']:.2%}, "
              f"computation in bfloat16 {rows[-1]['of_the_computation']:.2%}", flush=True)  # fmt: skip
    if args.json:
        facts = {"machine": describe_machine(), "versions": describe_versions(), "shape": args.shape}
        facts |= {"tokens": args.tokens}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
