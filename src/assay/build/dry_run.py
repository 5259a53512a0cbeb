"""Build a run and try its parts without training: `assay train --dry-run`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from assay.build import trials
from assay.build.policy import (
    activation_bytes,
    model_source,
)
from assay.build.run import (
    assemble,
    has_rl_steps,
)
from assay.checks import run_rules
from assay.config import TrainConfig
from assay.engine.base import BaseEngine
from assay.mesh import Mesh
from assay.models import Decoder
from assay.models.device import free_memory
from assay.runs.console import Console
from assay.training.learner.learner import Learner, solution_rows
from assay.training.ranks import start_mesh
from assay.training.reference import load_reference
from assay.types import UserError, plural

GIB = 2**30


def dry_run(cfg: TrainConfig, console: Console) -> Iterator[str]:
    """Build a run and check its inputs without training. Yields the report line by line."""
    mesh = start_mesh(cfg)
    source = model_source(cfg.model, cfg.runs_dir)
    run = assemble(cfg, console, source, mesh, time.perf_counter(), checked_texts=trials.READ)
    collector, stream, learner = run.collector, run.source.prompts, run.learner
    with collector:
        prompts = stream.next(min(max(cfg.train.prompts, trials.PROMPTS), 64))
        lengths = [*map(len, collector.renderer.all_prompt_ids(prompts))]
        longest, limit = max(lengths), collector.engine.info.max_length
        task = " ".join(filter(None, (cfg.env.name, cfg.task.name)))
        yield f"task {task}: {plural(len(stream.prompts), 'train problem')}; {plural(run.schedule.total_steps, 'step')}"
        new = cfg.sampling.max_new_tokens
        yield f"prompts of {min(lengths)} to {longest} tokens, answers of up to {new}; context {limit}"
        if longest + new > limit:
            yield f"warning: prompt and answer can exceed the context of {limit} tokens; longer answers are cut off"
        verdict = run_rules.check_judge(collector.judge, prompts[0])
        if collector.env is None or collector.env.judged:
            yield f"the judge works: an empty answer is '{verdict.status}' with reward {verdict.reward:g}"
        if cfg.sft.steps:
            first_batch = run.demonstrations[: cfg.sft.batch]
            rows = solution_rows(first_batch, collector.renderer, learner.policy.max_length)
            longest_solution = plural(max(sum(row.trained) for row in rows), "token")
            yield f"warm start: {plural(cfg.sft.steps, 'step')} on solutions of up to {longest_solution}"
        if learner.algo.needs.reference:
            load_reference(learner.updater, cfg, run.tokenizer, console)
        check_writable(Path(cfg.runs_dir))
        sizes = memory_by_purpose(cfg, learner, collector.engine, longest)
        if collector.env is not None:
            trials.try_env(collector.env, prompts[0])
        if has_rl_steps(cfg):
            yield trials.try_update(cfg, collector, learner, prompts)
    yield from memory_report(sizes, mesh, run.cfg.train.token_budget)


def memory_report(sizes: Mapping[str, float], mesh: Mesh, token_budget: int) -> Iterator[str]:
    """`sizes`: bytes by purpose."""
    for name, size in sizes.items():
        yield f"{name:<28}{size / GIB:8.2f} GiB"
    needed, free = sum(sizes.values()), free_memory(mesh.device)
    yield f"{'estimated total':<28}{needed / GIB:8.2f} GiB on {mesh.device}, train.token_budget = {token_budget}"
    if free is not None and needed > free:
        yield (
            f"warning: only {free / GIB:.2f} GiB are free; lower train.token_budget or engine.max_batch (a micro-batch "
            "that does not fit is halved during the run)"
        )
    else:
        yield "all checks passed"


def memory_by_purpose(cfg: TrainConfig, learner: Learner, engine: BaseEngine, prompt_tokens: int) -> dict[str, float]:
    """Estimated bytes at the peak of a step, without kernels, fragmentation and the interpreter."""
    policy, updater, critic = learner.policy, learner.updater, learner.critic
    count = policy.parameter_count
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    base_is_reference = policy.lora is not None and not cfg.algo.reference and not cfg.sft.steps
    base_is_reference = base_is_reference and not cfg.algo.dynamic_reference
    compute_bytes = 2 if updater.dtype == torch.bfloat16 else 4
    reference_bytes = 4 if cfg.algo.reference_ema else compute_bytes
    reference = updater.reference  # loaded by now if the settings name one
    reference_count = count if reference is None else sum(p.numel() for p in reference.parameters())
    has_reference = learner.algo.needs.reference and not base_is_reference and updater.served is None
    engine_bytes = torch.finfo(engine.info.dtype).bits // 8
    sizes = {
        "weights, gradients, AdamW": policy.weight_bytes + 12.0 * trained,
        "engine's copy of the weights": float(engine_bytes * count),
        "reference": float(reference_bytes * reference_count) if has_reference else 0.0,
    }
    if critic is not None and not critic.shared:
        sizes["critic, gradients, AdamW"] = 16.0 * count
    length = min(prompt_tokens + cfg.sampling.max_new_tokens, engine.info.max_length)
    sequences = cfg.train.prompts * cfg.train.samples
    tokens = min(updater.token_budget, sequences * length)
    if isinstance(policy, Decoder):
        spec = policy.spec
        sequences = min(engine.info.max_batch, sequences)
        sizes["KV cache"] = 2.0 * spec.layers * spec.kv_heads * spec.head_dim * engine_bytes * length * sequences
        sizes["activations"] = float(tokens * activation_bytes(spec, updater.dtype, policy.recompute))
    sizes["logits"] = 4.0 * 3 * min(tokens * policy.vocab_size, 1 << 25)
    return {name: size for name, size in sizes.items() if size}


def check_writable(runs_dir: Path) -> None:
    folder = next(p for p in (runs_dir, *runs_dir.absolute().parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{folder} is not writable: choose another folder with --runs_dir")
