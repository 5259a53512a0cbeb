"""Settings -> tokenizer, renderer and model, and the size of micro-batches that fits into memory."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from assay.checks.run_rules import PRESET, PRESET_TOKENIZERS
from assay.config import (
    LoopConfig,
    ModelConfig,
    PromptConfig,
)
from assay.mesh import Mesh
from assay.models import Decoder, ModelSpec, PolicyModel, build_preset, load_model
from assay.models.base import LoadReport
from assay.models.device import describe_threads, free_memory, set_threads, uses_triton
from assay.models.load import check_model_folder
from assay.runs.console import Console, count
from assay.runs.resolve import resolve_model
from assay.tasks import Task
from assay.text import Renderer, Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer
from assay.text.render import few_shot_from_prompts, load_few_shot, read_text_file
from assay.types import UserError

PRESET_LENGTH = 512

COMPILED = 100_000_000  # number of parameters from which compilation pays off within a few steps

TOKEN_BUDGET, LEAST_TOKEN_BUDGET = 2**14, 2**9  # default of train.token_budget, and the least one chosen for a CPU

SMALL_ACTIVATIONS = 2**31  # bytes; a model that needs less per micro-batch is trained alike on all machines


def build_tokenizer(cfg: ModelConfig, source: str, task: Task | None) -> Tokenizer:
    if not source.startswith(PRESET):
        check_model_folder(source)
    if cfg.tokenizer not in ("", *PRESET_TOKENIZERS):
        return load_tokenizer(cfg.tokenizer, trust_remote_code=cfg.trust_remote_code)
    if not source.startswith(PRESET):
        return load_tokenizer(source, trust_remote_code=cfg.trust_remote_code)
    if cfg.tokenizer == "characters":
        return char_tokenizer()
    words = getattr(task, "words", None)
    if words is None:
        raise UserError("this task has no list of words: set model.tokenizer to 'characters' or a tokenizer's folder")
    return word_tokenizer(words())


def build_policy(
    cfg: ModelConfig,
    source: str,
    tokenizer: Tokenizer,
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.float32,
    report: LoadReport | None = None,
    frozen: bool = False,
) -> PolicyModel:
    """The policy. Master weights are at least float32, whatever the `dtype` of the computation.

    `frozen`: the weights are not trained and have the `dtype` of the computation.
    """
    dtype = dtype if frozen else torch.promote_types(dtype, torch.float32)
    if source.startswith(PRESET):
        name = source.removeprefix(PRESET)
        return build_preset(name, tokenizer.vocab_size, cfg.max_length or PRESET_LENGTH, seed).to(device, dtype)
    return load_model(source, device=device, dtype=dtype, trust_remote_code=cfg.trust_remote_code, report=report)


def set_up_threads(source: str, policy: PolicyModel, dtype: torch.dtype, threads: int, console: Console) -> None:
    """Set the number of CPU threads, and show it with the size of the model. `threads`: as in the settings."""
    parameters, name = policy.parameter_count, str(dtype).removeprefix("torch.")
    set_threads(threads, parameters, policy.device)
    console.note(f"{source}: {count(parameters)} parameters, {name} on {policy.device}, {describe_threads()}")


def activation_bytes(spec: ModelSpec, dtype: torch.dtype, recompute: bool) -> int:
    """Estimated bytes per token that are kept for the backward pass. `recompute`: the setting of [train]."""
    # Per layer: about 10 hidden-sized tensors, attention's, 4 of the MLP.
    numbers = 10 * spec.hidden + 4 * spec.heads * spec.head_dim + 4 * spec.intermediate
    # With recomputation: the inputs of all layers, and everything of one layer at a time.
    kept = spec.layers * spec.hidden + numbers if recompute else spec.layers * numbers
    return kept * (2 if dtype == torch.bfloat16 else 4)


def cpu_token_budget(memory: int, parameters: int, token_bytes: int) -> int:
    """Tokens per micro-batch, a power of two, for a process on a CPU. `token_bytes`: of activations per token.

    Half of the `memory` that weights, gradients, AdamW and the engine leave is for activations, the rest for the KV
    cache and a reference.
    """
    if token_bytes * TOKEN_BUDGET <= SMALL_ACTIVATIONS:
        return TOKEN_BUDGET
    tokens = (memory - 20 * parameters) // 2 // token_bytes
    return max(LEAST_TOKEN_BUDGET, min(TOKEN_BUDGET, 1 << max(tokens, 1).bit_length() - 1))


def choose_token_budget(policy: PolicyModel, dtype: torch.dtype, mesh: Mesh, recompute: bool = False) -> int:
    """The automatic `train.token_budget`, equal on all ranks. Must be called before the policy is sharded.

    The ranks of a host share its memory equally, and the rank with the least memory decides for all.
    """
    if mesh.device.type != "cpu" or not isinstance(policy, Decoder):
        return TOKEN_BUDGET
    mesh.barrier()  # all ranks have loaded their model
    by_rank = mesh.all_gather_objects((socket.gethostname(), free_memory(mesh.device)))
    ranks = Counter(host for host, _ in by_rank)
    shares = [memory // ranks[host] for host, memory in by_rank if memory is not None]
    token_bytes = activation_bytes(policy.spec, dtype, recompute)
    return cpu_token_budget(min(shares), policy.parameter_count, token_bytes) if shares else TOKEN_BUDGET


def prepare_policy(policy: PolicyModel, cfg: LoopConfig, processes: int = 1) -> None:
    """Set up compilation and activation recomputation for training."""
    if not isinstance(policy, Decoder):
        if cfg.activation_checkpointing or cfg.compile == "on":
            raise UserError(
                "train.activation_checkpointing and train.compile are not for models that run through transformers: "
                "remove them"
            )
        return
    policy.recompute = cfg.activation_checkpointing
    if policy.quantized:
        if cfg.compile == "on":
            raise UserError("train.compile does not work with lora.quantize: remove one of them")
        return
    large = policy.parameter_count >= COMPILED
    if cfg.compile == "on" or (cfg.compile == "auto" and large and processes == 1 and uses_triton(policy.device)):
        policy.compile_layers(bridged=processes == 1)


def model_source(cfg: ModelConfig, runs_dir: str) -> str:
    if not cfg.source:
        raise UserError("no model: set model.source, e.g. --model Qwen/Qwen2.5-0.5B-Instruct, a folder, or preset:tiny")
    return resolve_model(cfg.source, Path(runs_dir))


def build_renderer(cfg: PromptConfig, tokenizer: Tokenizer, task: Task | None) -> Renderer:
    return Renderer(tokenizer, style=cfg.style, **prompt_parts(cfg, task))


def prompt_parts(cfg: PromptConfig, task: Task | None) -> dict[str, Any]:
    """Arguments of a renderer: template, system message and few-shot examples."""
    if cfg.system and cfg.system_file:
        raise UserError("prompt.system and prompt.system_file are both set: remove one of them")
    examples: Sequence[tuple[str, str]] = ()
    if cfg.few_shot_file:
        examples = load_few_shot(cfg.few_shot_file, cfg.few_shot or None)
    elif cfg.few_shot and task is not None:
        examples = few_shot_from_prompts(task.prompts("train"), cfg.few_shot)
    system = read_text_file(cfg.system_file) if cfg.system_file else cfg.system or None
    return {"template": cfg.template or None, "system": system, "few_shot": examples}
