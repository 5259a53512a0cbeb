"""Peak memory and time of one update with all weights, with LoRA, and with LoRA on a base in 4 bits (QLoRA).

    python bench/qlora.py --json bench/results/qlora-h200.json

Models have random weights, which are sampled on the device: for QLoRA one layer at a time, as `assay train` moves them
there. Methods: `full` and `lora` hold the weights in float32, as `assay train` does; `lora-bf16` holds the frozen base
in bfloat16 (no setting of `assay train`, for comparison); `qlora` is `lora.quantize = "nf4"`. All products are in
bfloat16, layers are recomputed in the backward pass (`train.activation_checkpointing`) and nothing is compiled. An
update includes AdamW; no engine is running. `merge_s` is the time to compute all weights that a weight sync sends, in
bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from assay.bench import RunProgress
from assay.bench.engine import free_memory, now
from assay.bench.results import describe_machine, describe_versions, earlier_rows, save, summarize
from assay.bench.step import Sequences, StepOptions, make_config, make_learner, peak_memory
from assay.bench.workload import SHAPES, random_model
from assay.models import Decoder, Lora, ModelSpec
from assay.models.decoder import rope_tables
from assay.models.device import pick_device
from assay.models.lora import ALL, targeted
from assay.models.quantize import NF4Linear, quantize
from assay.training.progress import RunState

SEVEN = replace(  # Qwen2.5 7B
    SHAPES["1.5b"](),
    **{"hidden": 3584, "intermediate": 18944, "heads": 28, "kv_heads": 4, "vocab_size": 152064, "tied": False},
)
MODELS: dict[str, ModelSpec] = {
    "tiny": SHAPES["tiny"](),
    "0.5b": SHAPES["0.5b"](),
    "1.5b": SHAPES["1.5b"](),
    "7b": SEVEN,
}
METHODS = ("qlora", "lora-bf16", "lora", "full")


@torch.no_grad()
def quantized_model(spec: ModelSpec, device: torch.device, seed: int) -> Decoder:
    """As `random_model` in bfloat16, quantized; the device holds at most one layer's weight in bfloat16."""
    with torch.device("meta"):
        model = Decoder(spec).to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(seed)
    for name in targeted(model, [ALL]):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        weight = torch.empty(layer.weight.shape, dtype=torch.bfloat16, device=device)
        codes, scales = quantize(weight.normal_(0.0, 0.02, generator=generator))
        bias = None if layer.bias is None else torch.zeros(layer.out_features, dtype=torch.bfloat16, device=device)
        model.set_submodule(name, NF4Linear(layer.in_features, layer.out_features, codes, scales, bias))
    for name, module in list(model.named_modules()):
        for own_name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta and not (spec.tied and name == "lm_head"):
                fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                fresh = fresh.fill_(1.0) if "norm" in name else fresh.normal_(0.0, 0.02, generator=generator)
                setattr(module, own_name, nn.Parameter(fresh, requires_grad=False))
    model.inv_freq = rope_tables(spec).to(device)
    if spec.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def make_policy(method: str, spec: ModelSpec, device: torch.device, rank: int) -> Decoder:
    if method == "qlora":
        policy = quantized_model(spec, device, seed=0)
    elif method == "lora-bf16":
        with torch.device("meta"):
            policy = Decoder(spec).to(torch.bfloat16)
        policy.to_empty(device=device)
        for name, weight in policy.named_parameters():
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(0.0, 0.02)
    else:
        policy = random_model(spec, device, seed=0)
    if method != "full":
        policy.add_lora(Lora(rank, 2.0 * rank))
        for weight in (p for p in policy.parameters() if p.requires_grad):
            weight.data = weight.data.float()  # adapters are float32 with every method
    return policy


@dataclass(frozen=True)
class Job:
    shape: str
    method: str
    work: Sequences
    options: StepOptions
    rank: int

    def measure(self, device: torch.device) -> dict[str, Any]:
        spec = MODELS[self.shape]
        row: dict[str, Any] = {
            "id": f"update-{self.shape}-{self.work.sequences}x{self.work.tokens}-{self.method}",
            "system": "assay",
            **{"shape": self.shape, "method": self.method, "parameters": spec.parameters},
            **{"sequences": self.work.sequences, "tokens": self.work.tokens, "set": list(self.options.set)},
            "rank": 0 if self.method == "full" else self.rank,
        }
        free_memory(device)
        try:
            return row | self._figures(spec, device)
        except torch.OutOfMemoryError as error:
            return row | {"out_of_memory": str(error).partition(".")[0]}

    def _figures(self, spec: ModelSpec, device: torch.device) -> dict[str, Any]:
        policy = make_policy(self.method, spec, device, self.rank)
        loaded = {f"load_{name}": value for name, value in peak_memory(device).items()}
        cfg = make_config(self.options)
        cfg.train.activation_checkpointing, cfg.train.compile = True, "off"
        learner = make_learner(policy, cfg, RunProgress(None, self.options.steps))
        state, seconds = RunState(), []
        for run in range(1 + self.options.steps):
            group = self.work.group(policy.vocab_size, run)
            start = now(device)
            metrics = learner.update([group], state)
            seconds.append(now(device) - start)
            assert not metrics["optim/skipped"], "an update was skipped"
        peak = peak_memory(device)
        start = now(device)
        for _, weight in policy.weights():
            weight.detach().to(torch.bfloat16)
        merge_s = round(now(device) - start, 4)
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        return {
            **summarize("step_s", "first_step_s", seconds, digits=4),
            "weights_gib": round(policy.weight_bytes / 2**30, 3),
            **loaded,
            **peak,
            "merge_s": merge_s,
            "trained_parameters": trained,
            "token_budget": learner.updater.token_budget,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["1.5b", "7b"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, machine, versions = pick_device(args.device), describe_machine(), describe_versions()
    if args.json:
        earlier_rows(args.json, machine, versions)  # raises before anything is measured
    command = shlex.join(["python", "bench/qlora.py", *sys.argv[1:]])
    settings = (f"train.token_budget={args.token_budget}",)
    options = StepOptions(device=args.device, dtype="bfloat16", steps=args.steps, set=settings)
    work = Sequences(sequences=args.sequences, tokens=args.tokens)
    for shape in args.shapes:
        for method in args.methods:
            row = Job(shape, method, work, options, args.rank).measure(device)
            gc.collect()
            print({name: row.get(name) for name in ("id", "step_s", "weights_gib", "peak_gib", "out_of_memory")})
            if args.json:
                save(args.json, machine, versions, command, [row])


if __name__ == "__main__":
    main()
