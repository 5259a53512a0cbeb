"""Steps of the engine for episodes with actions of mixed lengths: each at its own pace, and in rounds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import torch

from assay.bench.engine import Options, dtype_name, named
from assay.bench.step import now
from assay.bench.workload import SHAPES, random_model, words_of
from assay.engine import EngineInfo, Event, SamplingParams, make_engine
from assay.envs import Env
from assay.models import PolicyModel, build_preset
from assay.models.device import pick_device, pick_dtype
from assay.rewards import JudgePool
from assay.rollout import Collector, Limits
from assay.text import Renderer, char_tokenizer
from assay.types import Rollout, UserError, unknown_name

PACES = ("rounds", "own-pace")
NANO = "nano"  # a preset, as small as a policy can be: what is left are the costs of the host
MAX_LENGTH = 1024  # tokens of an episode
WEIGHTS_SEED = 3


class Chatter(Env):
    """Says "go on" to whatever it is told. Nine letters end an action: those of a random policy have many lengths."""

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
    """The same engine in lockstep rounds: a step returns when all requests have finished."""

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


@dataclass(frozen=True)
class Episodes:
    shape: str = NANO
    episodes: int = 2048
    samples: int = 8  # episodes that begin alike
    step_tokens: int = 64  # the longest action
    max_batch: int = 256  # episodes at once
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in (known := (NANO, *SHAPES)):
            raise unknown_name("shape", self.shape, known)
        for name in ("episodes", "samples", "step_tokens", "max_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.episodes % self.samples:
            raise UserError(f"--episodes {self.episodes} must be a multiple of --samples {self.samples}")

    @property
    def id(self) -> str:
        names = ("samples", "step_tokens", "max_batch")
        standard = {field.name: field.default for field in fields(self)}
        others = [f"-{name}{value}" for name in names if (value := getattr(self, name)) != standard[name]]
        shape = "" if self.shape == NANO else f"{self.shape}-"
        return f"episodes-{shape}{self.episodes}{''.join(others)}"


@dataclass(frozen=True)
class EpisodeOptions:
    """How to measure, beside what."""

    device: str = "auto"
    dtype: str = "auto"
    repeat: int = 1  # timed runs of each pace, after one that is reported apart

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UserError(f"--repeat must be at least 1, not {self.repeat}")


def measure_episodes(work: Episodes, options: EpisodeOptions) -> list[dict[str, Any]]:
    """A row for each pace, run in turns; the second says how many trajectories are those of the first."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    renderer = Renderer(char_tokenizer())
    policy = policy_for(work.shape, renderer.tokenizer.vocab_size, device)
    engine: Any = make_engine(
        "native", policy, device=device, dtype=dtype, max_batch=work.max_batch, decode=renderer.decode
    )
    seconds: dict[str, list[float]] = {pace: [] for pace in PACES}
    found: dict[str, list[Rollout]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for _ in range(1 + options.repeat):
        for pace, served in zip(PACES, (Rounds(engine), engine), strict=True):
            engine.reset_prefix_cache()
            engine.reset_stats()
            start = now(device)
            found[pace] = played(work, served, renderer)
            seconds[pace].append(now(device) - start)
            facts[pace] = figures(engine, found[pace])
    facts[PACES[1]]["same_as_in_rounds"] = sum(
        one.token_ids == other.token_ids for one, other in zip(*found.values(), strict=True)
    )
    return [
        {
            "id": f"{named(work.id, Options(device=options.device, dtype=options.dtype))}-{pace}",
            "system": "assay",
            **times(seconds[pace]),
            **facts[pace],
            **settings_of(work, options, device, dtype),
            "command": shlex.join(["assay", "bench", "episodes", *words_of(work), *words_of(options)]),
        }
        for pace in PACES
    ]


def policy_for(shape: str, vocabulary: int, device: torch.device) -> PolicyModel:
    if shape == NANO:
        return build_preset(shape, vocabulary, MAX_LENGTH, WEIGHTS_SEED)
    return random_model(replace(SHAPES[shape], vocab_size=vocabulary, max_length=MAX_LENGTH), device, WEIGHTS_SEED)


def played(work: Episodes, engine: Any, renderer: Renderer) -> list[Rollout]:
    env = Chatter()
    part = Collector(engine, renderer, JudgePool(env.judge(), 0), env=env, limits=Limits(0, work.step_tokens))
    params = SamplingParams(n=work.samples, max_new_tokens=env.max_steps * work.step_tokens)
    groups = part.collect(env.prompts("train")[: work.episodes // work.samples], params, (work.seed, 0))
    return [rollout for group in groups for rollout in group.rollouts]


def times(seconds: Sequence[float]) -> dict[str, Any]:
    first, *runs = (round(value, 3) for value in seconds)
    return {"seconds": round(median(seconds[1:]), 3), "runs": runs, "first_run_s": first}


def figures(engine: Any, found: Sequence[Rollout]) -> dict[str, Any]:
    stats, lengths = engine.stats, sorted(len(turn.completion.token_ids) for r in found for turn in r.turns)
    return {
        "actions": len(lengths),
        "action_tokens_median": lengths[len(lengths) // 2],
        "action_tokens_max": lengths[-1],
        "decoded_tokens": stats.decoded_tokens,
        "decode_steps": stats.decode_steps,
        "rows_a_step": round(stats.decoded_tokens / stats.decode_steps, 1),
    }


def settings_of(work: Episodes, options: EpisodeOptions, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        **{field.name: getattr(work, field.name) for field in fields(work)},
        "device": device.type,
        "dtype": dtype_name(dtype),
        "threads": torch.get_num_threads(),
        "repeat": options.repeat,
    }
