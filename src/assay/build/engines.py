"""Settings -> engine and collector; for evaluation, chat and server also the model that the engine serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from assay.build.policy import (
    build_renderer,
    build_tokenizer,
    prompt_parts,
    set_up_threads,
)
from assay.checks.run_rules import PRESET, unused_tokenizer
from assay.config import (
    EngineConfig,
    EnvConfig,
    MeasureConfig,
    RemoteEngineConfig,
    ServeConfig,
    TrainConfig,
)
from assay.engine.base import BaseEngine, Engine
from assay.engine.remote.launch import with_engine_nodes
from assay.envs import Env
from assay.integrations.openai import OpenAIEngine
from assay.mesh import Mesh
from assay.models import PolicyModel, load_model, pick_device, pick_dtype
from assay.models.load import empty_model, has_weights
from assay.rewards.importing import load_object
from assay.rollout import Collector, Limits
from assay.runs.console import Console
from assay.runs.resolve import load_resolved
from assay.tasks import Task
from assay.tasks.judging import build_judge_pool
from assay.text import Renderer
from assay.text.render import MessageRenderer
from assay.training.progress import Stopping
from assay.types import Progress, UserError, describe_error

ENDPOINT = "openai"  # the engine without weights


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
    """`group`: ranks that serve the policy together, `mesh.tp_group`. `device`: that of the policy unless given.

    `notify`: see `EngineOptions`.
    """
    from assay.engine import make_engine

    device, engine = device or policy.device, cfg.engine
    options = {"max_batch", "kv_cache_gib", "prefill_tokens", "sleep_while_training", "kv_on_update"}
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
    if cfg.engine.name not in ("assay", "vllm", "sglang"):
        return {}
    if isinstance(cfg, ServeConfig):
        raise UserError("assay serve has its own engine: set engine.name to auto, native or hf")
    sections: dict[str, RemoteEngineConfig] = {"assay": cfg.server, "vllm": cfg.vllm, "sglang": cfg.sglang}
    return {"settings": with_engine_nodes(sections[cfg.engine.name]), "save_tokenizer": renderer.tokenizer.save}


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
            advice = "derive its class from assay.engine.Engine (docs/extending.md)"
            raise UserError(f"{path} returned no engine: it lacks {', '.join(missing)}; {advice}")
        return engine

    return build


def connect_endpoint(
    model: str, cfg: MeasureConfig | ServeConfig, task: Task | None
) -> tuple[MessageRenderer, OpenAIEngine]:
    """Renderer and engine for a model behind an endpoint. Neither weights nor a tokenizer are loaded."""
    if isinstance(cfg, ServeConfig):
        raise UserError("assay serve has its own engine: set engine.name to auto, native or hf")
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
    if cfg.engine.name == ENDPOINT:
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
