"""Measure the `hf` engine, and other ways to decode with transformers: a static cache, and its continuous batching.

    python bench/hf_engine.py --families gemma3 gemma2 gpt_neox --sequences 16 64 --json hf-engine.json

All ways sample from the same random weights, in alternating runs: `--sequences` samples of one prompt, each with
`--new` tokens. Only the engines also return log-probabilities and have exact seeds. For a family of assay's own decoder
(gemma3), the native engine is measured too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

from assay.bench.results import describe_machine, describe_versions
from assay.engine import Request, SamplingParams, generate, make_engine
from assay.models import Decoder, HFModel, spec_from_hf

SHAPES: dict[str, dict[str, int]] = {
    "270m": {
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 320,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
}
FAMILIES = {"gemma3": "gemma3_text", "gemma2": "gemma2", "gpt_neox": "gpt_neox", "stablelm": "stablelm"}


def random_model(family: str, shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    sizes = SHAPES[shape] | {"max_position_embeddings": 4096}
    none: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(FAMILIES[family], **sizes, **none)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def draw(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.float().softmax(-1), 1)


@torch.inference_mode()
def decode(hf: Any, prompt: list[int], sequences: int, new: int, static: bool) -> None:
    """A plain loop over transformers' forward pass, with its dynamic or its static cache."""
    device = next(hf.parameters()).device
    if static:
        cache = transformers.StaticCache(config=hf.config, max_cache_len=len(prompt) + new)
    else:
        cache = transformers.DynamicCache(config=hf.config)
    ids = torch.tensor([prompt], device=device).expand(sequences, -1)
    position = torch.arange(len(prompt), device=device)[None]
    for step in range(new):
        out = hf(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = draw(out.logits[:, -1])
        position = torch.tensor([[len(prompt) + step]], device=device)


def continuous(hf: Any, prompt: list[int], sequences: int, new: int) -> None:
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0)
    results = hf.generate_batch(inputs=[prompt] * sequences, generation_config=config, progress_bar=False)
    tokens = sum(len(result.generated_tokens) for result in results.values())
    assert tokens == sequences * new, f"continuous batching returned {tokens} tokens"


def engine_runner(name: str, policy: Any, sequences: int, new: int, prompt: list[int]) -> Callable[[], None]:
    engine = make_engine(
        name, policy, device=policy.device, dtype=next(policy.parameters()).dtype, max_batch=sequences, max_length=1024
    )
    seeds = iter(range(1000))

    def run() -> None:
        request = Request(prompt, SamplingParams(n=sequences, max_new_tokens=new), seed=next(seeds))
        (group,) = generate(engine, [request])
        assert all(len(completion.token_ids) == new for completion in group)

    return run


def ways(hf: Any, sequences: int, new: int, prompt: list[int], skip: list[str]) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {
        "engine hf": engine_runner("hf", HFModel(hf), sequences, new, prompt),
        "dynamic cache": lambda: decode(hf, prompt, sequences, new, static=False),
        "static cache": lambda: decode(hf, prompt, sequences, new, static=True),
        "continuous batching": lambda: continuous(hf, prompt, sequences, new),
    }
    spec = spec_from_hf(hf.config.to_dict())
    if spec is not None:
        policy = Decoder(spec).to(next(hf.parameters()).device, next(hf.parameters()).dtype)
        policy.load_state_dict(hf.state_dict())
        found["engine native"] = engine_runner("native", policy, sequences, new, prompt)
    return {name: run for name, run in found.items() if name not in skip}


def seconds(run: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(hf: Any, sequences: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    prompt = [(7 * place) % 5000 for place in range(args.prompt)]
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    runs = ways(hf, sequences, args.new, prompt, args.skip)
    for _ in range(1 + args.repeat):  # the first run warms up
        for name, run in runs.items():
            if name not in errors:
                try:
                    times.setdefault(name, []).append(seconds(run, device))
                except Exception as error:  # of transformers, for this model or device
                    errors[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    speeds = {name: round(sequences * args.new / median(some[1:])) for name, some in times.items() if len(some) > 1}
    return {"tokens_per_s": speeds, "errors": errors, "runs_s": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["gemma3", "gemma2"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="new tokens of each sequence")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--skip", nargs="*", default=[], help="ways that are not measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    content = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "command": shlex.join(["python", "bench/hf_engine.py", *sys.argv[1:]]),
        "settings": {key: value for key, value in vars(args).items() if key != "json"},
        "rows": [],
    }
    for family in args.families:
        hf = random_model(family, args.shape, device, getattr(torch, args.dtype))
        for sequences in args.sequences:
            row = {"family": family, "sequences": sequences, **measure(hf, sequences, args, device)}
            print(family, sequences, row["tokens_per_s"], row["errors"], flush=True)
            content["rows"].append(row)
            if args.json:  # after each row: slow ways may be stopped
                args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
