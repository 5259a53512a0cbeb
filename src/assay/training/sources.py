"""Sources of training data: the order of prompts, the groups of rollouts of a step, and replayed groups."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.algos import Algorithm
from assay.config import ReplayConfig, TrainConfig
from assay.rollout import Collector, sampling_params
from assay.runs.files import read_json, write_json
from assay.runs.rollouts import read_rollouts, rollout_path, write_rollouts
from assay.tasks.base import LazyPrompts, seeded_shuffle
from assay.training.progress import RunState, Schedule, Stopping
from assay.types import Group, Prompt, Rollout, UserError, plural

MAX_SHUFFLED = 1 << 24  # longer splits are generated: their prompts are independent, and are used in order


class PromptStream:
    """Endless epochs over a split, each in a seeded random order. The state is `cursor`."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        self.prompts, self.seed, self.cursor = prompts, seed, 0
        self._shuffles = shuffle and len(prompts) <= MAX_SHUFFLED
        self._epoch = -1
        self._order: Sequence[int] = ()

    def next(self, count: int) -> list[Prompt]:
        prompts = [self.at(index) for index in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return prompts

    @property
    def rejected(self) -> int:
        """Number of generated prompts that a filter has rejected so far in this process."""
        return self.prompts.rejected if isinstance(self.prompts, LazyPrompts) else 0

    def at(self, index: int) -> Prompt:
        """The prompt at this position of the stream."""
        epoch, position = divmod(index, len(self.prompts))
        if epoch != self._epoch:
            size = len(self.prompts)
            self._order = seeded_shuffle(size, f"{self.seed}/{epoch}") if self._shuffles else range(size)
            self._epoch = epoch
        return self.prompts[self._order[position]]


@dataclass
class SampledGroups:
    """Groups sampled for one step."""

    groups: list[Group]  # to train on
    dropped: list[Group] = field(default_factory=list)  # removed by the algorithm's filter
    seconds: dict[str, float] = field(default_factory=dict)  # time spent, by part: generate, judge
    long_prompts: int = 0  # generated prompts that were replaced, because they had too many tokens
    metrics: dict[str, float] = field(default_factory=dict)  # of the source

    @property
    def all_groups(self) -> list[Group]:
        return [*self.groups, *self.dropped]


@dataclass
class OnPolicySource:
    """Samples every group when it is needed, with the current weights. Other sources derive from it.

    A checkpoint stores `state_dict` and `saved_groups`, so that a resumed run continues exactly.
    """

    cfg: TrainConfig
    algo: Algorithm
    collector: Collector
    prompts: PromptStream
    schedule: Schedule
    stopping: Stopping = field(default_factory=lambda: Stopping(grace_s=0.0))

    def __post_init__(self) -> None:
        self.seed, self.prompts_per_step = self.cfg.seed, self.cfg.train.prompts
        self.params = sampling_params(self.cfg.sampling, self.cfg.train.samples)
        self.cursor = self.prompts.cursor  # after the last complete step: an interrupted step is sampled again
        self._seen: Counter[str] = Counter()  # prompts of this step

    def next(self, state: RunState) -> SampledGroups:
        """The groups of a step. Adds the sampled tokens and answers to the state of the run."""
        self.stopping.check()
        self.collector.engine.reset_prefix_cache()  # as in a resumed run, which has no cached prompts
        self.collector.seconds.clear()
        self._seen = Counter()
        sampled = self._fill_batch(state)
        self.collector.engine.sleep()
        sampled.seconds = dict(self.collector.seconds)
        self.cursor = self.prompts.cursor
        return sampled

    def _fill_batch(self, state: RunState) -> SampledGroups:
        """Take `train.prompts` groups. Dropped groups are replaced, for as many rounds as the algorithm allows."""
        sampled, baselines, rejected = SampledGroups([]), list[Group](), self.prompts.rejected
        answers: list[Rollout] = []
        for _ in range(self.algo.zero_variance.rounds):
            wanted = self.prompts_per_step - len(sampled.groups)
            taken = self._take(wanted, state, len(answers))
            kept, dropped = self.algo.keep(taken)
            if self.algo.needs.greedy_rollouts and kept:
                baselines += self._sample_greedy_baselines(kept, state.step)
            sampled.groups += kept
            sampled.dropped += dropped
            answers = [rollout for group in (*sampled.all_groups, *baselines) for rollout in group.rollouts]
            complete = len(kept) == wanted or len(taken) < wanted
            if complete or self.schedule.done(state, len(answers)):
                break
        state.answers += len(answers)
        state.tokens += sum(answer.length for answer in answers)
        sampled.long_prompts = self.prompts.rejected - rejected
        return sampled

    def _take(self, count: int, state: RunState, answers: int) -> list[Group]:
        """Sample and judge `count` groups; fewer if the run needs no more. `answers`: number in the step so far."""
        prompts = [prompt for _, prompt in self._next_accepted(count, state.step)]
        return self.collector.collect(prompts, self.params, (self.seed, state.step), seen=self._seen)

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next prompts of the train split, in the order of the run, whether the algorithm accepts them or not."""
        prompts = self.prompts.next(count)
        self.cursor = self.prompts.cursor
        return prompts

    def _next_accepted(self, count: int, step: int) -> list[tuple[int, Prompt]]:
        """The next prompts that the algorithm accepts, with their positions in the stream.

        After a whole epoch of rejected prompts, any prompt is used.
        """
        accepted: list[tuple[int, Prompt]] = []
        rejected = 0
        while len(accepted) < count:
            position = self.prompts.cursor
            (prompt,) = self.prompts.next(1)
            if rejected >= len(self.prompts.prompts) or self.algo.pass_rates.accepts(prompt.id, step):
                accepted.append((position, prompt))
            else:
                rejected += 1
        return accepted

    def _sample_greedy_baselines(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Sample one greedy answer per prompt; only its reward is used, as the baseline of the group."""
        greedy = replace(self.params, n=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        answers = self.collector.collect([group.prompt for group in groups], greedy, (self.seed, step))
        self.algo.set_baselines(groups, answers)
        return answers

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def saved_groups(self) -> list[Group]:
        """Sampled groups that belong to the last `state_dict`, because they were not trained yet."""
        return []

    def load_state_dict(self, saved: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """Continue from this state and its `saved_groups`. A source that has sampled drops what it has."""
        self.cursor = self.prompts.cursor = saved["cursor"]

    def close(self) -> None:
        """End work in other threads."""


SETTINGS = "buffer.json"  # in a saved buffer's folder, beside its rollouts


@dataclass
class ReplayBuffer:
    """The last `capacity` groups, oldest first, with the advantages computed when they were sampled.

    Tokens carry the log-probabilities of the policy that sampled them (`engine_logprobs`), which the importance ratios
    of the loss use: a later policy can therefore learn from them.
    """

    capacity: int
    max_staleness: int = 0  # largest age of a group, in versions of the policy; 0: no limit
    with_replacement: bool = False
    groups: deque[Group] = field(default_factory=deque, repr=False)

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise UserError(f"the capacity of a replay buffer must be 1 or more, not {self.capacity}")
        self.groups = deque(self.groups, maxlen=self.capacity)

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Append groups; beyond the capacity the oldest are removed. Groups without rollouts are not kept."""
        self.groups.extend(group for group in groups if group.rollouts)

    def sample(self, count: int, version: int, seed: int = 0) -> list[Group]:
        """Up to `count` groups for a policy of this version. Groups that are too old are removed from the buffer.

        The choice depends only on seed, version and content of the buffer.
        """
        if self.max_staleness:
            fresh = [group for group in self.groups if version - version_of(group) <= self.max_staleness]
            self.groups = deque(fresh, maxlen=self.capacity)
        generator = random.Random(f"replay/{seed}/{version}")
        if not self.groups or count < 1:
            return []
        if self.with_replacement:
            return generator.choices(self.groups, k=count)
        return generator.sample(list(self.groups), k=min(count, len(self.groups)))

    def inherit(self, folder: str | Path, vocab_size: int, decode: Callable[[Sequence[int]], str]) -> None:
        """Add the groups that another run saved; they count as sampled one step before this run started.

        Versions of different runs cannot be compared. Ages therefore count the steps of this run
        only. Importance ratios do not depend on versions: they use the saved log-probabilities.
        """
        groups = list(ReplayBuffer.load(folder))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            first = rollout.turns[0]
            decoded = decode(first.completion.token_ids)  # without the space before an action that continues a reply
            if max(rollout.token_ids) >= vocab_size or decoded.strip() != first.text.strip():
                raise UserError(f"the buffer in {folder} has another tokenizer: load a buffer of the same model")
            for turn in rollout.turns:
                turn.completion.version, turn.completion.version_spans = -1, ()
        self.add(groups)

    def mean_age(self, version: int) -> float:
        """Mean age of the groups, in versions of the policy."""
        return sum(version - version_of(group) for group in self.groups) / max(len(self.groups), 1)

    def save(self, folder: str | Path) -> None:
        """Write JSON lines and arrays, like the rollouts of a run."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {name: getattr(self, name) for name in ("capacity", "max_staleness", "with_replacement")}
        write_rollouts(folder, 0, list(self.groups))
        write_json(folder / SETTINGS, settings)

    @classmethod
    def load(cls, folder: str | Path) -> ReplayBuffer:
        folder = Path(folder)
        settings = read_json(folder / SETTINGS)
        if not settings or not rollout_path(folder, 0).exists():
            raise UserError(f"{folder} is not a replay buffer: give a folder that ReplayBuffer.save has written")
        groups = deque(read_rollouts(folder, 0))
        try:
            return cls(**settings, groups=groups)
        except (TypeError, OverflowError) as error:
            raise UserError(f"{folder / SETTINGS} is damaged ({error}): give another replay buffer") from error

    def summary(self, version: int | None = None) -> str:
        """A description: one line for the buffer, and one per policy version that sampled groups in it."""
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        ages = f", mean age {self.mean_age(version):.1f}" if version is not None and rollouts else ""
        lines = [f"{len(self)} of {self.capacity} groups, {plural(len(rollouts), 'rollout')}{ages}"]
        for sampled_by, count in sorted(Counter(version_of(group) for group in self.groups).items()):
            version_rollouts = [r for group in self.groups if version_of(group) == sampled_by for r in group.rollouts]
            mean = sum(r.reward for r in version_rollouts) / len(version_rollouts)
            length = sum(r.length for r in version_rollouts) / len(version_rollouts)
            lines.append(
                f"version {sampled_by}: {plural(count, 'group')}, mean reward {mean:.3f}, mean length {length:.1f}"
            )
        return "\n".join(lines)


def version_of(group: Group) -> int:
    """Version of the oldest policy that sampled any token of the group."""
    return min(turn.completion.oldest_version for rollout in group.rollouts for turn in rollout.turns)


def mixed(fresh: Sequence[Group], replayed: Sequence[Group]) -> list[Group]:
    """Interleave both kinds evenly, so that each mini-batch gets its share of both."""
    keyed = [((index + 0.5) / len(part), group) for part in (fresh, replayed) for index, group in enumerate(part)]
    return [group for _, group in sorted(keyed, key=lambda pair: pair[0])]


@dataclass
class Replay:
    """Mixes groups of earlier steps into the batch of a step, according to the `[replay]` settings."""

    cfg: ReplayConfig
    seed: int
    buffer: ReplayBuffer | None = None  # None: nothing is replayed

    def __post_init__(self) -> None:
        if self.cfg.groups:
            self.make_buffer()

    def make_buffer(self) -> ReplayBuffer:
        cfg = self.cfg
        self.buffer = self.buffer or ReplayBuffer(cfg.capacity, cfg.max_staleness, cfg.with_replacement)
        return self.buffer

    def mix(self, groups: list[Group], version: int) -> tuple[list[Group], dict[str, float]]:
        """The batch to train on, and metrics. The groups are added to the buffer, for later steps."""
        if self.buffer is None:
            return groups, {}
        replayed = self.buffer.sample(self.cfg.groups, version, self.seed)
        batch = mixed(groups, replayed)
        metrics = {
            "replay/size": float(len(self.buffer)),
            "replay/age": self.buffer.mean_age(version),
            "replay/share": len(replayed) / max(len(batch), 1),
        }
        self.buffer.add(groups)
        return batch, metrics
