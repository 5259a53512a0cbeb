"""A check of everything before hours are spent: settings, data, prompts, one judged answer, and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from assay.config import TrainConfig
from assay.models.decoder import Decoder
from assay.models.device import free_memory
from assay.runs.console import Console
from assay.train import setup
from assay.train.agreement import start_mesh
from assay.train.reference import load_reference
from assay.train.sft import solution_rows
from assay.train.stages import Parts
from assay.train.start import assemble, probe
from assay.types import UserError

GIB = 2**30


def dry_run(cfg: TrainConfig, console: Console) -> Iterator[str]:
    mesh = start_mesh(cfg)
    parts = assemble(cfg, console, setup.model_source(cfg.model, cfg.runs_dir), mesh, time.perf_counter())
    with parts.collector.judge as judge:
        prompts = parts.stream.next(min(cfg.train.prompts, 64))
        lengths = [*map(len, parts.collector.renderer.all_prompt_ids(prompts))]
        longest, limit = max(lengths), parts.collector.engine.info.max_length
        what = " ".join(filter(None, (cfg.env.name, cfg.task.name)))
        yield f"task {what}: {len(parts.stream.prompts):,} train problems; {parts.total_steps} steps"
        new = cfg.sampling.max_new_tokens
        yield f"prompts of {min(lengths)} to {longest} tokens, answers of up to {new}; context {limit}"
        if longest + new > limit:
            yield f"warning: a prompt and its answer can pass the context of {limit} tokens and are cut off there"
        verdict, env = probe(judge, prompts[0]), parts.collector.env
        if env is None or env.judged:
            yield f"the judge works: an empty answer is '{verdict.status}' with reward {verdict.reward:g}"
    if cfg.sft.steps:
        shown = parts.demonstrations[: cfg.sft.batch]
        rows = solution_rows(shown, parts.collector.renderer, parts.updater.policy.max_length)
        yield f"warm start: {cfg.sft.steps} steps on solutions of up to {max(sum(row.trained) for row in rows)} tokens"
    if parts.algo.needs_reference:
        load_reference(parts.updater, cfg, parts.tokenizer)
    check_writable(Path(cfg.runs_dir))
    parts_of_memory = memory(parts, longest)
    for name, size in parts_of_memory.items():
        yield f"{name:<28}{size / GIB:8.2f} GiB"
    needed, free = sum(parts_of_memory.values()), free_memory(parts.mesh.device)
    yield f"{'memory in all, about':<28}{needed / GIB:8.2f} GiB on {parts.mesh.device}"
    if free is not None and needed > free:
        yield (
            f"warning: only {free / GIB:.2f} GiB are free; a lower train.token_budget or engine.max_batch needs less, "
            "and a micro-batch that does not fit is halved as the run goes"
        )
    else:
        yield "everything is in order"


def memory(parts: Parts, prompt: int) -> dict[str, float]:
    """Bytes by purpose, at the peak of a step. An estimate: kernels, fragmentation and the interpreter come on top."""
    cfg, policy, engine = parts.cfg, parts.updater.policy, parts.collector.engine
    count = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    from_base = policy.lora is not None and not cfg.algo.reference and not cfg.sft.steps  # its own reference
    from_base = from_base and not setup.moves(cfg.algo)
    half = 2 if parts.updater.dtype == torch.bfloat16 else 4
    kept = 4 if cfg.algo.reference_ema else half
    other = parts.updater.reference  # by now, where the settings name one
    compared = count if other is None else sum(p.numel() for p in other.parameters())
    served = torch.finfo(engine.info.dtype).bits // 8
    found = {
        "weights, gradients, AdamW": 4.0 * count + 12.0 * trained,
        "engine's copy of the weights": float(served * count),
        "reference": float(kept * compared) if parts.algo.needs_reference and not from_base else 0.0,
    }
    if parts.critic is not None and not parts.critic.shared:
        found["critic, gradients, AdamW"] = 16.0 * count
    length = min(prompt + cfg.sampling.max_new_tokens, engine.info.max_length)
    sequences = cfg.train.prompts * cfg.train.samples
    tokens = min(cfg.train.token_budget, sequences * length)
    if isinstance(policy, Decoder):
        spec = policy.spec
        sequences = min(engine.info.max_batch, sequences)
        found["KV cache"] = 2.0 * spec.layers * spec.kv_heads * spec.head_dim * served * length * sequences
        # What backward keeps of one token in one layer: about 10 hidden-sized tensors, attention's, and 4 of the MLP's.
        numbers = 10 * spec.hidden + 4 * spec.heads * spec.head_dim + 4 * spec.intermediate
        found["activations"] = float(tokens * spec.layers * numbers * half)
    logits = min(tokens * policy.vocab_size, 1 << 25)
    found["logits"] = 4.0 * 3 * logits
    return {name: size for name, size in found.items() if size}


def check_writable(runs_dir: Path) -> None:
    place = next(p for p in (runs_dir, *runs_dir.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"{place} is not writable: choose another folder with --runs_dir")
