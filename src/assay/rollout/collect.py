"""Samples answers or episodes from the engine, decodes them and has them judged."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol, TypeVar

from assay.config import EvalConfig, SamplingConfig
from assay.engine.base import Engine, Request, SamplingParams, generate
from assay.envs.base import Env
from assay.mesh import Mesh
from assay.rewards import JudgePool, check_verdicts
from assay.rollout.episodes import EpisodeRunner, Limits, as_group, request_seed
from assay.text import Renderer
from assay.types import Group, Prompt, Rollout, Turn, UserError

T = TypeVar("T")
DEFAULT_NEW_TOKENS = 512  # of an evaluation or a chat without a training run
STEP_THREADS = 8  # that slow environments are stepped in


def sampling_params(cfg: SamplingConfig | EvalConfig, n: int, training: SamplingConfig | None = None) -> SamplingParams:
    """Sampling parameters of a config section. A length and stop strings that are not set are those of training."""
    values = cfg.model_dump(include={field.name for field in fields(SamplingParams)})
    values["max_new_tokens"] = cfg.max_new_tokens or (training.max_new_tokens if training else DEFAULT_NEW_TOKENS)
    values["stop"] = tuple(cfg.stop or (training.stop if training else ()))
    return SamplingParams(n=n, **values)


def with_stops(params: SamplingParams, renderer: Renderer, env: Env | None = None) -> SamplingParams:
    """Add the stop tokens and stop strings of the chat template, and the stop strings of the environment."""
    return replace(
        params,
        stop_token_ids=(*params.stop_token_ids, *renderer.stop_token_ids),
        stop=(*params.stop, *renderer.stop, *(env.stop if env else ())),
    )


class Stopper(Protocol):
    """May break off what takes long; see `assay.train.stopping`."""

    def leavable(self, work: Callable[[], T]) -> T | None: ...

    def check(self) -> None: ...


@dataclass
class Collector:
    """Everything it takes to turn prompts into judged answers."""

    engine: Engine
    renderer: Renderer
    judge: JudgePool
    mesh: Mesh = field(default_factory=Mesh)  # its data-parallel ranks share the prompts
    stopper: Stopper | None = None
    env: Env | None = None  # whose episodes the prompts begin; else each is answered once
    limits: Limits = field(default_factory=Limits)  # of episodes
    seconds: dict[str, float] = field(default_factory=dict)  # where the time went, until somebody clears it

    def collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: tuple[int, int],
        seen: Counter[str] | None = None,
    ) -> list[Group]:
        """`params.n` judged answers to each prompt; `seed` is (run seed, step).

        On many ranks, all are handed the same prompts, each answers its share, and all get all groups.
        A prompt that comes again within a step gets noise of its own; `seen` carries the count over several calls.
        """
        seen = Counter() if seen is None else seen
        params = with_stops(params, self.renderer, self.env)
        contexts = self.renderer.all_prompt_ids(prompts)
        self.check_lengths(prompts, contexts)
        asked = []
        for prompt, ids in zip(prompts, contexts, strict=True):
            again = f"#{seen[prompt.id]}" if seen[prompt.id] else ""
            asked.append((prompt, Request(ids, params, request_seed(*seed, prompt.id + again), name=prompt.id)))
            seen[prompt.id] += 1
        groups = self._shared(asked)
        verdicts = [r.verdict for group in groups for r in group.rollouts if r.verdict]
        check_verdicts(verdicts, self.giver, *(("the environment",) if self.env else ()))
        return groups

    @property
    def giver(self) -> str:
        """Who gives the rewards, in words."""
        if self.env is None:
            return "the judge"
        return "the environment, or its judge," if self.env.judged else "the environment"

    def _shared(self, asked: Sequence[tuple[Prompt, Request]]) -> list[Group]:
        """Answer this rank's share and gather all groups in the order of prompts. All ranks raise an error of one."""
        own = asked[self.mesh.dp_rank :: self.mesh.dp_size]
        answers: list[Group] | str | None
        try:
            work = partial(self._answer, own)
            alone = self.mesh.tp_size == 1  # ranks of one model must not leave their common steps one by one
            answers = self.stopper.leavable(work) if self.stopper and alone else work()
        except UserError as error:
            if self.mesh.world == 1:
                raise
            answers = str(error)
        found = self.mesh.all_gather_objects(answers)
        if failure := next((part for part in found if isinstance(part, str)), None):
            raise UserError(failure)
        if self.stopper and any(part is None for part in found):
            self.stopper.check()
        shares = [part for part in found if isinstance(part, list)][:: self.mesh.tp_size]
        return [shares[i % len(shares)][i // len(shares)] for i in range(len(asked))]

    def _answer(self, asked: Sequence[tuple[Prompt, Request]]) -> list[Group]:
        if self.env is not None:
            return self._play(asked, self.env)
        started = time.perf_counter()
        answers = generate(self.engine, [request for _, request in asked])
        if self.mesh.tp_rank:
            return []  # the first of the ranks that serve one model returns the groups
        texts = iter(self.renderer.decode_all([c.token_ids for completions in answers for c in completions]))
        groups = []
        for (prompt, request), completions in zip(asked, answers, strict=True):
            context = list(request.prompt_ids)
            turns = [Turn(context, completion, next(texts)) for completion in completions]
            groups.append(Group(prompt, [Rollout(prompt, sample, [turn]) for sample, turn in enumerate(turns)]))
        generated = time.perf_counter()
        self._judge([rollout for group in groups for rollout in group.rollouts])
        self._count(started, generated)
        return groups

    def _play(self, asked: Sequence[tuple[Prompt, Request]], env: Env) -> list[Group]:
        """Run episodes instead of sampling single answers; answers left to the run's judge are judged together."""
        started = time.perf_counter()
        # Threads make the order depend on the clock: not on CPUs, where runs are reproducible to the last bit, and not
        # where several ranks have to make the same calls.
        threads = STEP_THREADS if self.mesh.device.type != "cpu" and self.mesh.tp_size == 1 else 0
        groups = EpisodeRunner(self.engine, self.renderer, env, self.limits, threads).run(asked)
        if self.mesh.tp_rank:
            return []
        generated = time.perf_counter()
        open_ones = [(e, e.answer) for episodes in groups for e in episodes if e.answer is not None]
        found = self.judge.judge([(answer, e.prompt.answer, e.prompt.fields) for e, answer in open_ones])
        for (episode, _), verdict in zip(open_ones, found, strict=True):
            episode.verdict = verdict
            episode.turns[-1].reward += verdict.reward
        self._count(started, generated)
        return [as_group(prompt, episodes) for (prompt, _), episodes in zip(asked, groups, strict=True)]

    def _count(self, started: float, generated: float) -> None:
        for part, spent in (("generate", generated - started), ("judge", time.perf_counter() - generated)):
            self.seconds[part] = self.seconds.get(part, 0.0) + spent

    def _judge(self, rollouts: Sequence[Rollout]) -> None:
        verdicts = self.judge.judge([(r.text, r.prompt.answer, r.prompt.fields) for r in rollouts])
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            rollout.verdict, rollout.reward = verdict, verdict.reward

    def check_lengths(self, prompts: Sequence[Prompt], contexts: Sequence[Sequence[int]]) -> None:
        """Each prompt has to leave room for an answer."""
        limit = self.engine.info.max_length
        for prompt, ids in zip(prompts, contexts, strict=True):
            if len(ids) >= limit:
                raise UserError(
                    f"prompt {prompt.id} has {len(ids)} tokens, which leaves no room in a context of {limit}: "
                    "leave it out, shorten it (fewer few-shot examples?), or raise model.max_length (or engine.memory)"
                )
