"""Python API for custom training loops, built from the components of `assay train`.

Subclass `Trainer`, write the loop as its method `train`, and call `run`. Sampling, judging, advantages, the update,
evaluation, logging, checkpoints and exact resume work as on the command line.
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
from typing import TYPE_CHECKING, Any

from assay.build.trust import guard_run
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.envs.base import StepLimit
from assay.runs import Run, checkpoints
from assay.runs.console import Console
from assay.runs.directory import as_name
from assay.runs.resolve import find_run
from assay.tasks.base import is_message
from assay.types import Completion, Finish, Group, Message, Prompt, Rollout, Status, Turn, UserError, Verdict

if TYPE_CHECKING:  # torch is imported when a run is built
    from assay.training.run import TrainingRun
    from assay.training.sources import ReplayBuffer

__all__ = ["Policy", "ReplayBuffer", "Trainer"]

ID_CHARS = 200  # length of the question in the id of a prompt
PromptLike = str | Prompt | Sequence[Message]  # a text, a problem of a task, or a conversation


class Policy:
    """The policy, for sampling one action at a time."""

    def __init__(self, training: TrainingRun) -> None:
        self._training = training
        self._version = self.version
        self._actions: Counter[str] = Counter()  # sampled with this version, by prompt id

    @property
    def version(self) -> int:
        """Number of completed training steps."""
        return self._training.state.step

    def get_action(self, state: PromptLike, greedy: bool = False, after: Rollout | None = None) -> Rollout:
        """Sample one answer, without a verdict; its text is `text`. Repeated calls in a step give different samples.

        In an environment, it ends like any action: at `env.max_tokens`, or at a stop string of the environment.
        `after`: the previous action of the episode; `state` is then the observation that follows it. The new action has
        the tokens of the episode so far as context. In an environment that continues within a reply, the observation
        and the action continue that reply. If the reply has ended or reached its length limit, the action is empty.
        """
        from assay.engine import Request, generate
        from assay.rollout import request_seed, sampling_params, with_stops
        from assay.rollout.episodes import added_text

        cfg, collector = self._training.cfg, self._training.collector
        renderer, env = collector.renderer, collector.env
        prompt = as_prompt(state) if after is None else after.prompt
        if self._version != self.version:
            self._version, self._actions = self.version, Counter()
        key = f"{prompt.id}#action-{self._actions[prompt.id]}"
        self._actions[prompt.id] += 1
        params = sampling_params(cfg.sampling, 1)
        params = replace(
            with_stops(params, renderer, env),
            temperature=0.0 if greedy else params.temperature,
            max_new_tokens=min(cfg.env.max_tokens or params.max_new_tokens, params.max_new_tokens),
        )
        ids, reply = renderer.prompt_ids(prompt), list[int]()
        if after is not None:
            if env is None or isinstance(state, Prompt):
                raise UserError("after=action requires an environment, and as state what its step returned")
            last, start = after.turns[-1].completion.token_ids, len(ids)
            ids = after.token_ids + collector.episode_rules(env).observation_ids(prompt, last, state)
            if env.inline:
                reply, ended = ids[start:], not last or last[-1] in renderer.stop_token_ids
                room = min(cfg.sampling.max_new_tokens - len(reply), collector.engine.info.max_length - len(ids))
                if ended or room <= 0:
                    return Rollout(prompt, 0, [Turn(ids, Completion([], [], [], Finish.LENGTH, self.version), "")])
                tokens = min(params.max_new_tokens, room)
                params = replace(params, max_new_tokens=tokens, min_new_tokens=min(params.min_new_tokens, tokens))
        collector.check_lengths([prompt], [ids])
        seed = request_seed(cfg.seed, self.version, key)
        ((completion,),) = generate(collector.engine, [Request(ids, params, seed, name=prompt.id)])
        before, text = renderer.decode(reply), renderer.decode([*reply, *completion.token_ids])
        action = added_text(renderer, before, text, completion.token_ids)
        return Rollout(prompt, 0, [Turn(list(ids), completion, action)])


class Trainer(ABC):
    """A training run with a custom loop. `settings`: as of `assay train`, dotted: {"optim.lr": 1e-4}."""

    def __init__(
        self,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        resume: str | Path | None = None,
        trust: bool = False,
        quiet: bool = False,
    ) -> None:
        """`resume`: name or directory of a run to resume from its last checkpoint, with the settings of that run.

        `trust`: use code, files and hosts that a resumed run names, even if the user has not started or trusted it.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("a custom loop runs in one process: start it without torchrun, or use assay train")
        from assay.build.run import new_run

        console = Console(quiet=quiet)
        if resume is None:
            cfg = load_settings(TrainConfig, config, settings or {})
            cfg.name = cfg.name or as_name(Path(config).stem if config else type(self).__name__)
            self.training = new_run(cfg, console)
        else:
            self.training = resumed(resume, settings or {}, console, trust)
        self.policy = Policy(self.training)
        self.buffer = self._buffer()
        self._dropped: list[Group] = []
        self._batch: list[Group] = []
        self._metrics: dict[str, float] = {}

    def _buffer(self) -> ReplayBuffer:
        """The replay buffer of the run, which checkpoints contain. It is created even if the settings do not use it."""
        from assay.build.run import inherit_replay
        from assay.training import checkpoint

        training, path = self.training, self.training.directory.path
        if training.replay.buffer is None:
            checkpoint.load_replay(path, self.step, training.replay.make_buffer())
            if checkpoints.last(path) is None:
                inherit_replay(training)
        return training.replay.make_buffer()

    @abstractmethod
    def train(self) -> None:
        """The training loop, implemented by subclasses: `while self.step < self.steps: ...`."""

    def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate again. Returns the content of summary.json."""
        with self.training.active():
            self.training.begin()
            self.train()
            summary, console = self.training.finish(), self.training.recorder.console
            for cause in summary.get("diagnosis", ()):
                show = console.note if cause["severity"] == "note" else console.warn
                show(f"{cause['evidence']}; what to change: {cause['remedy']}")
            return summary

    @property
    def step(self) -> int:
        """Number of completed training steps."""
        return self.training.state.step

    @property
    def steps(self) -> int:
        """Total number of training steps in the settings."""
        return self.training.schedule.total_steps

    @property
    def seed(self) -> int:
        return self.training.cfg.seed

    def states(self, count: int) -> list[Prompt]:
        """The next problems of the train split, in the order of the run."""
        return self.training.source.next_prompts(count)

    def sample(self) -> list[Group]:
        """Sample `train.prompts` groups of `train.samples` judged answers with the current weights."""
        started = self.training.recorder.step_started = time.perf_counter()
        sampled = self.training.sample()
        self._dropped = sampled.dropped
        self._metrics = {f"time/{part}": seconds for part, seconds in sampled.seconds.items()}
        self._metrics["time/sample"] = time.perf_counter() - started
        return sampled.groups

    def env(self) -> StepLimit:
        """A copy of the environment for the loop to step: `start` with one of `states` (or `reset`), then `step`.

        It truncates an episode after `env.max_steps` steps (or the environment's own limit), as in `sample`.
        """
        env = self.training.collector.env
        if env is None:
            raise UserError("the run has no environment: set env.name, e.g. guess")
        return StepLimit(env.standalone(), self.training.cfg.env.max_steps or env.max_steps)

    def reward(self, action: Rollout, value: float) -> None:
        """Set the reward of an action without the judge. A reward of at least 1.0 counts as correct."""
        action.verdict = Verdict(float(value), Status.OK if value >= 1.0 else Status.WRONG)
        action.reward = action.verdict.reward

    def judge(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Judge rollouts with the judge of the task, or `reward.function`; sets their verdicts and rewards.

        A reward function that sees all answers to a prompt gets the answers of this call.
        """
        judge, groups = self.training.collector.judge, dict[str, list[Rollout]]()
        for rollout in rollouts:
            groups.setdefault(rollout.prompt.id, []).append(rollout)
        prompts = [group[0].prompt for group in groups.values()]
        texts = [[rollout.text for rollout in group] for group in groups.values()]
        items = [(answers, prompt.answer, judge.fields(prompt)) for answers, prompt in zip(texts, prompts, strict=True)]
        for group, verdicts in zip(groups.values(), judge.judge_groups(items), strict=True):
            for rollout, verdict in zip(group, verdicts, strict=True):
                rollout.verdict, rollout.reward = verdict, verdict.reward
        return [rollout.verdict for rollout in rollouts if rollout.verdict]

    def credit(self, groups: list[Group]) -> None:
        """Set rewards and advantages from the verdicts, according to the recipe."""
        if any(rollout.verdict is None for group in groups for rollout in group.rollouts):
            raise UserError("an answer has no verdict: call judge(answers), or reward(answer, value), before credit")
        self._metrics |= self.training.learner.credit(groups)

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """Train one step on groups with advantages, new or replayed, and copy the new weights to the engine."""
        from assay.training.sources import version_of

        if any(version_of(group) != self.step for group in groups):  # or of another run, whatever its number
            self.training.learner.algo.check_replay()
        self._batch = groups
        return self.training.learner.update(groups, self.training.state) | self.training.sync()

    def record(self, groups: list[Group], metrics: Mapping[str, float]) -> None:
        """End a step that sampled these groups: write files and metrics; evaluate and save when due."""
        from assay.training.sources import SampledGroups

        sampled, self._dropped = SampledGroups(groups, self._dropped), []
        if not sampled.all_groups:
            raise UserError("record was given no groups: pass the groups that this step has sampled")
        metrics, self._metrics = {**metrics, **self._metrics}, {}
        self.training.record(sampled, self._batch, metrics)


def resumed(run: str | Path, settings: Mapping[str, Any], console: Console, trust: bool = False) -> TrainingRun:
    if others := [key for key in settings if key not in ("runs_dir", "train.steps")]:
        raise UserError(f"{others[0]} cannot be changed here: a resumed run keeps its settings, except train.steps")
    path = find_run(str(run), Path(str(settings.get("runs_dir", TrainConfig().runs_dir))))
    cfg = load_settings(TrainConfig, path / "config.toml", settings)
    untrusted = guard_run(cfg, path, trust=trust, allow="trust=True")
    if untrusted is not None:
        untrusted.check_settings()
    from assay.build.run import resume_run

    return resume_run(cfg, Run.open(path, write=True), console)


def as_prompt(state: PromptLike) -> Prompt:
    """Convert a state to a prompt, with a readable id that depends on the question only."""
    if isinstance(state, Prompt):
        return state
    messages = (Message(role="user", content=state),) if isinstance(state, str) else state
    if not isinstance(messages, Sequence) or not messages or not all(map(is_message, messages)):
        raise UserError(f"a state must be a question, a Prompt, or messages with role and content, not {state!r:.80}")
    text = "\n".join(message["content"] for message in messages)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    short = text if len(text) <= ID_CHARS else f"{text[:ID_CHARS]}... {digest}"
    return Prompt(id=short, messages=tuple(messages))


def __getattr__(name: str) -> Any:
    if name == "ReplayBuffer":
        from assay.training.sources import ReplayBuffer

        return ReplayBuffer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
