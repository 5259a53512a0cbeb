"""The steps of a run as methods, for your own training loop.

`session` gives them as an object, `Trainer` as a class with a method `train`. Sampling, judging, advantages, the
update, evaluation, logging, checkpoints and exact resume work as in `assay train`.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from assay.api.arguments import (
    SHORT,
    TOKENIZER,
    TOO_FEW,
    descriptions,
    lora_settings,
    model_source,
    overrides_of,
    python_errors,
    reward_settings,
    settings_of,
    task_settings,
)
from assay.api.notebook import new_console
from assay.build.trust import guard_run, leaves
from assay.config import RewardConfig, TrainConfig
from assay.envs.base import StepLimit
from assay.rewards import functions
from assay.rewards.functions import judge_at, register_function
from assay.rewards.pool import serialized
from assay.runs import checkpoints
from assay.runs.console import Console, is_distributed
from assay.runs.directory import as_name
from assay.runs.resolve import check_fixed, describe_finished, find_run, run_settings
from assay.runs.trackers import as_callback
from assay.tasks.base import is_message
from assay.types import Completion, Finish, Group, Message, Prompt, Rollout, Status, Turn, UserError, Verdict

if TYPE_CHECKING:  # torch is imported when a run is built
    from assay.runs.trackers import Hook
    from assay.training.run import TrainingRun
    from assay.training.sources import ReplayBuffer

ID_CHARS = 200  # length of the question in the id of a prompt
PromptLike = str | Prompt | Sequence[Message]  # a text, a problem of a task, or a conversation
OBJECTS = ("tokenizer", "data", "eval_data", "columns", "reward", "env", "peft_config")  # which are not settings


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


class Session:
    """A run, step by step. `with session as run:` evaluates before and after the block, unless the run is resumed.

    while not run.done():
        groups = run.sample()
        run.credit(groups)
        run.update(groups)
        run.record(groups)
    """

    def __init__(self, training: TrainingRun, console: Console, held: ExitStack | None = None) -> None:
        """`held`: what is closed at the end of the block."""
        self.training, self._console = training, console
        self._held = held or ExitStack()
        self.summary: dict[str, Any] = {}  # of the finished run
        self.policy = Policy(training)
        self.buffer = self._buffer()
        self._dropped: list[Group] = []
        self._batch: list[Group] = []
        self._metrics: dict[str, float] = {}
        self._updated: dict[str, float] = {}
        self._block: Any = None

    def __enter__(self) -> Self:
        self._block = self._lifetime()
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)

    @contextmanager
    def _lifetime(self) -> Iterator[None]:
        from assay.build.run import carried_out

        training, console = self.training, self._console
        with self._held, console_warnings(console), carried_out(training, console, resume_call):
            training.begin()
            yield
            self.summary = training.finish()
            show_findings(self.summary, console)

    def _buffer(self) -> ReplayBuffer:
        """The replay buffer of the run, which checkpoints contain. It is created even if the settings do not use it."""
        from assay.build.run import inherit_replay
        from assay.training import checkpoint

        training, path = self.training, self.training.path
        if training.replay.buffer is None:
            checkpoint.load_replay(path, self.step, training.replay.make_buffer())
            if checkpoints.last(path) is None:
                inherit_replay(training)
        return training.replay.make_buffer()

    @property
    def name(self) -> str:
        return self.training.directory.name

    @property
    def path(self) -> Path:
        """The directory of the run."""
        return self.training.path

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

    def done(self) -> bool:
        """Whether all steps of the settings are complete."""
        return self.training.done()

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

    async def asample(self) -> list[Group]:
        """As `sample`, without blocking the event loop."""
        return await asyncio.to_thread(self.sample)

    def env(self) -> StepLimit:
        """A copy of the environment for the loop to step: `start` with one of `states` (or `reset`), then `step`.

        It truncates an episode after `env.max_steps` steps (or the environment's own limit), as in `sample`.
        """
        env = self.training.collector.env
        if env is None:
            raise UserError("the run has no environment: set env, e.g. env='guess'")
        return StepLimit(env.standalone(), self.training.cfg.env.max_steps or env.max_steps)

    def reward(self, action: Rollout, value: float) -> None:
        """Set the reward of an action without the judge. A reward of at least 1.0 counts as correct."""
        action.verdict = Verdict(float(value), Status.OK if value >= 1.0 else Status.WRONG)
        action.reward = action.verdict.reward

    def judge(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Judge rollouts with the judge of the task, or the reward functions; sets their verdicts and rewards.

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

    def update(self, groups: list[Group]) -> dict[str, float]:
        """Train one step on groups with advantages, new or replayed, and copy the new weights to the engine.

        Returns metrics, among them the mean reward of these groups.
        """
        from assay.training.sources import version_of

        if any(version_of(group) != self.step for group in groups):  # or of another run, whatever its number
            self.training.learner.algo.check_replay()
        self._batch = groups
        known = [rollout.reward for group in groups for rollout in group.rollouts if not rollout.failed] or [0.0]
        metrics = self.training.learner.update(groups, self.training.state) | self.training.sync()
        self._updated = metrics
        return {"reward/mean": sum(known) / len(known)} | metrics

    def record(self, groups: list[Group], metrics: Mapping[str, float] | None = None) -> None:
        """End a step that sampled these groups: write files and metrics; evaluate and save when due.

        `metrics`: what is logged in addition to the metrics of the update.
        """
        from assay.training.sources import SampledGroups

        sampled, self._dropped = SampledGroups(groups, self._dropped), []
        if not sampled.all_groups:
            raise UserError("record was given no groups: pass the groups that this step has sampled")
        logged = {**self._updated, **(metrics or {}), **self._metrics}
        self._metrics, self._updated = {}, {}
        self.training.record(sampled, self._batch, logged)


class Trainer(Session, ABC):
    """A training algorithm as a class: subclass it, write the loop as `train`, and call `run`.

    Takes the arguments of `assay.session`, and a dict of dotted `settings` such as {"optim.lr": 1e-4}.
    """

    def __init__(
        self,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        if config is None and not arguments.get("resume") and "name" not in {**(settings or {}), **arguments}:
            arguments["name"] = as_name(type(self).__name__)
        check_one_process()
        super().__init__(*open_training(config, **{**(settings or {}), **arguments}))

    @abstractmethod
    def train(self) -> None:
        """The training loop, implemented by subclasses: `while not self.done(): ...`."""

    def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate again. Returns the content of summary.json."""
        with self:
            self.train()
        return self.summary


def session(config: str | Path | None = None, **arguments: Any) -> Session:
    """A run for a loop of your own. Takes the arguments of `assay.train`."""
    check_one_process()
    return Session(*open_training(config, **arguments))


def show_findings(summary: Mapping[str, Any], console: Console) -> None:
    """Print what has kept a finished run from learning or harmed it, and what to change."""
    for cause in summary.get("diagnosis", ()):
        show = console.note if cause["severity"] == "note" else console.warn
        show(f"{cause['evidence']}; what to change: {cause['remedy']}")


def check_one_process() -> None:
    if is_distributed():
        raise UserError("a custom loop runs in one process: start it without torchrun, or use assay.train")


@python_errors()
def open_training(
    config: str | Path | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    columns: Mapping[str, str] | None = None,
    reward: Any = None,
    env: Any = None,
    peft_config: Any = None,
    callbacks: Iterable[Hook] = (),
    resume: str | Path | None = None,
    trust: bool = False,
    quiet: bool = False,
    sft_only: bool = False,
    **settings: Any,
) -> tuple[TrainingRun, Console, ExitStack]:
    """Build a run from arguments, or the run `resume` from its last checkpoint. Returns it with its console, and what
    has to be closed at its end. See `assay.train`.
    """
    if not isinstance(callbacks, Iterable):
        raise UserError(f"callbacks must be a list, not {callbacks!r:.80}")
    hooks = list(map(as_callback, callbacks))
    sections: dict[str, Any] = {"model": model, "reward": reward}
    sections = {name: value for name, value in sections.items() if isinstance(value, Mapping)}
    sections |= {"env": env} if isinstance(env, str | Mapping | None) else {"env.name": register_function(env)}
    overrides = overrides_of(settings, TrainConfig, SHORT, OBJECTS) | overrides_of(sections, TrainConfig)
    runs_dir = Path(str(overrides.get("runs_dir", TrainConfig().runs_dir)))
    if "model" in sections:
        if tokenizer is not None:
            raise UserError(TOKENIZER)
    elif model is not None:
        overrides["model.source"] = model_source(model, tokenizer, runs_dir)
    task = None
    if data is not None:
        task = overrides.pop("task.name", None) or overrides.pop("task", None)
    rows = task_settings(data, eval_data, columns, runs_dir, task)
    if rows.get("task", {}).get("args", {}).get("val_size") == 0:
        raise UserError(TOO_FEW)
    overrides |= rows | (lora_settings(peft_config) if peft_config is not None else {})
    if reward is not None and "reward" not in sections:
        overrides |= reward_settings(reward)
    if resume is not None and config is not None:
        raise UserError("a resumed run has its own settings: leave out the config, and change settings as arguments")
    console = new_console(quiet)
    held = ExitStack()
    with console_warnings(console):
        training = (
            start_run(config, overrides, console, sft_only)
            if resume is None
            else held.enter_context(resumed(str(resume), runs_dir, overrides, console, trust))
        )
    if text := descriptions.get(rows.get("task", {}).get("path", "")):
        training.state.facts["data"] = text
        console.note(f"data: {text}")
    training.callbacks = hooks
    return training, console, held


def start_run(
    config: str | Path | None, overrides: dict[str, Any], console: Console, sft_only: bool = False
) -> TrainingRun:
    from assay.build.run import new_run

    cfg = settings_of(TrainConfig, config, overrides)
    if not cfg.model.source:
        raise UserError("no model: pass model='Qwen/Qwen2.5-0.5B-Instruct', a folder, a GGUF file or 'preset:tiny'")
    if not (cfg.task.name or cfg.env.name):
        raise UserError("no problems: pass data=rows (dicts with question and answer), task='gsm8k' or env=...")
    if sft_only:
        cfg.train.steps, cfg.train.epochs, cfg.train.budget = 0, 0.0, 0
        if not cfg.sft.steps:
            raise UserError("nothing to do: pass steps, e.g. steps=200")
    cfg.name = cfg.name or as_name(Path(config).stem if config else "sft" if sft_only else cfg.algo.recipe)
    isolate_judge(cfg.reward, overrides, console)
    console.announce(f"loading {cfg.model.source}")
    return new_run(cfg, console)


def isolate_judge(cfg: RewardConfig, overrides: Mapping[str, Any], console: Console) -> None:
    """Judge in this process if a reward function cannot be sent to another one, unless the user asked for workers."""
    for path in filter(functions.registered, [cfg.function, *cfg.functions]):
        try:
            serialized(judge_at(path))
        except UserError as error:
            if overrides.get("reward.workers"):
                raise
            name = path.rpartition(":")[2]
            reason = str(error).partition("(")[2].rpartition(")")[0]
            console.note(
                f"{name} runs in this process, without a hard time limit, because it cannot be sent to a judge process "
                f"({reason})"
            )
            cfg.workers = 0


@contextmanager
def resumed(
    name: str, runs_dir: Path, overrides: dict[str, Any], console: Console, trust: bool
) -> Iterator[TrainingRun]:
    """A run from its last checkpoint, with its settings and those that are given again or may be changed."""
    from assay.build.run import reopened

    path = find_run(name, runs_dir)
    if overrides.get("name") not in (None, path.resolve().name):
        raise UserError(f"a run that is resumed keeps its name: leave out name, or rename the folder {path}")
    before = run_settings(path)
    cfg = settings_of(TrainConfig, path / "config.toml", overrides)
    check_objects(before, cfg, path.name)
    if finished := describe_finished(path, before.train, cfg.train):
        raise UserError(f"{finished}; its results: assay.load_run({name!r})")
    check_fixed(before, cfg, path.name)
    guard_run(before, path, typed=overrides, trust=trust, allow="trust=True")
    isolate_judge(cfg.reward, {}, console)
    console.announce(f"loading {cfg.model.source}")
    with reopened(path, before, cfg, console) as training:
        yield training


def check_objects(before: TrainConfig, after: TrainConfig, run: str) -> None:
    """Objects of the program must be given again, unchanged."""
    saved, given = (dict(objects_in(cfg.model_dump())) for cfg in (before, after))
    for key, path in saved.items():
        now, name = given.get(key), path.rpartition(":")[2]
        if now is not None and now != path and functions.registered(now) is not None:
            raise UserError(
                f"{key}: {name} differs from what run {run} was started with: pass it unchanged, or start a new run"
            )
        if functions.registered(path) is None:
            raise UserError(f"run {run} uses {name} of the program that started it: pass it again ({key})")


def objects_in(settings: Any) -> Iterator[tuple[str, str]]:
    """Paths of objects of a program in settings, by dotted key."""
    return ((key.lstrip("."), text) for key, text in leaves("", settings) if text.startswith(functions.OBJECT))


_consoles: list[Console] = []  # of the runs in progress: there may be several threads with one each
_show_before: Callable[..., Any] = warnings.showwarning
_lock = threading.Lock()


@contextmanager
def console_warnings(console: Console) -> Iterator[None]:
    """Show warnings as lines of the console."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "IProgress not found" not in str(message):  # of tqdm in notebooks, which is not used here
            _consoles[-1].warn(str(message))

    global _show_before
    with _lock:
        if not _consoles:
            _show_before = warnings.showwarning
        _consoles.append(console)
        warnings.showwarning = show
    try:
        yield
    finally:
        with _lock:
            _consoles.remove(console)
            if not _consoles:
                warnings.showwarning = _show_before


def resume_call(training: TrainingRun) -> str:
    """The call that resumes a run."""
    path = training.path
    cfg = training.cfg
    objects = [key.partition(".")[0] for key, _ in objects_in(cfg.model_dump())]
    again = "".join(f", {name}=..." for name in dict.fromkeys(objects) if name in ("reward", "env"))
    where = "" if path.parent == Path("runs") else f", runs_dir={str(path.parent)!r}"
    return f"assay.train(resume={path.name!r}{again}{where})"


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
