"""The components of a training run, as `assay train` builds them, with random weights and prompts."""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from typing import Any

import torch

from assay.bench.chance import judge_by_chance
from assay.bench.engine import Options, dtype_name, named
from assay.bench.workload import Workload
from assay.config import TrainConfig
from assay.engine import Engine
from assay.models.base import PolicyModel
from assay.models.device import pick_device, pick_dtype
from assay.rewards import JudgePool
from assay.rollout import Collector
from assay.text import Renderer, word_tokenizer
from assay.text.tokenizer import SPECIALS
from assay.train import components
from assay.train.learner.learner import Learner
from assay.train.learner.optim import make_adamw
from assay.train.learner.update import Updater
from assay.train.sources import OnPolicySource, PromptStream
from assay.train.state import RunState, Schedule
from assay.types import Prompt, UserError, unknown_name

OWN_OPTIONS = ("temperature", "dtype")  # of the updater, but options of the command by themselves


@dataclass(frozen=True)
class StepOptions:
    """How to measure a step or its training alone, beside what."""

    device: str = "auto"
    dtype: str = "auto"  # of the engine, and of the computation in training; master weights are float32
    steps: int = 3  # timed, after one that is reported apart
    kl: float = 0.0  # above 0: a reference model takes part
    peer: str | None = None  # "trl"
    set: tuple[str, ...] = ()  # NAME=VALUE, each a setting of the updater

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"--steps must be at least 1, not {self.steps}")
        if not 0 <= self.kl < float("inf"):
            raise UserError(f"--kl must be 0 (no reference) or more, not {self.kl}")
        parse_settings(self.set)


def updater_fields() -> dict[str, Field]:
    """Settings of the updater that a benchmark may change: plain values, whatever their number."""
    plain = [field for field in fields(Updater) if isinstance(field.default, bool | int | float | str)]
    return {field.name: field for field in plain if field.name not in OWN_OPTIONS}


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    known, settings = updater_fields(), {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in known:
            raise unknown_name("setting", name, known, where="in --set")
        kind: Any = type(known[name].default)
        try:
            settings[name] = {"true": True, "false": False}[text] if kind is bool else kind(text)
        except (KeyError, ValueError):
            raise UserError(f"--set {word}: {name} takes a value such as {str(known[name].default).lower()}") from None
    return settings


def row_id(work_id: str, options: StepOptions) -> str:
    known = updater_fields()
    others = [f"-kl{options.kl:g}"] * (options.kl > 0)
    settings = parse_settings(options.set).items()
    others += [f"-{name}{value}" for name, value in settings if value != known[name].default]
    return named(work_id + "".join(others), Options(device=options.device, dtype=options.dtype))


def config(options: StepOptions, samples: int = 2, new: int = 1, temperature: float = 1.0) -> TrainConfig:
    """A GRPO run; settings that are not given keep their defaults."""
    device = pick_device(options.device)
    cfg = TrainConfig(device=options.device)
    cfg.dtype = cfg.engine.dtype = dtype_name(pick_dtype(options.dtype, device))  # type: ignore[assignment]
    cfg.train.samples, cfg.sampling.max_new_tokens, cfg.sampling.temperature = samples, new, temperature
    cfg.algo.recipe, cfg.algo.kl_coef = "grpo", options.kl
    return cfg


def make_updater(policy: PolicyModel, cfg: TrainConfig, options: StepOptions) -> Updater:
    o = cfg.optim
    components.prepare_policy(policy, cfg.train)
    settings = {"max_grad_norm": o.max_grad_norm, "token_budget": cfg.train.token_budget} | parse_settings(options.set)
    return Updater(
        policy,
        make_adamw(policy, o.lr, o.betas, o.eps, o.weight_decay),
        temperature=cfg.sampling.temperature,
        dtype=pick_dtype(cfg.dtype, policy.device),
        **settings,
    )


def make_learner(policy: PolicyModel, cfg: TrainConfig, options: StepOptions) -> Learner:
    algo, updater = components.build_algorithm(cfg), make_updater(policy, cfg, options)
    return Learner(cfg, algo, updater, Schedule(total_steps=sys.maxsize))


@dataclass
class BenchedRun:
    """The components that a step of training needs, without a run directory."""

    cfg: TrainConfig
    work: Workload
    source: OnPolicySource
    learner: Learner
    state: RunState = field(default_factory=RunState)

    @property
    def collector(self) -> Collector:
        return self.source.collector

    @property
    def engine(self) -> Engine:
        return self.collector.engine

    @property
    def device(self) -> torch.device:
        return self.learner.policy.device


@contextmanager
def benched_run(policy: PolicyModel, work: Workload, options: StepOptions) -> Iterator[BenchedRun]:
    """Build engine, judge, source and learner; the judge's processes end with the block."""
    cfg = config(options, work.samples, work.new, work.temperature)
    cfg.engine.max_batch, cfg.train.prompts, cfg.seed = work.batch, work.prompts, work.seed
    renderer = numbers_renderer(policy.vocab_size)
    engine = components.build_engine(cfg.engine, policy, renderer, work.max_length)
    learner = make_learner(policy, cfg, options)
    prompts = PromptStream(random_prompts(work, policy.vocab_size, 1 + options.steps), work.seed, shuffle=False)
    with JudgePool(judge_by_chance, cfg.reward.workers, cfg.reward.timeout_s) as judge:
        source = OnPolicySource(cfg, learner.algo, Collector(engine, renderer, judge), prompts, learner.schedule)
        yield BenchedRun(cfg, work, source, learner)


def random_prompts(work: Workload, vocab_size: int, steps: int) -> list[Prompt]:
    """Prompts of random words; every step has its own."""
    prompts = []
    words = range(len(SPECIALS), vocab_size)
    for step in range(steps):
        rng = random.Random(f"{work.seed}/{step}")
        texts = [" ".join(map(str, rng.choices(words, k=work.prompt_tokens))) for _ in range(work.prompts)]
        prompts += [
            Prompt(f"bench/{step}/{index}", ({"role": "user", "content": text},)) for index, text in enumerate(texts)
        ]
    return prompts


def numbers_renderer(vocab_size: int) -> Renderer:
    """The word for a token is its number. Nothing ends an answer: every one reaches its length."""
    if vocab_size <= len(SPECIALS):
        raise UserError(f"a vocabulary of {vocab_size} tokens is too small: it has to be above {len(SPECIALS)}")
    tokenizer = word_tokenizer([str(token) for token in range(len(SPECIALS), vocab_size)])
    renderer = Renderer(tokenizer, style="raw", template="{question}", add_bos=False, stop=())
    renderer.stop_token_ids = ()
    return renderer


def peaks(device: torch.device) -> dict[str, float | None]:
    """Memory on the GPU: of tensors, and taken by torch's allocator. Elsewhere: of the process, so far."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {"peak_gib": round(used[0] / 2**30, 3), "peak_reserved_gib": round(used[1] / 2**30, 3)}
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_gib": round(resident / 2**30, 3), "peak_reserved_gib": None}


def settings_of(cfg: TrainConfig, options: StepOptions, updater: Updater) -> dict[str, Any]:
    """As they were at the end: a token budget that did not fit into memory was halved."""
    return {
        **{name: getattr(updater, name) for name in updater_fields()},
        "kl": options.kl,
        "lr": cfg.optim.lr,
        "device": updater.policy.device.type,
        "dtype": cfg.dtype,
        "threads": torch.get_num_threads(),
        "steps": options.steps,
    }
