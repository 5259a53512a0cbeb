"""Settings -> tokenizer, renderer and model, and the engine and collector that serve the model.

Also the size of micro-batches that fits into memory, and checks of what an engine can serve.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from assay.build.problems import READ, first_prompts
from assay.checks.settings import PRESET, PRESET_TOKENIZERS, SERVER_SECTIONS, unused_tokenizer
from assay.config import (
    EngineConfig,
    EnvConfig,
    LoopConfig,
    MeasureConfig,
    ModelConfig,
    PromptConfig,
    ServeConfig,
    TrainConfig,
)
from assay.engine.base import BaseEngine, Engine
from assay.engine.remote.launch import with_engine_nodes
from assay.envs import Env
from assay.integrations.openai import OpenAIEngine
from assay.mesh import Mesh
from assay.models import Decoder, ModelSpec, PolicyModel, build_preset, load_model, pick_device, pick_dtype
from assay.models.base import LoadReport
from assay.models.device import describe_threads, free_memory, is_deterministic, set_threads, uses_triton
from assay.models.load import check_model_folder, empty_model, has_weights
from assay.rewards.functions import load_object
from assay.rollout import Collector, Limits
from assay.rollout.episodes import check_history
from assay.runs.console import Console, count
from assay.runs.resolve import load_resolved, resolve_model
from assay.tasks import Task
from assay.tasks.registry import build_judge_pool
from assay.text import Renderer, Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer
from assay.text.render import MessageRenderer, few_shot_from_prompts, load_few_shot, read_text_file
from assay.training.progress import Stopping
from assay.training.sync import Method
from assay.types import Progress, Prompt, UserError, describe_error

MAX_GENERATED = 64  # prompts per generated split whose length is checked
ENDPOINT = "openai"  # the engine without weights
PRESET_LENGTH = 512
COMPILED = 100_000_000  # number of parameters from which compilation pays off within a few steps
TOKEN_BUDGET, LEAST_TOKEN_BUDGET = 2**14, 2**9  # default of train.token_budget, and the least one chosen for a CPU
WARM_UP_VARIANTS = 64  # of the code of a function, at most
WARM_UP_TOKENS = 4096  # of the first call of compiled code, if it must be repeatable
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


def activation_bytes(spec: ModelSpec, dtype: torch.dtype, recompute: bool, compiled: bool = False) -> int:
    """Estimated bytes per token that are kept for the backward pass. `recompute`: the setting of [train]."""
    # Per layer: tensors of the hidden size, of attention and of the MLP. Compiled layers keep fewer.
    hidden, attention, mlp = (7, 3, 3) if compiled and not recompute else (10, 4, 4)
    numbers = hidden * spec.hidden + attention * spec.heads * spec.head_dim + mlp * spec.intermediate
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


def choose_token_budget(policy: PolicyModel, dtype: torch.dtype, mesh: Mesh, recompute: bool | str = False) -> int:
    """The automatic `train.token_budget`, equal on all ranks. Must be called before the policy is sharded.

    The ranks of a host share its memory equally, and the rank with the least memory decides for all.
    """
    if mesh.device.type != "cpu" or not isinstance(policy, Decoder):
        return TOKEN_BUDGET
    mesh.barrier()  # all ranks have loaded their model
    by_rank = mesh.all_gather_objects((socket.gethostname(), free_memory(mesh.device)))
    ranks = Counter(host for host, _ in by_rank)
    shares = [memory // ranks[host] for host, memory in by_rank if memory is not None]
    token_bytes = activation_bytes(policy.spec, dtype, recompute in (True, "offload"))
    tokens = cpu_token_budget(min(shares), policy.parameter_count, token_bytes) if shares else TOKEN_BUDGET
    if tokens < TOKEN_BUDGET and is_deterministic():
        raise UserError(
            "with train.deterministic = true, the size of micro-batches must not depend on free memory: set "
            f"train.token_budget, e.g. to {tokens}"
        )
    return tokens


def prepare_policy(
    policy: PolicyModel, cfg: LoopConfig, processes: int = 1, dtype: torch.dtype = torch.float32
) -> None:
    """Set up compilation and activation recomputation for training. `dtype`: of the computation."""
    if not isinstance(policy, Decoder):
        if cfg.activation_checkpointing or cfg.compile == "on":
            raise UserError(
                "train.activation_checkpointing and train.compile are not for models that run through transformers: "
                "remove them"
            )
        return
    policy.recompute = cfg.activation_checkpointing in (True, "offload")
    policy.offload = cfg.activation_checkpointing == "offload"
    partial = cfg.activation_checkpointing == "partial"
    if policy.quantized:
        if cfg.compile == "on" or partial:
            raise UserError(
                "lora.quantize works neither with train.compile nor with train.activation_checkpointing = 'partial': "
                "remove one of them"
            )
        return
    large = policy.parameter_count >= COMPILED
    if cfg.compile == "on" or (cfg.compile == "auto" and large and processes == 1 and uses_triton(policy.device)):
        policy.compile_layers(processes == 1, partial)
        if is_deterministic():
            warm_up(policy, dtype)
    elif partial:
        raise UserError(
            "train.activation_checkpointing = 'partial' needs compiled layers: set train.compile = 'on', or set it to "
            "true or false"
        )


def warm_up(policy: Decoder, dtype: torch.dtype) -> None:
    """Compile the layers for all that training calls, with the same numbers of tokens in every run.

    Compiled code works for any number of tokens, but the compiler chooses the kernels for that of the first call, which
    a resumed run does not have in common with the run. The cache on the disk does not distinguish such numbers either.
    """
    ids = torch.zeros(WARM_UP_TOKENS, dtype=torch.int64, device=policy.device)
    quarter = WARM_UP_TOKENS // 4
    layouts: list[tuple[list[int], list[int] | None]] = [
        ([quarter] * 4, None),
        ([WARM_UP_TOKENS], None),
        ([quarter] * 4, [0, *[quarter // 2] * 3]),  # they begin alike
    ]
    from torch._dynamo import config  # takes a second

    computing = torch.autocast(policy.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
    with computing, config.patch(recompile_limit=WARM_UP_VARIANTS):
        for lengths, shared in layouts:
            policy.hidden(ids, lengths, shared).sum().backward()
            with torch.no_grad():
                policy.hidden(ids, lengths, shared)
                with policy.adapters_off():  # as the reference
                    policy.hidden(ids, lengths, shared)
    policy.zero_grad(set_to_none=True)
    policy.stop_compiling()


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


def build_collector(
    cfg: TrainConfig | MeasureConfig,
    task: Task,
    engine: BaseEngine,
    renderer: Renderer,
    mesh: Mesh | None = None,
    stopper: Stopping | None = None,
    progress: Progress | None = None,
) -> Collector:
    """The collector of rollouts: the engine, the judge and, if there is one, the environment."""
    judge = build_judge_pool(cfg.reward, task, cfg.judge)
    env = task if isinstance(task, Env) else None
    if cfg.env.max_seconds and mesh and mesh.tp_size > 1:
        raise UserError("env.max_seconds cannot be combined with parallel.tp: ranks of one model would time out apart")
    keep = cfg.engine.name == ENDPOINT  # answers cost money, and one of many requests may fail
    return Collector(
        engine,
        renderer,
        judge,
        mesh or Mesh(),
        stopper,
        env,
        episode_limits(cfg.env),
        progress=progress,
        keep_failures=keep,
    )


def episode_limits(cfg: EnvConfig) -> Limits:
    return Limits(cfg.max_steps, cfg.max_tokens, cfg.max_seconds)


def build_engine(
    cfg: TrainConfig | MeasureConfig | ServeConfig,
    policy: PolicyModel,
    renderer: Renderer,
    max_length: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    notify: Callable[[str], None] | None = None,
) -> BaseEngine:
    """`group`: ranks that serve the policy together, `mesh.tp_group`. `device`: default: the policy's device.

    `notify`: see `EngineOptions`.
    """
    from assay.engine import make_engine

    device, engine = device or policy.device, cfg.engine
    options = {"max_batch", "prefill_tokens", "sleep_while_training", "quantize"}
    options |= {"kv_cache_gib", "kv_cache_dtype", "kv_on_update"}
    return make_engine(
        custom_backend(engine.name) if is_custom_backend(engine) else engine.name,
        policy,
        backend_settings(cfg, renderer),
        device=device,
        dtype=pick_dtype(engine.dtype, device),
        **engine.model_dump(include=options),
        max_length=min(max_length or policy.max_length, policy.max_length),
        decode=renderer.decode,
        group=group,
        notify=notify,
    )


def backend_settings(cfg: TrainConfig | MeasureConfig | ServeConfig, renderer: Renderer) -> dict[str, Any]:
    """Arguments that only the chosen backend has: its section of the settings."""
    if cfg.engine.name not in SERVER_SECTIONS:
        return {}
    section = getattr(cfg, SERVER_SECTIONS[cfg.engine.name])
    return {"settings": with_engine_nodes(section), "save_tokenizer": renderer.tokenizer.save}


def is_custom_backend(cfg: EngineConfig) -> bool:
    """Whether the settings name a function of the user that makes an engine, as file.py:function."""
    return ":" in cfg.name


def custom_backend(path: str) -> Callable[..., Engine]:
    """The user's function that makes an engine. Its errors, and results that lack methods of `Engine`, are reported
    in one line.
    """
    make = load_object(path)
    if not callable(make):
        raise UserError(f"{path} must be a function that returns an engine; it is {make!r:.80}")

    def build(model: PolicyModel, **options: Any) -> Engine:
        try:
            engine = make(model, **options)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{path} failed to make an engine: {describe_error(error)}") from error
        names = [name for name in ("info", *vars(BaseEngine), *vars(Engine)) if not name.startswith("_")]
        if missing := [name for name in names if not hasattr(engine, name)]:
            advice = "derive its class from assay.engine.Engine (docs/reference/backends.md)"
            raise UserError(f"{path} returned no engine: it lacks {', '.join(missing)}; {advice}")
        return engine

    return build


def connect_endpoint(model: str, cfg: MeasureConfig, task: Task | None) -> tuple[MessageRenderer, OpenAIEngine]:
    """Renderer and engine for a model behind an endpoint. Neither weights nor a tokenizer are loaded."""
    style: Literal["chat", "raw"] = "chat" if cfg.openai.api == "chat" else "raw"
    if cfg.prompt.style not in ("auto", style):
        api = "completions" if style == "chat" else "chat"
        raise UserError(f'prompt.style = "{cfg.prompt.style}" needs openai.api = "{api}"')
    renderer = MessageRenderer(style=style, **prompt_parts(cfg.prompt, task))
    return renderer, OpenAIEngine(model, cfg.openai)


def build_server(
    model: str, cfg: MeasureConfig | ServeConfig, task: Task | None, console: Console, any_style: bool = False
) -> tuple[Renderer, BaseEngine]:
    """Renderer and engine for a trained model, in the dtype of the engine and without training state.

    The console shows the progress of loading, and then a line that describes the model. `any_style`: a model without
    a chat template gets a renderer in raw style, unless the settings name a style.
    """
    if isinstance(cfg, ServeConfig):
        if cfg.engine.name in (*SERVER_SECTIONS, ENDPOINT):
            raise UserError("assay serve has its own engine: set engine.name to auto, native or hf")
    elif cfg.engine.name == ENDPOINT:
        return connect_endpoint(model, cfg, task)
    if model.startswith(PRESET):
        raise UserError(f"{model} is untrained: give a checkpoint (run:NAME@last), a folder, a hub id or a GGUF file")
    settings = cfg.model.model_copy(update={"source": model})
    for problem in unused_tokenizer(settings):
        console.warn(str(problem))
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.engine.dtype, device)

    def load(source: str) -> tuple[Renderer, PolicyModel]:
        tokenizer, prompt = build_tokenizer(settings, source, task), cfg.prompt
        if any_style and prompt.style == "auto" and not tokenizer.has_chat_template:
            prompt = prompt.model_copy(update={"style": "raw"})
        renderer = build_renderer(prompt, tokenizer, task)
        updatable = isinstance(cfg, ServeConfig) and cfg.http.allow_updates
        if updatable and not has_weights(Path(source)) and (empty := empty_model(Path(source), device, dtype)):
            return renderer, empty  # a trainer will send the weights
        trust = settings.trust_remote_code
        return renderer, load_model(source, device=device, dtype=dtype, trust_remote_code=trust, report=report)

    with console.loading(model) as report:
        renderer, policy = load_resolved(model, Path(cfg.runs_dir), load)
    set_up_threads(model, policy, dtype, cfg.threads, console)
    return renderer, build_engine(cfg, policy, renderer, cfg.model.max_length)


def check_collector(
    cfg: TrainConfig,
    collector: Collector,
    train: Sequence[Prompt],
    evaluations: Mapping[str, Sequence[Prompt]],
    policy: PolicyModel,
    console: Console,
) -> None:
    """Check the environment and the lengths of prompts."""
    if collector.env and (warning := check_history(collector.renderer, collector.env, train[0])):
        console.warn(warning)
    context = min(cfg.model.max_length or policy.max_length, policy.max_length)
    splits = (train, *evaluations.values())
    new_tokens = cfg.sampling.max_new_tokens
    if longest := max(check_prompt_lengths(collector, prompts, new_tokens, context) for prompts in splits):
        console.warn(
            f"engine.kv_cache_gib holds keys and values of {collector.engine.info.max_length - 1} tokens, and prompts "
            f"have up to {longest}: longer answers are cut off; raise engine.kv_cache_gib, or lower "
            "sampling.max_new_tokens"
        )


def check_prompt_lengths(collector: Collector, prompts: Sequence[Prompt], new_tokens: int, context: int) -> int:
    """Raise if a prompt fills the context; of a generated split, the first few are checked.

    Returns the length of the longest prompt if answers are limited by the engine's memory, not by the context; else 0.
    """
    checked = first_prompts(prompts, READ, MAX_GENERATED)
    ids = collector.renderer.all_prompt_ids(checked)
    collector.check_lengths(checked, ids)
    longest, limit = max(map(len, ids)), collector.engine.info.max_length
    return longest if limit < context and longest + new_tokens > limit else 0


def check_capabilities(cfg: TrainConfig, engine: BaseEngine, trains: bool, verify: Method, console: Console) -> None:
    """Refuse an engine that cannot serve this run, and warn of everything that degrades.

    `trains`: not only SFT. `verify`: how weight syncs are verified.
    """
    has, name = engine.info.capabilities, cfg.engine.name
    if trains and not has.temperature_logprobs:
        raise UserError(
            f"engine {name} does not report log-probabilities at the sampling temperature (temperature_logprobs), "
            "which training needs: set engine.name to auto, or to an engine that does"
        )
    if trains and cfg.sampling.truncates and not has.truncated_logprobs:
        raise UserError(
            f"engine {name} reports log-probabilities after truncation (truncated_logprobs), which training cannot "
            "use: switch off sampling.top_k, top_p, min_p and min_new_tokens, or set engine.name to auto"
        )
    if cfg.source.name == "async" and cfg.source.max_staleness and not has.inflight_updates:
        raise UserError(
            f"engine {name} cannot update weights while it generates (inflight_updates), which asynchronous training "
            "needs: set source.max_staleness = 0, or engine.name to native, assay, vllm or sglang"
        )
    if cfg.train.deterministic and not has.exact_seeds:
        raise UserError(
            f"engine {name} has no exact seeds (exact_seeds), which train.deterministic = true needs: set engine.name "
            "to auto, or leave out train.deterministic"
        )
    if not has.exact_seeds:
        console.warn(
            f"engine {name} has no exact seeds (exact_seeds): the same seed may give different tokens, and a resumed "
            "run does not repeat what it had sampled"
        )
    if verify == "off" and cfg.engine.verify != "off":
        console.warn(
            f"engine {name} has neither a fingerprint of its weights (fingerprint) nor scores (score): weights are not "
            "verified after a sync"
        )
    if verify == "probe" and cfg.engine.verify == "auto":
        console.note(f"engine {name} has no fingerprint of its weights: probe sequences verify every weight sync")
    for metric in ("entropy", "kept_mass"):
        if trains and not getattr(has, metric):
            console.warn(f"engine {name} does not report {metric}: the metric sampling/{metric} is left out")
