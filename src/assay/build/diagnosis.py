"""Diagnosis of settings before a run, without loading weights: settings, splits, judge, and a rough estimate of memory.

Takes seconds. `assay train --dry-run` also loads the model and tries an update.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from assay.algos import Algorithm
from assay.build.policy import PRESET_LENGTH, model_source
from assay.build.problems import build_algorithm, build_problems, take
from assay.build.run import evaluation_prompts
from assay.checks import Diagnosis, run_rules
from assay.checks.causes import now, ranked
from assay.config import TrainConfig
from assay.models.device import free_memory, pick_device, pick_dtype
from assay.models.load import preset
from assay.models.quantize import BLOCK
from assay.models.spec import ModelSpec, spec_from_hf
from assay.tasks import Task
from assay.tasks.judging import build_judge_pool
from assay.types import UserError

T = TypeVar("T")
GIB = 2**30
TYPICAL_VOCABULARY = 1_000  # of presets, whose vocabulary comes from the task
TYPICAL_PROMPT = 256  # tokens; prompts are not tokenized here


def diagnose_config(cfg: TrainConfig) -> list[Diagnosis]:
    """Causes that the settings, the task and the size of the model show, most important first."""
    found: list[Diagnosis] = []
    attempt(found, lambda: run_rules.check_settings(cfg))
    algo = attempt(found, lambda: build_algorithm(cfg), "zero_loss" if cfg.train.samples == 1 else "refused")
    spec = attempt(found, lambda: model_spec(cfg))
    task = attempt(found, lambda: build_problems(cfg.task, cfg.env))
    found += run_rules.settings_problems(cfg, algo, task, spec.parameters if spec else None)
    if spec is not None and (cause := estimate_memory(cfg, spec, algo)):
        found.append(cause)
    if task is not None:
        attempt(found, lambda: check_task(cfg, task, found))
    return ranked(merged(found))


def attempt(found: list[Diagnosis], make: Callable[[], T], name: str = "refused") -> T | None:
    """The result of `make`. What a run would refuse becomes a cause, and the result is None."""
    try:
        return make()
    except UserError as error:
        found.append(Diagnosis(name, error.problem.what, error.problem.remedy))
        return None


def merged(causes: list[Diagnosis]) -> Iterator[Diagnosis]:
    """Causes of the same name as one, since each name is reported once."""
    by_name: dict[str, list[Diagnosis]] = {}
    for cause in causes:
        by_name.setdefault(cause.name, []).append(cause)
    for first, *others in by_name.values():
        if not others:
            yield first
            continue
        more = "".join(f"; {other.evidence}" for other in others)
        remedies = list(dict.fromkeys(filter(None, (cause.remedy for cause in (first, *others)))))
        yield Diagnosis(first.name, first.evidence + more, "; ".join(remedies), first.severity)


def check_task(cfg: TrainConfig, task: Task, found: list[Diagnosis]) -> None:
    """Check the judge on one problem, and the splits."""
    train = take(task.prompts("train"), cfg.train.max_train_prompts, "train", endless=True)
    with build_judge_pool(cfg.reward, task, cfg.judge) as judge:
        attempt(found, lambda: run_rules.check_judge(judge, train[0]), "judge_fails")
    found += run_rules.data_problems(cfg, train, evaluation_prompts(cfg, task), note=lambda text: None)


def model_spec(cfg: TrainConfig) -> ModelSpec | None:
    """The shape of the model, without its weights; None if it is not known here, as of a model on the hub."""
    source = model_source(cfg.model, cfg.runs_dir)
    if source.startswith(run_rules.PRESET):
        length = cfg.model.max_length or PRESET_LENGTH
        return preset(source.removeprefix(run_rules.PRESET), TYPICAL_VOCABULARY, length)
    config = Path(source).expanduser() / "config.json"
    try:
        return spec_from_hf(json.loads(config.read_text())) if config.is_file() else None
    except (OSError, ValueError, AttributeError):
        return None


def quantized_bytes(spec: ModelSpec, dtype_bytes: float) -> float:
    """Bytes of a model in NF4: 4 bits and a share of a scale per weight of a layer; embedding and head are not
    quantized.
    """
    embeddings = spec.vocab_size * spec.hidden * (1 if spec.tied else 2)
    return embeddings * dtype_bytes + (spec.parameters - embeddings) * (0.5 + dtype_bytes / BLOCK)


def estimate_memory(cfg: TrainConfig, spec: ModelSpec, algo: Algorithm | None) -> Diagnosis | None:
    """Compare what weights, optimizer, engine and references need with the free memory. Activations are not counted:
    micro-batches adapt to the memory that is left.
    """
    device = pick_device(cfg.device)
    free = free_memory(device)
    if free is None:
        return None
    dtype = pick_dtype(cfg.dtype, device)
    engine_bytes = torch.finfo(pick_dtype(cfg.engine.dtype, device)).bits // 8
    count, trained_bytes = spec.parameters, 0.0 if cfg.lora.rank else 12.0
    dtype_bytes = 2.0 if dtype == torch.bfloat16 else 4.0
    frozen_bytes = quantized_bytes(spec, dtype_bytes) if cfg.lora.quantize else 4.0 * count
    needs = algo.needs if algo is not None else None
    parts = {
        "weights, gradients and optimizer": frozen_bytes + trained_bytes * count,
        "the engine's weights": float(engine_bytes * count),
        "reference": dtype_bytes * count * bool(needs and needs.reference and not cfg.reference.url),
        "critic": 16.0 * count * bool(algo and algo.settings.critic and cfg.critic.trunk == "separate"),
    }
    length = min(TYPICAL_PROMPT + cfg.sampling.max_new_tokens, spec.max_length)
    parts["KV cache of one answer"] = 2.0 * spec.layers * spec.kv_heads * spec.head_dim * engine_bytes * length
    total = sum(parts.values())
    if total <= free:
        return None
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size > 0.05 * total)
    config = cfg.model_dump()
    return Diagnosis(
        "memory_full",
        f"the run needs at least {total / GIB:.1f} GiB ({listed}), and {free / GIB:.1f} GiB are free on {device}",
        f"use a smaller model, LoRA ({now(config, 'lora.rank')}), more devices (docs/scaling.md), or end other "
        "processes that use the memory",
    )
