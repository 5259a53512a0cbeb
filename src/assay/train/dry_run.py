"""`assay train --dry-run`: check settings, data, prompts and judge, and estimate memory, without training."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from assay.config import TrainConfig
from assay.engine.base import Engine
from assay.models.decoder import Decoder
from assay.models.device import free_memory
from assay.runs.console import Console
from assay.train import components
from assay.train.build import assemble
from assay.train.checks import check_judge
from assay.train.learner.learner import Learner
from assay.train.rank_checks import start_mesh
from assay.train.reference import load_reference
from assay.train.sft import solution_rows
from assay.types import UserError

GIB = 2**30


def dry_run(cfg: TrainConfig, console: Console) -> Iterator[str]:
    """Build a run and check its inputs without training. Yields the report line by line."""
    mesh = start_mesh(cfg)
    source = components.model_source(cfg.model, cfg.runs_dir)
    run = assemble(cfg, console, source, mesh, time.perf_counter())
    collector, stream, learner = run.collector, run.source.prompts, run.learner
    with collector:
        prompts = stream.next(min(cfg.train.prompts, 64))
        lengths = [*map(len, collector.renderer.all_prompt_ids(prompts))]
        longest, limit = max(lengths), collector.engine.info.max_length
        task = " ".join(filter(None, (cfg.env.name, cfg.task.name)))
        yield f"task {task}: {len(stream.prompts):,} train problems; {run.schedule.total_steps} steps"
        new = cfg.sampling.max_new_tokens
        yield f"prompts of {min(lengths)} to {longest} tokens, answers of up to {new}; context {limit}"
        if longest + new > limit:
            yield f"warning: prompt and answer can exceed the context of {limit} tokens; longer answers are cut off"
        verdict = check_judge(collector.judge, prompts[0])
        if collector.env is None or collector.env.judged:
            yield f"the judge works: an empty answer is '{verdict.status}' with reward {verdict.reward:g}"
    if cfg.sft.steps:
        first_batch = run.demonstrations[: cfg.sft.batch]
        rows = solution_rows(first_batch, collector.renderer, learner.policy.max_length)
        yield f"warm start: {cfg.sft.steps} steps on solutions of up to {max(sum(row.trained) for row in rows)} tokens"
    if learner.algo.needs.reference:
        load_reference(learner.updater, cfg, run.tokenizer)
    check_writable(Path(cfg.runs_dir))
    sizes = memory_by_purpose(cfg, learner, collector.engine, longest)
    for name, size in sizes.items():
        yield f"{name:<28}{size / GIB:8.2f} GiB"
    needed, free = sum(sizes.values()), free_memory(mesh.device)
    yield f"{'estimated total':<28}{needed / GIB:8.2f} GiB on {mesh.device}"
    if free is not None and needed > free:
        yield (
            f"warning: only {free / GIB:.2f} GiB are free; lower train.token_budget or engine.max_batch (a micro-batch "
            "that does not fit is halved during the run)"
        )
    else:
        yield "all checks passed"


def memory_by_purpose(cfg: TrainConfig, learner: Learner, engine: Engine, prompt_tokens: int) -> dict[str, float]:
    """Estimated bytes at the peak of a step, without kernels, fragmentation and the interpreter."""
    policy, updater, critic = learner.policy, learner.updater, learner.critic
    count = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    base_is_reference = policy.lora is not None and not cfg.algo.reference and not cfg.sft.steps
    base_is_reference = base_is_reference and not components.reference_is_dynamic(cfg.algo)
    compute_bytes = 2 if updater.dtype == torch.bfloat16 else 4
    reference_bytes = 4 if cfg.algo.reference_ema else compute_bytes
    reference = updater.reference  # loaded by now if the settings name one
    reference_count = count if reference is None else sum(p.numel() for p in reference.parameters())
    has_reference = learner.algo.needs.reference and not base_is_reference
    engine_bytes = torch.finfo(engine.info.dtype).bits // 8
    sizes = {
        "weights, gradients, AdamW": 4.0 * count + 12.0 * trained,
        "engine's copy of the weights": float(engine_bytes * count),
        "reference": float(reference_bytes * reference_count) if has_reference else 0.0,
    }
    if critic is not None and not critic.shared:
        sizes["critic, gradients, AdamW"] = 16.0 * count
    length = min(prompt_tokens + cfg.sampling.max_new_tokens, engine.info.max_length)
    sequences = cfg.train.prompts * cfg.train.samples
    tokens = min(cfg.train.token_budget, sequences * length)
    if isinstance(policy, Decoder):
        spec = policy.spec
        sequences = min(engine.info.max_batch, sequences)
        sizes["KV cache"] = 2.0 * spec.layers * spec.kv_heads * spec.head_dim * engine_bytes * length * sequences
        # Kept for the backward pass per token and layer: about 10 hidden-sized tensors, attention's, 4 of the MLP.
        numbers = 10 * spec.hidden + 4 * spec.heads * spec.head_dim + 4 * spec.intermediate
        sizes["activations"] = float(tokens * spec.layers * numbers * compute_bytes)
    sizes["logits"] = 4.0 * 3 * min(tokens * policy.vocab_size, 1 << 25)
    return {name: size for name, size in sizes.items() if size}


def check_writable(runs_dir: Path) -> None:
    folder = next(p for p in (runs_dir, *runs_dir.absolute().parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{folder} is not writable: choose another folder with --runs_dir")
