"""`assay bench episodes`: engine steps for episodes whose actions differ in length.

Each episode continues as soon as its own action is finished ("own-pace"), or all wait for the longest ("rounds").
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from assay.bench import RunProgress
from assay.bench.engine import device_settings, now, row_id
from assay.bench.results import summarize
from assay.bench.workload import NANO, SHAPES, EpisodeOptions, Episodes, command_options, random_model
from assay.engine import EngineInfo, Event, SamplingParams, make_engine
from assay.envs import Env
from assay.models import PolicyModel, build_preset
from assay.models.device import pick_device, pick_dtype
from assay.rewards import JudgePool
from assay.rollout import Collector, Limits
from assay.text import Renderer, char_tokenizer
from assay.types import Progress, Rollout

MODES = ("rounds", "own-pace")
MAX_LENGTH = 1024  # tokens per episode
WEIGHTS_SEED = 3


class Chatter(Env):
    """Answers every action with "go on". Nine letters are stop strings, so that random actions differ in length."""

    name = "chatter"
    max_steps = 8
    stop = tuple("adgjmpsvy")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.seed = 0, seed or 0
        return f"begin {seed}", {}

    def step(self, action: str) -> Any:
        self.steps += 1
        return "go on", 0.1, self.steps > self.seed % self.max_steps, False, {}


class Rounds:
    """An engine in lockstep: `step` returns when all requests have finished."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.add, self.abort, self.release = engine, engine.add, engine.abort, engine.release

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def step(self, wait: bool = True) -> list[Event]:
        events: list[Event] = []
        while new := self.engine.step():
            events += new
        return events


def measure_episodes(work: Episodes, options: EpisodeOptions, progress: Progress | None = None) -> list[dict[str, Any]]:
    """A row for each mode; the modes alternate. The second row counts trajectories equal to those of the first."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    renderer = Renderer(char_tokenizer())
    policy = make_policy(work.shape, renderer.tokenizer.vocab_size, device)
    engine: Any = make_engine(
        "native", policy, device=device, dtype=dtype, max_batch=work.max_batch, decode=renderer.decode
    )
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    rollouts: dict[str, list[Rollout]] = {}
    facts: dict[str, dict[str, Any]] = {}
    shown = RunProgress(progress, options.repeat)
    for shown.run in range(1 + options.repeat):
        for mode, served in zip(MODES, (Rounds(engine), engine), strict=True):
            engine.reset_prefix_cache()
            engine.reset_stats()
            start = now(device)
            rollouts[mode] = play(work, served, renderer, mode, shown)
            seconds[mode].append(now(device) - start)
            facts[mode] = count(engine, rollouts[mode])
    facts[MODES[1]]["same_as_in_rounds"] = sum(
        one.token_ids == other.token_ids for one, other in zip(*rollouts.values(), strict=True)
    )
    settings = {**asdict(work), **device_settings(device, dtype), "repeat": options.repeat}
    words = ["assay", "bench", "episodes", *command_options(work, options)]
    return [
        {
            "id": f"{row_id(work.id, options.device, options.dtype)}-{mode}",
            "system": "assay",
            **summarize("seconds", "first_run_s", seconds[mode], digits=3),
            **facts[mode],
            **settings,
            "command": shlex.join(words),
        }
        for mode in MODES
    ]


def make_policy(shape: str, vocab_size: int, device: torch.device) -> PolicyModel:
    if shape == NANO:
        return build_preset(shape, vocab_size, MAX_LENGTH, WEIGHTS_SEED)
    return random_model(replace(SHAPES[shape](), vocab_size=vocab_size, max_length=MAX_LENGTH), device, WEIGHTS_SEED)


def play(work: Episodes, engine: Any, renderer: Renderer, mode: str, progress: Progress) -> list[Rollout]:
    env, limits = Chatter(), Limits(0, work.step_tokens)
    collector = Collector(engine, renderer, JudgePool(env.judge(), 0), env=env, limits=limits, progress=progress)
    params = SamplingParams(n=work.samples, max_new_tokens=env.max_steps * work.step_tokens)
    prompts = env.prompts("train")[: work.episodes // work.samples]
    groups = collector.collect(prompts, params, (work.seed, 0), what=f"episodes, {mode}")
    return [rollout for group in groups for rollout in group.rollouts]


def count(engine: Any, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    stats, lengths = engine.stats, sorted(len(turn.completion.token_ids) for r in rollouts for turn in r.turns)
    return {
        "actions": len(lengths),
        "action_tokens_median": lengths[len(lengths) // 2],
        "action_tokens_max": lengths[-1],
        "decoded_tokens": stats.decoded_tokens,
        "decode_steps": stats.decode_steps,
        "rows_a_step": round(stats.decoded_tokens / stats.decode_steps, 1),
    }
