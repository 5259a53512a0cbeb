"""A training loop of one's own, from the same parts that `assay train` is made of.

Subclass `Algorithm`, write `train` as the loop that you have in mind, and call `run`. Sampling, judging, credit, the
update, evaluation, logging, checkpoints and exact resume are those of the command line.
"""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.config import TrainConfig
from assay.engine.base import Request, generate
from assay.envs import Env
from assay.envs.base import is_message
from assay.rollout.collect import request_seed
from assay.runs import Run, checkpoints
from assay.runs.console import Console
from assay.runs.directory import as_name
from assay.runs.resolve import find_run
from assay.settings import load_settings
from assay.train import adapt, checkpoint, learn, stages
from assay.train.replay import ReplayBuffer, version_of
from assay.train.setup import check_replays
from assay.train.start import inherit_replay, new_run, resume_run
from assay.train.trust import guard_run
from assay.types import Group, Message, Prompt, Rollout, Status, Turn, UserError, Verdict

__all__ = ["Algorithm", "Policy", "ReplayBuffer"]

ID_CHARS = 200  # of a question that becomes the id of a prompt
State = str | Prompt | Sequence[Message]  # a question, a problem of a task, or a conversation


class Policy:
    """The model that is trained, as whoever acts sees it."""

    def __init__(self, parts: stages.Parts) -> None:
        self._parts = parts
        self._version = self.version
        self._asked: Counter[str] = Counter()  # by this version

    @property
    def version(self) -> int:
        """Steps it has learnt for."""
        return self._parts.state.step

    def get_action(self, state: State, greedy: bool = False) -> Rollout:
        """One answer, not judged: `text` is what it wrote. Asked again within a step, it draws another one.

        In an environment it ends where an action does: at `env.max_tokens`, or a stop string of the environment's.
        """
        parts, prompt = self._parts, as_prompt(state)
        renderer, engine = parts.collector.renderer, parts.collector.engine
        if self._version != self.version:
            self._version, self._asked = self.version, Counter()
        key = f"{prompt.id}#action-{self._asked[prompt.id]}"
        self._asked[prompt.id] += 1
        params, env = stages.sampling_params(parts.cfg, 1), parts.collector.env
        params = replace(
            params,
            temperature=0.0 if greedy else params.temperature,
            max_new_tokens=min(parts.cfg.env.max_tokens or params.max_new_tokens, params.max_new_tokens),
            stop_token_ids=renderer.stop_token_ids,
            stop=(*params.stop, *renderer.stop, *(env.stop if env else ())),
        )
        ids = renderer.prompt_ids(prompt)
        parts.collector.check_lengths([prompt], [ids])
        seed = request_seed(parts.cfg.seed, self.version, key)
        ((completion,),) = generate(engine, [Request(ids, params, seed, name=prompt.id)])
        return Rollout(prompt, 0, [Turn(list(ids), completion, renderer.decode(completion.token_ids))])


class Algorithm(ABC):
    """A run whose loop is yours. `settings` are those of `assay train`, dotted: {"optim.lr": 1e-4}."""

    def __init__(
        self,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        resume: str | Path | None = None,
        trust: bool = False,
        quiet: bool = False,
    ) -> None:
        """`resume`: the name or folder of a run to go on with from its last checkpoint; its settings are its own.

        `trust`: import code that the settings of a resumed run name, even if nobody here has begun or trusted it.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("a loop of one's own is for one process: start it without torchrun, or use assay train")
        console = Console(quiet=quiet)
        if resume is None:
            cfg = load_settings(TrainConfig, config, settings or {})
            cfg.name = cfg.name or as_name(Path(config).stem if config else type(self).__name__)
            self.parts = new_run(cfg, console)
        else:
            self.parts = resumed(resume, settings or {}, console, trust)
        self.policy = Policy(self.parts)
        self.buffer = self._buffer()
        self._started = time.perf_counter()
        self._dropped: list[Group] = []
        self._batch: list[Group] = []
        self._metrics: dict[str, float] = {}

    def _buffer(self) -> ReplayBuffer:
        """The run's own, so that checkpoints have it."""
        parts, cfg = self.parts, self.parts.cfg.replay
        if parts.replay is None:
            parts.replay = ReplayBuffer(cfg.capacity, cfg.max_staleness, cfg.with_replacement)
            checkpoint.load_replay(parts.run.path, parts.state.step, parts.replay)
            if checkpoints.last(parts.run.path) is None:
                inherit_replay(parts)
        return parts.replay

    @abstractmethod
    def train(self) -> None:
        """Your loop; `self.step < self.steps` is its condition."""

    def run(self) -> dict[str, Any]:
        """Measure, train, measure again; gives the summary that lies in the run's folder."""
        parts = self.parts
        with parts.run, parts.collector.judge, stages.stoppable(parts):
            if not parts.resumed:
                stages.begin(parts)
            if parts.state.unmeasured is not None:
                stages.close(parts, parts.state.unmeasured, time.perf_counter())
            parts.console.start(parts.total_steps, parts.run.name, self.step)
            self._started = time.perf_counter()
            self.train()
            parts.console.stop()
            if checkpoints.last(parts.run.path) != self.step:  # a loop that ended before `steps`
                stages.save(parts, {})
            return stages.finish(parts)

    @property
    def step(self) -> int:
        """Steps made so far."""
        return self.parts.state.step

    @property
    def steps(self) -> int:
        """Steps to make, by the settings."""
        return self.parts.total_steps

    @property
    def seed(self) -> int:
        return self.parts.cfg.seed

    def states(self, count: int) -> list[Prompt]:
        """The next problems of the train split, in the run's order."""
        found = self.parts.stream.next(count)
        self.parts.state.cursor = self.parts.stream.cursor
        return found

    def sample(self) -> list[Group]:
        """`train.prompts` groups of `train.samples` judged answers by the policy as it is."""
        self._started = time.perf_counter()
        groups, self._dropped = stages.sample(self.parts)
        self._metrics = {f"time/{part}": seconds for part, seconds in self.parts.collector.seconds.items()}
        self._metrics["time/sample"] = time.perf_counter() - self._started
        return groups

    def env(self) -> Env:
        """One like the run's, to play by hand: `start` with one of `states` (or `reset`), `get_action`, `step`."""
        found = self.parts.collector.env
        if found is None:
            raise UserError("the run has no environment: set env.name, e.g. guess")
        if found.inline:
            raise UserError(f"what {found.name} says goes on within a reply, which get_action cannot: use sample()")
        return found.alone()

    def reward(self, action: Rollout, value: float) -> None:
        """What an action has earned, in place of a judge's verdict. From 1.0 up it counts as correct."""
        action.verdict = Verdict(float(value), Status.OK if value >= 1.0 else Status.WRONG)
        action.reward = action.verdict.reward

    def judge(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """By the task's judge, or the one of `reward.function`; sets each rollout's verdict and reward."""
        verdicts = self.parts.collector.judge.judge([(r.text, r.prompt.answer, r.prompt.fields) for r in rollouts])
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            rollout.verdict, rollout.reward = verdict, verdict.reward
        return verdicts

    def credit(self, groups: list[Group]) -> None:
        """Verdicts become rewards and advantages, as the recipe has it."""
        if any(rollout.verdict is None for group in groups for rollout in group.rollouts):
            raise UserError("an answer has no verdict: call judge(answers), or reward(answer, value), before credit")
        self._metrics |= learn.credit(self.parts, groups)

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """One step on groups that have credit, new or replayed; then the policy acts with what it has learnt."""
        if any(version_of(group) != self.step for group in groups):  # or of another run, whatever its number
            check_replays(self.parts.algo)
        self._batch = groups
        return learn.learn(self.parts, groups)

    def record(self, groups: list[Group], metrics: Mapping[str, float]) -> None:
        """The end of a step that has sampled these groups: files, metrics, and what is due of evaluations and saves."""
        dropped, self._dropped = self._dropped, []
        if not groups and not dropped:
            raise UserError("record was given no groups: hand it those that this step has sampled")
        found = {**metrics, **self._metrics, **stages.describe(groups, dropped, self.parts.algo)}
        found |= adapt.remember(self.parts.algo, self.parts.state, [*groups, *dropped], found)
        self._metrics = {}
        stages.keep_rollouts(self.parts, [*groups, *dropped])
        stages.count_faults(self.parts, self._batch)
        stages.close(self.parts, found, self._started)
        self._started = time.perf_counter()


def resumed(run: str | Path, settings: Mapping[str, Any], console: Console, trust: bool = False) -> stages.Parts:
    if others := [key for key in settings if key not in ("runs_dir", "train.steps")]:
        raise UserError(f"{others[0]} cannot be changed here: a resumed run keeps its settings, but for train.steps")
    path = find_run(str(run), Path(str(settings.get("runs_dir", TrainConfig().runs_dir))))
    cfg = load_settings(TrainConfig, path / "config.toml", settings)
    foreign = guard_run(cfg, path, trust=trust, allow="trust=True")
    if foreign is not None:
        foreign.check_remote_code()
    return resume_run(cfg, Run.open(path, write=True), console)


def as_prompt(state: State) -> Prompt:
    """The same question has the same id, of a length that can be read."""
    if isinstance(state, Prompt):
        return state
    messages = (Message(role="user", content=state),) if isinstance(state, str) else state
    if not isinstance(messages, Sequence) or not messages or not all(map(is_message, messages)):
        raise UserError(f"a state is a question, a Prompt, or messages with role and content, not {state!r:.80}")
    text = "\n".join(message["content"] for message in messages)
    short = text if len(text) <= ID_CHARS else f"{text[:ID_CHARS]}... {digest(text)}"
    return Prompt(id=short, messages=tuple(messages))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
