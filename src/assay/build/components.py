"""Config sections -> components that training, evaluation and chat share: task, judge, tokenizer, model, engine."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from assay.algos import Algorithm, make_algorithm
from assay.checks.run_rules import PRESET, PRESET_TOKENIZERS, unused_tokenizer
from assay.config import (
    AlgoConfig,
    EngineConfig,
    EnvConfig,
    LoopConfig,
    MeasureConfig,
    ModelConfig,
    PromptConfig,
    RemoteEngineConfig,
    ServeConfig,
    TaskConfig,
    TrainConfig,
)
from assay.engine.base import BaseEngine, Engine
from assay.engine.remote.nodes import with_engine_nodes
from assay.envs import Env, TaskEnv, make_env
from assay.integrations.openai import OpenAIEngine
from assay.mesh import Mesh
from assay.models import Decoder, ModelSpec, PolicyModel, build_preset, load_model, pick_device, pick_dtype
from assay.models.base import LoadReport
from assay.models.device import describe_threads, free_memory, set_threads, uses_triton
from assay.models.load import check_model_folder, empty_model, has_weights
from assay.rewards.importing import load_object, normalized
from assay.rollout import Collector, Limits
from assay.runs.console import Console, count
from assay.runs.resolve import load_resolved, resolve_model
from assay.tasks import Task, make_task
from assay.tasks.base import UNLIMITED, FilteredPrompts, LazyPrompts
from assay.tasks.judging import build_judge_pool
from assay.tasks.mix import MixedPrompts
from assay.text import Renderer, Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer
from assay.text.message_renderer import MessageRenderer
from assay.text.render import few_shot_from_prompts, load_few_shot, read_text_file
from assay.training.progress import Stopping
from assay.types import Progress, Prompt, UserError, describe_error, plural

PRESET_LENGTH = 512
ENDPOINT = "openai"  # the engine without weights
COMPILED = 100_000_000  # number of parameters from which compilation pays off within a few steps
TOKEN_BUDGET, LEAST_TOKEN_BUDGET = 2**14, 2**9  # default of train.token_budget, and the least one chosen for a CPU
SMALL_ACTIVATIONS = 2**31  # bytes; a model that needs less per micro-batch is trained alike on all machines


def build_task(cfg: TaskConfig, **changes: object) -> Task:
    if not cfg.name:
        raise UserError(
            "no task: set task.name to gsm8k, math, countdown, abacus, code, jsonl, or your own, e.g. --task gsm8k"
        )
    return make_task(cfg.name, cfg.path or None, **{**cfg.args, **changes})


def build_problems(task: TaskConfig, env: EnvConfig) -> Task:
    """The task, or the environment if there is one. Both provide prompts."""
    if not env.name:
        return build_task(task)
    made = make_env(env.name, env.path or None, build_task(task) if task.name else None, **env.args)
    if isinstance(made, TaskEnv):
        made.defer_judging = True
    return made


def build_demonstrations(cfg: TrainConfig, renderer: Renderer, console: Console) -> Sequence[Prompt]:
    """Problems with the worked solutions that the warm start trains on."""
    if not cfg.sft.steps:
        return ()
    if cfg.env.name and not cfg.task.name:
        return gold_episodes(make_env(cfg.env.name, cfg.env.path or None, **{**cfg.env.args, **cfg.sft.args}))
    prompts = build_task(cfg.task, **cfg.sft.args).prompts("train")
    return select_prompts(prompts, cfg, renderer, console, "prompts of the warm start")


def gold_episodes(env: Env) -> Sequence[Prompt]:
    """Train prompts of an environment with worked episodes."""
    prompts = env.prompts("train")
    if not env.gold_episode(prompts[0]):
        raise UserError(
            f"the environment {env.name} has no worked episodes: define gold_action(), or set sft.steps = 0"
        )
    return LazyPrompts(lambda index: replace(prompts[index], episode=env.gold_episode(prompts[index])), len(prompts))


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


def take(prompts: Sequence[Prompt], count: int, split: str, endless: bool = False) -> Sequence[Prompt]:
    """The first `count` prompts (0: all). `endless`: whether a split without an end is allowed."""
    if not len(prompts):
        raise UserError(f"the {split} split is empty: check task.path")
    if not count and not endless and len(prompts) >= UNLIMITED:
        raise UserError(
            f"the {split} split is generated and endless: "
            "set the number of problems to use (eval.examples, eval.final_examples)"
        )
    return prompts[:count] if count else prompts


def select_prompts(
    prompts: Sequence[Prompt], cfg: TrainConfig, renderer: Renderer, console: Console, what: str = "train prompts"
) -> Sequence[Prompt]:
    """The prompts to train on: without few-shot examples of the train split, and without prompts that are too long."""
    if cfg.prompt.few_shot and not cfg.prompt.few_shot_file:
        prompts = drop_examples(prompts, renderer, console, what)
    return drop_long_prompts(prompts, renderer, cfg.train.max_prompt_tokens, console, what)


def drop_examples(prompts: Sequence[Prompt], renderer: Renderer, console: Console, what: str) -> Sequence[Prompt]:
    """The prompts without the few-shot examples, which would be asked together with their own solution."""
    shown = {question for question, _ in renderer.few_shot}

    def others(own: Sequence[Prompt]) -> Sequence[Prompt]:
        if len(own) >= UNLIMITED:
            filtered = FilteredPrompts(own, lambda prompt: prompt.question not in shown, "prompt.few_shot: lower it")
            return LazyPrompts(filtered.__getitem__, len(own))  # whose `rejected` counts long prompts only
        kept = [prompt for prompt in own if prompt.question not in shown]
        if not kept:
            raise UserError(f"all {len(own):,} {what} are few-shot examples: lower prompt.few_shot")
        return kept

    console.note(f"left the {plural(len(shown), 'few-shot example')} out of the {what} (prompt.few_shot)")
    return prompts.filtered(others) if isinstance(prompts, MixedPrompts) else others(prompts)


def drop_long_prompts(
    prompts: Sequence[Prompt], renderer: Renderer, limit: int, console: Console, what: str
) -> Sequence[Prompt]:
    """The prompts with at most `limit` tokens (0: all of them); reports how many are dropped.

    Of an endless split, longer prompts are replaced when they are drawn.
    """
    if not limit:
        return prompts
    if isinstance(prompts, MixedPrompts):
        return prompts.filtered(lambda own: drop_long_prompts(own, renderer, limit, console, what))
    if len(prompts) >= UNLIMITED:
        rule = f"train.max_prompt_tokens = {limit}: raise it, or generate shorter problems (task.args)"
        return FilteredPrompts(prompts, lambda prompt: len(renderer.prompt_ids(prompt)) <= limit, rule)
    given = list(prompts)
    kept = [prompt for prompt, ids in zip(given, renderer.all_prompt_ids(given), strict=True) if len(ids) <= limit]
    if not kept:
        raise UserError(f"all {len(given):,} {what} have more than train.max_prompt_tokens = {limit} tokens")
    if dropped := len(given) - len(kept):
        console.note(
            f"dropped {dropped:,} of {len(given):,} {what} with more than {limit} tokens (train.max_prompt_tokens)"
        )
    return kept


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


@contextmanager
def loading(source: str, console: Console) -> Iterator[LoadReport]:
    """Show on the console that a model is loaded; yields the `report` of `load_model`."""
    what = f"loading {source}"
    console.announce(what)
    try:
        yield partial(console.progress, what)
    finally:
        console.end_operation()


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


def build_algorithm(cfg: TrainConfig) -> Algorithm:
    """The recipe with the user's changes. Code that settings name by path is imported."""
    own = cfg.algo.model_fields_set - {"recipe"}
    changes = {name: with_absolute_paths(getattr(cfg.algo, name)) for name in own}
    algo = make_algorithm(
        cfg.algo.recipe,
        max_new_tokens=cfg.sampling.max_new_tokens,
        critic_settings=cfg.critic,
        load=load_object,
        **changes,
    )
    algo.check_samples(cfg.train.samples)
    if cfg.replay.groups:
        algo.check_replay()
    if cfg.source.name == "async" and cfg.source.max_staleness:
        algo.check_staleness()
    return algo


def with_absolute_paths(value: Any) -> Any:
    """The setting, with paths of code that are valid in every working directory."""
    if isinstance(value, list):
        return [with_absolute_paths(one) for one in value]
    return normalized(value) if isinstance(value, str) else value


def reference_is_dynamic(cfg: AlgoConfig) -> bool:
    """Whether the reference model changes during a run."""
    return cfg.refresh_reference > 0 or cfg.reference_ema > 0


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

    with loading(model, console) as report:
        renderer, policy = load_resolved(model, Path(cfg.runs_dir), load)
    set_up_threads(model, policy, dtype, cfg.threads, console)
    return renderer, build_engine(cfg, policy, renderer, cfg.model.max_length)
