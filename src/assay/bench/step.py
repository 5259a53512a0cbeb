"""`assay bench step`: seconds per GRPO step and where they are spent, and tokens per second of training alone.

Uses the components of `assay train`, with random weights and prompts.
"""

from __future__ import annotations

import random
import resource
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from assay.bench import RunProgress, judge_by_hash
from assay.bench.engine import device_settings, dtype_name, free_memory, now, row_id, split_by_tokens, trainer_logprobs
from assay.bench.results import summarize
from assay.bench.workload import Sequences, StepOptions, Workload, command_options, parse_settings
from assay.build.models import build_engine, choose_token_budget, prepare_policy
from assay.build.problems import build_algorithm
from assay.build.run import build_updater, stored_precision
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.engine import BaseEngine
from assay.mesh import Mesh
from assay.models import Lora
from assay.models.base import PolicyModel
from assay.models.device import deterministic, pick_device, pick_dtype, use_expandable_segments
from assay.rewards import JudgePool
from assay.rollout import Collector
from assay.text import Renderer, word_tokenizer
from assay.text.tokenizer import SPECIALS
from assay.training.learner.learner import Learner, freeze_reference
from assay.training.learner.low_memory import lower_precision
from assay.training.learner.pack import rows_of
from assay.training.learner.update import Updater
from assay.training.progress import RunState, Schedule
from assay.training.sources import OnPolicySource, PromptStream
from assay.training.sync import sync_weights
from assay.types import Group, Progress, Prompt, UserError

SAMPLE_S = 0.05


def step_row_id(name: str, options: StepOptions) -> str:
    others = [f"-kl{options.kl:g}"] * (options.kl > 0)
    for key, value in parse_settings(options.set).items():
        others.append(f"-{key.rpartition('.')[2]}{'' if value is True else value}")
    return row_id(name + "".join(others), options.device, options.dtype)


def make_config(options: StepOptions, samples: int = 2, new: int = 1, temperature: float = 1.0) -> TrainConfig:
    """A GRPO run; settings that are not given keep their defaults."""
    cfg = load_settings(TrainConfig, None, {"algo.recipe": "grpo", **parse_settings(options.set)})
    cfg.device = options.device
    dtype = dtype_name(pick_dtype(options.dtype, pick_device(options.device)))
    cfg.dtype = cfg.engine.dtype = dtype  # type: ignore[assignment]
    cfg.train.samples, cfg.sampling.max_new_tokens, cfg.sampling.temperature = samples, new, temperature
    cfg.algo.kl_coef = options.kl
    return cfg


@contextmanager
def configured(
    options: StepOptions, samples: int = 2, new: int = 1, temperature: float = 1.0
) -> Iterator[tuple[TrainConfig, torch.device, DriverMemory]]:
    """The settings, and the device without anything of earlier benchmarks in its memory."""
    device, cfg = pick_device(options.device), make_config(options, samples, new, temperature)
    with deterministic(cfg.train.deterministic, device):
        free_memory(device)
        yield cfg, device, DriverMemory(device)


def make_policy(
    work: Workload | Sequences, cfg: TrainConfig, device: torch.device, progress: Progress | None = None
) -> PolicyModel:
    """The policy as the trainer holds it."""
    use_expandable_segments(device)
    policy = work.float32_model(device, work.seed, progress)
    if cfg.lora.quantize:
        policy.to("cpu").quantize(device)
    if cfg.lora.rank:
        policy.add_lora(Lora(cfg.lora.rank, cfg.lora.alpha, tuple(cfg.lora.targets)), work.seed)
    lower_precision(policy, stored_precision(cfg, Mesh(device), pick_dtype(cfg.dtype, device)))
    free_memory(device)  # of the weights in float32
    return policy


def make_learner(policy: PolicyModel, cfg: TrainConfig, progress: Progress) -> Learner:
    dtype = pick_dtype(cfg.dtype, policy.device)
    prepare_policy(policy, cfg.train, dtype=dtype)
    mesh, recompute = Mesh(policy.device), cfg.train.activation_checkpointing
    cfg.train.token_budget = cfg.train.token_budget or choose_token_budget(policy, dtype, mesh, recompute)
    updater = build_updater(cfg, policy, mesh, dtype, progress)
    return Learner(cfg, build_algorithm(cfg), updater, Schedule(total_steps=sys.maxsize))


@dataclass
class StepBenchmark:
    """A training run without a run directory, and the seconds of its steps. The first step is the warm-up."""

    cfg: TrainConfig
    work: Workload
    options: StepOptions
    source: OnPolicySource
    learner: Learner
    progress: RunProgress
    driver: DriverMemory
    state: RunState = field(default_factory=RunState)
    seconds: list[float] = field(default_factory=list)  # of each step
    parts: list[dict[str, float]] = field(default_factory=list)  # seconds of each part of each step
    memory: dict[str, float | None] | None = None  # measured at the end, unless it was set before

    @property
    def collector(self) -> Collector:
        return self.source.collector

    @property
    def engine(self) -> BaseEngine:
        return self.collector.engine

    @property
    def device(self) -> torch.device:
        return self.learner.policy.device

    def step(self) -> list[Group]:
        """One step of the loop of `assay train`, with the device synchronized between its parts."""
        learner, state, device = self.learner, self.state, self.device
        self.progress.run = len(self.seconds)
        start = now(device)
        sampled = self.source.next(state)
        learner.credit(sampled.groups)
        credited = now(device)
        metrics = learner.update(sampled.groups, state)
        trained = now(device)
        sync_weights(learner.policy, self.engine, version=state.step)
        synced = now(device)
        assert not metrics["optim/skipped"], "an update was skipped"
        assert all(r.length == self.work.new for group in sampled.groups for r in group.rollouts), "a short completion"
        generation = sampled.seconds["generate"]
        reference = self.reference_seconds(sampled.groups) if learner.algo.needs.reference else 0.0
        self.seconds.append(synced - start)
        self.parts.append(
            {
                "generation": generation,
                "scoring": credited - start - generation,
                "reference": reference,
                "training": trained - credited - reference,
                "sync": synced - trained,
            }
        )
        self.trained_tokens = sum(sum(row.trained) for row in rows_of(sampled.groups, learner.algo))
        return sampled.groups

    def reference_seconds(self, groups: list[Group]) -> float:
        """Seconds of the reference's forward passes. They are repeated, because the update interleaves them."""
        reference = self.learner.updater.reference
        assert reference is not None
        pairs = [(r.turns[0].context_ids, r.turns[0].completion) for group in groups for r in group.rollouts]
        dtype = pick_dtype(self.cfg.dtype, self.device)
        start = now(self.device)
        for part in split_by_tokens(pairs):
            trainer_logprobs(reference, part, self.work.temperature, dtype)
        return now(self.device) - start

    def row(self, command: Sequence[str]) -> dict[str, Any]:
        """All results. `parts_s` has the median of each part, so their sum may differ from the median step."""
        return {
            "id": step_row_id(self.work.id.replace("gen-", "step-", 1), self.options),
            "system": "assay",
            **summarize("step_s", "first_step_s", self.seconds, digits=4),
            "trained_tokens": self.trained_tokens,
            **(self.memory or peak_memory(self.device)),
            **self.driver.row(),
            "parts_s": {name: round(median(step[name] for step in self.parts[1:]), 4) for name in self.parts[0]},
            **self.work.settings(),
            **settings_of(self.cfg, self.options, self.learner.updater),
            "command": shlex.join(command),
        }


@contextmanager
def step_benchmark(work: Workload, options: StepOptions, progress: Progress | None = None) -> Iterator[StepBenchmark]:
    """Build engine, judge, source and learner; the judge's processes end with the block."""
    if work.samples < 2:
        raise UserError("GRPO compares the samples of a prompt: --samples must be at least 2")
    if work.temperature <= 0:
        raise UserError(f"--temperature must be above 0 in training, not {work.temperature:g}")
    with configured(options, work.samples, work.new, work.temperature) as (cfg, device, driver):
        policy = make_policy(work, cfg, device, progress)
        work.check_length(policy)
        cfg.engine.max_batch, cfg.train.prompts, cfg.seed = work.batch, work.prompts, work.seed
        renderer = number_renderer(policy.vocab_size)
        engine = build_engine(cfg, policy, renderer, work.max_length)
        shown = RunProgress(progress, options.steps, "step")
        learner = make_learner(policy, cfg, shown)
        if learner.algo.needs.reference:
            with tempfile.TemporaryDirectory(prefix="assay-reference-") as folder:
                freeze_reference(learner.updater, cfg, Path(folder))
        prompts = PromptStream(random_prompts(work, policy.vocab_size, 1 + options.steps), work.seed, shuffle=False)
        with JudgePool(judge_by_hash, cfg.reward.workers, cfg.reward.timeout_s) as judge:
            collector = Collector(engine, renderer, judge, progress=shown)
            source = OnPolicySource(cfg, learner.algo, collector, prompts, learner.schedule)
            yield StepBenchmark(cfg, work, options, source, learner, shown, driver)


def random_prompts(work: Workload, vocab_size: int, steps: int) -> list[Prompt]:
    """Prompts of random words, different in every step."""
    prompts = []
    words = range(len(SPECIALS), vocab_size)
    for step in range(steps):
        rng = random.Random(f"{work.seed}/{step}")
        texts = [" ".join(map(str, rng.choices(words, k=work.prompt_tokens))) for _ in range(work.prompts)]
        prompts += [
            Prompt(f"bench/{step}/{index}", ({"role": "user", "content": text},)) for index, text in enumerate(texts)
        ]
    return prompts


def number_renderer(vocab_size: int) -> Renderer:
    """Each token's word is its number. There are no stop tokens: every completion reaches its length."""
    if vocab_size <= len(SPECIALS):
        raise UserError(f"a vocabulary of {vocab_size} tokens is too small: it must be above {len(SPECIALS)}")
    tokenizer = word_tokenizer([str(token) for token in range(len(SPECIALS), vocab_size)])
    renderer = Renderer(tokenizer, style="raw", template="{question}", add_bos=False, stop=())
    renderer.stop_token_ids = ()
    return renderer


class DriverMemory:
    """The peak of the GPU memory that the driver reports as used, by all processes. It is sampled by a thread: torch
    knows neither the memory of kernels nor that of an engine's KV cache."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak, self.ended = device, 0, threading.Event()
        if device.type == "cuda":
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            free, total = torch.cuda.mem_get_info(self.device)
            self.peak = max(self.peak, total - free)

    def row(self) -> dict[str, float]:
        self.ended.set()
        return {"peak_driver_gib": round(self.peak / 2**30, 3)} if self.peak else {}


def peak_memory(device: torch.device) -> dict[str, float | None]:
    """Peak memory on the GPU, of tensors and reserved by torch; without a GPU, of the process."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {"peak_gib": round(used[0] / 2**30, 3), "peak_reserved_gib": round(used[1] / 2**30, 3)}
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_gib": round(resident / 2**30, 3), "peak_reserved_gib": None}


def settings_of(cfg: TrainConfig, options: StepOptions, updater: Updater) -> dict[str, Any]:
    """Settings at the end: a token budget that did not fit into memory was halved."""
    return {
        "token_budget": updater.token_budget,
        "max_grad_norm": updater.max_grad_norm,
        "precision": cfg.optim.precision,
        "set": list(options.set),
        "kl": options.kl,
        "lr": cfg.optim.lr,
        **device_settings(updater.policy.device, pick_dtype(cfg.dtype, updater.policy.device)),
        "steps": options.steps,
    }


def measure_step(work: Workload, options: StepOptions, progress: Progress | None = None) -> list[dict[str, Any]]:
    with step_benchmark(work, options, progress) as bench:
        for _ in range(1 + options.steps):
            bench.step()
        return [bench.row(["assay", "bench", "step", *command_options(work, options)])]


def measure_training(work: Sequences, options: StepOptions, progress: Progress | None = None) -> list[dict[str, Any]]:
    with configured(options) as (cfg, device, driver):
        policy = make_policy(work, cfg, device, progress)
        if work.tokens > policy.max_length:
            raise UserError(f"--tokens {work.tokens} exceeds the maximum length of {work.label}, {policy.max_length}")
        shown = RunProgress(progress, options.steps)
        learner, state = make_learner(policy, cfg, shown), RunState()
        speeds = []
        for run in range(1 + options.steps):
            group = work.group(policy.vocab_size, run)
            shown.run = run
            start = now(device)
            metrics = learner.update([group], state)
            speeds.append(work.sequences * work.tokens / (now(device) - start))
            assert not metrics["optim/skipped"], "an update was skipped"
        words = ["assay", "bench", "step", "--train-only", *command_options(work, options)]
        row = {
            "id": step_row_id(work.id, options),
            "system": "assay",
            **summarize("tokens_per_s", "first_run_tokens_per_s", speeds, digits=1),
            **peak_memory(device),
            **driver.row(),
            "trained_tokens": work.sequences * (work.tokens - 1),
            **asdict(work),
            "shape": None if work.model else work.shape,
            **settings_of(cfg, options, learner.updater),
            "command": shlex.join(words),
        }
        return [row]
