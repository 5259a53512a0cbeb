"""Sources of training data: the order of prompts, and the groups of rollouts that a step trains on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from assay.algos import Algorithm
from assay.config import TrainConfig
from assay.rollout import Collector, sampling_params
from assay.train.state import RunState, Schedule
from assay.train.stopping import Stopping
from assay.types import Group, Prompt

MAX_SHUFFLED = 1 << 24  # longer splits are generated: their prompts are independent, and are used in order


class PromptStream:
    """Endless epochs over a split, each in a seeded random order. The state is `cursor`."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        self.prompts, self.seed, self.cursor = prompts, seed, 0
        self._shuffles = shuffle and len(prompts) <= MAX_SHUFFLED
        self._epoch = -1
        self._order: Sequence[int] = ()

    def next(self, count: int) -> list[Prompt]:
        prompts = [self._at(index) for index in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return prompts

    def _at(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._epoch_order(epoch)
        return self.prompts[self._order[position]]

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if not self._shuffles:
            return range(len(self.prompts))
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


@dataclass
class SampledGroups:
    """Groups sampled for one step."""

    groups: list[Group]  # to train on
    dropped: list[Group] = field(default_factory=list)  # removed by the algorithm's filter
    seconds: dict[str, float] = field(default_factory=dict)  # time spent, by part: generate, judge

    @property
    def all_groups(self) -> list[Group]:
        return [*self.groups, *self.dropped]


class GroupSource(Protocol):
    """Provides the groups of a step. A checkpoint stores `state_dict`, so that a resumed run continues exactly.

    `next` is called once per step and adds the sampled tokens and answers to the state of the run. `next_prompts` is
    for loops that sample by themselves.
    """

    prompts: PromptStream

    def next(self, state: RunState) -> SampledGroups: ...

    def next_prompts(self, count: int) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: Mapping[str, Any]) -> None: ...


class OnPolicySource:
    """Samples every group when it is needed, with the current weights."""

    def __init__(
        self,
        cfg: TrainConfig,
        algo: Algorithm,
        collector: Collector,
        prompts: PromptStream,
        schedule: Schedule,
        stopping: Stopping | None = None,
    ) -> None:
        self.algo, self.collector, self.prompts, self.schedule = algo, collector, prompts, schedule
        self.seed, self.prompts_per_step = cfg.seed, cfg.train.prompts
        self.params = sampling_params(cfg.sampling, cfg.train.samples)
        self.stopping = stopping
        self.cursor = prompts.cursor  # after the last complete step: an interrupted step is sampled again

    def next(self, state: RunState) -> SampledGroups:
        """Sample `train.prompts` groups. Dropped groups are replaced, for as many rounds as the algorithm allows."""
        if self.stopping:
            self.stopping.check()
        self.collector.engine.reset_prefix_cache()  # as in a resumed run, which has no cached prompts
        self.collector.seconds.clear()
        sampled, baselines = SampledGroups([]), list[Group]()
        seen: Counter[str] = Counter()
        for _ in range(self.algo.sampling_rounds):
            prompts = self._next_accepted(self.prompts_per_step - len(sampled.groups), state.step)
            judged = self.collector.collect(prompts, self.params, (self.seed, state.step), seen=seen)
            kept, dropped = self.algo.keep(judged)
            if self.algo.needs.greedy_rollouts and kept:
                baselines += self._sample_greedy_baselines(kept, state.step)
            sampled.groups += kept
            sampled.dropped += dropped
            answers = count_answers([*sampled.all_groups, *baselines])
            if len(sampled.groups) == self.prompts_per_step or self.schedule.done(state, answers):
                break
        self.collector.engine.sleep()
        sampled.seconds = dict(self.collector.seconds)
        self.cursor = self.prompts.cursor
        state.answers += answers
        state.tokens += sum(r.length for group in (*sampled.all_groups, *baselines) for r in group.rollouts)
        return sampled

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next prompts of the train split, in the order of the run, whether the algorithm accepts them or not."""
        prompts = self.prompts.next(count)
        self.cursor = self.prompts.cursor
        return prompts

    def _next_accepted(self, count: int, step: int) -> list[Prompt]:
        """The next prompts that the algorithm accepts. After a whole epoch of rejected prompts, any prompt is used."""
        accepted: list[Prompt] = []
        rejected = 0
        while len(accepted) < count:
            (prompt,) = self.prompts.next(1)
            if rejected >= len(self.prompts.prompts) or self.algo.accepts_prompt(prompt.id, step):
                accepted.append(prompt)
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

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.cursor = self.prompts.cursor = saved.get("cursor", 0)


def count_answers(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)
