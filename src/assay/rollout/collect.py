"""Samples completions or episodes from an engine, decodes them and has them judged."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol, TypeVar

from assay.config import EvalConfig, SamplingConfig
from assay.engine.base import BaseEngine, CountReport, Request, RequestError, SampleCounter, SamplingParams
from assay.engine.client import ClientThread, EngineClient, connect, run_sync
from assay.envs.base import Env
from assay.mesh import Mesh
from assay.rewards import Judging, check_verdicts
from assay.rollout.episodes import (
    Episode,
    EpisodeRules,
    GroupInPlay,
    GroupPlayer,
    Limits,
    all_ended,
    as_group,
    request_seed,
)
from assay.system.awaiting import resolve
from assay.text import Renderer
from assay.types import Closeable, Group, Progress, Prompt, Rollout, Status, Turn, UserError, Verdict

T = TypeVar("T")
DEFAULT_NEW_TOKENS = 512  # of an evaluation or a chat without a training run


def sampling_params(cfg: SamplingConfig | EvalConfig, n: int, training: SamplingConfig | None = None) -> SamplingParams:
    """Sampling parameters of a config section. Without a length or stop strings, the values of training apply."""
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
    """Can interrupt work that takes long; see `assay.training.progress.Stopping`."""

    def interruptible(self, work: Callable[[], T]) -> T | None: ...

    def check(self) -> None: ...


@dataclass
class Collector(Closeable):
    """Turns prompts into groups of judged rollouts. A `with` block closes the judge and the environment."""

    engine: BaseEngine
    renderer: Renderer
    judge: Judging
    mesh: Mesh = field(default_factory=Mesh)  # prompts are divided among its data-parallel ranks
    stopper: Stopper | None = None
    env: Env | None = None  # prompts start episodes of it; None: one completion per sample
    limits: Limits = field(default_factory=Limits)  # of episodes
    seconds: dict[str, float] = field(default_factory=dict)  # time spent in generation and judging, accumulated
    first_failure: str = ""  # detail of the first verdict with status error
    progress: Progress | None = None  # receives how many answers of this rank are finished and judged
    keep_failures: bool = False  # answers to a request that failed get status error; False: an error is raised
    thread: ClientThread | None = None  # steps the engine; None: the thread that calls `collect` does
    judging: threading.Lock = field(default_factory=threading.Lock)  # the judge serves one thread at a time

    def close(self) -> None:
        """Release the processes and files of the judge and of the environment. The engine is not closed."""
        try:
            self.judge.close()
        finally:
            if self.env is not None:
                resolve(self.env.close())

    def collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: tuple[int, int],
        seen: Counter[str] | None = None,
        what: str = "sampling",
    ) -> list[Group]:
        """Return `params.n` judged rollouts for each prompt; `seed` is (run seed, step), `what` is for `progress`.

        Every rank is given the same prompts, serves a part of them, and returns all groups.
        A prompt that is repeated within a step gets different noise; `seen` carries the counts over several calls.
        """
        requests = self.requests_for(prompts, params, seed, seen)
        groups = self._serve_on_all_ranks(requests, what)
        self.check_verdicts(groups)
        return groups

    def requests_for(
        self, prompts: Sequence[Prompt], params: SamplingParams, seed: tuple[int, int], seen: Counter[str] | None = None
    ) -> list[tuple[Prompt, Request]]:
        """The requests of `collect`, with their prompts."""
        seen = Counter() if seen is None else seen
        params = with_stops(params, self.renderer, self.env)
        contexts = self.renderer.all_prompt_ids(prompts)
        self.check_lengths(prompts, contexts)
        requests = []
        for prompt, ids in zip(prompts, contexts, strict=True):
            suffix = f"#{seen[prompt.id]}" if seen[prompt.id] else ""
            requests.append((prompt, Request(ids, params, request_seed(*seed, prompt.id + suffix), name=prompt.id)))
            seen[prompt.id] += 1
        return requests

    def check_verdicts(self, groups: Sequence[Group]) -> None:
        """Raise a `UserError` if a reward is not finite; remember the first failure of the judge."""
        verdicts = [r.verdict for group in groups for r in group.rollouts if r.verdict]
        failures = (verdict.detail for verdict in verdicts if verdict.status is Status.ERROR)
        self.first_failure = self.first_failure or next(failures, "")
        check_verdicts(verdicts, self.reward_source, *(("the environment",) if self.env else ()))

    @property
    def reward_source(self) -> str:
        """Where rewards come from, for messages."""
        if self.env is None:
            return "the judge"
        return "the environment, or its judge," if self.env.judged else "the environment"

    def _serve_on_all_ranks(self, requests: Sequence[tuple[Prompt, Request]], what: str) -> list[Group]:
        """Serve this rank's part and gather all groups in the order of prompts. An error is raised on all ranks."""
        rank_requests = requests[self.mesh.dp_rank :: self.mesh.dp_size]
        result: list[Group] | str | None
        try:
            report = self._report_to(what, [request.params for _, request in rank_requests])
            work = partial(self._serve, rank_requests, report)
            alone = self.mesh.tp_size == 1  # ranks that serve a model together must not be interrupted separately
            result = self.stopper.interruptible(work) if self.stopper and alone else work()
        except UserError as error:
            if self.mesh.world == 1:
                raise
            result = str(error)
        results = self.mesh.all_gather_objects(result)
        if failure := next((part for part in results if isinstance(part, str)), None):
            raise UserError(failure)
        if self.stopper and any(part is None for part in results):
            self.stopper.check()
        parts = [part for part in results if isinstance(part, list)][:: self.mesh.tp_size]
        return [parts[i % len(parts)][i // len(parts)] for i in range(len(requests))]

    def _report_to(self, what: str, params: Sequence[SamplingParams]) -> CountReport | None:
        """A callback that passes numbers of answers and tokens to `progress`."""
        if (progress := self.progress) is None:
            return None
        total, limit = sum(p.n for p in params), max((p.max_new_tokens for p in params), default=0)

        def report(done: int, tokens: int) -> None:
            remaining = min(total * limit - tokens, (total - done) * limit)
            progress(what, done, total, "answers", tokens, tokens + max(remaining, 0))

        return report

    def _serve(self, requests: Sequence[tuple[Prompt, Request]], report: CountReport | None) -> list[Group]:
        """Groups of these requests; the first of the ranks that serve a model together returns them."""
        started, counter = time.perf_counter(), SampleCounter(report)
        client = self.thread.client if self.thread is not None else connect(self.engine, self._strict)
        if not client.leads:
            return []
        with client.showing(counter):
            if self.thread is not None:
                played = self.thread.run(self._play(client, requests, counter))
            else:
                with counter.watching(self.engine):
                    played = run_sync(self._play(client, requests, counter), client)
        return [] if self.mesh.tp_rank else self.finish(played, started)

    async def _play(
        self, client: EngineClient, requests: Sequence[tuple[Prompt, Request]], counter: SampleCounter
    ) -> list[GroupInPlay]:
        """Play all groups to their end. Raises a `RequestError` if some have failed, unless failures are kept."""
        player = self.player(client, counter)
        groups = [player.start(*request) for request in requests]
        try:
            errors = await all_ended([group.result for group in groups])
        finally:
            for group in groups:
                group.cancel()
        counter.show()
        all_failed = all(group.result.exception() for group in groups)
        if errors and (all_failed or not self.keep_failures or self.env is not None):
            raise RequestError(errors)
        return groups

    def player(self, client: EngineClient, counter: SampleCounter | None = None) -> GroupPlayer:
        """Plays groups of this collector's kind."""
        rules = None if self.env is None else self.episode_rules(self.env)
        return GroupPlayer(client, rules, counter)

    def episode_rules(self, env: Env) -> EpisodeRules:
        return EpisodeRules(self.engine.info, self.renderer, env, self.limits)

    @property
    def _strict(self) -> bool:
        """Whether the engine waits for environments. If not, batches depend on the clock.

        It waits in synchronous runs on CPUs, which are reproducible to the last bit, and where several ranks have to
        make the same calls.
        """
        slow = self.env is not None and self.env.slow
        return not slow or self.mesh.device.type == "cpu" or self.mesh.tp_size > 1

    def finish(self, played: Sequence[GroupInPlay], started: float | None = None) -> list[Group]:
        """Judge groups that have ended. `started`: see `_judge`."""
        if self.env is not None:
            prompts, episodes = [group.prompt for group in played], [group.episodes for group in played]
            return self.judge_episodes(prompts, episodes, started)
        failures = {index: error for index, group in enumerate(played) if (error := group.result.exception())}
        groups = self._as_groups(played)
        self.judge_groups([group for index, group in enumerate(groups) if index not in failures], started)
        for index, error in failures.items():
            for rollout in groups[index].rollouts:
                rollout.verdict = Verdict(0.0, Status.ERROR, detail=str(error))
        return groups

    def _as_groups(self, played: Sequence[GroupInPlay]) -> list[Group]:
        """Groups of decoded completions, which are not judged yet. Those of requests that failed are empty."""
        completions = [group.completions for group in played]
        texts = iter(self.renderer.decode_all([c.appended for samples in completions for c in samples]))
        groups = []
        for group, samples in zip(played, completions, strict=True):
            context = list(group.request.prompt_ids) if self.renderer.has_tokens else []
            turns = [Turn(context, completion, next(texts)) for completion in samples]
            rollouts = [Rollout(group.prompt, sample, [turn]) for sample, turn in enumerate(turns)]
            groups.append(Group(group.prompt, rollouts))
        return groups

    def judge_groups(self, groups: Sequence[Group], started: float | None = None) -> None:
        """Set the verdicts of groups whose rollouts have one turn. `started`: see `_judge`."""
        answers = [(group.prompt, [rollout.text for rollout in group.rollouts]) for group in groups]
        for group, verdicts in zip(groups, self._judge(answers, started), strict=True):
            for rollout, verdict in zip(group.rollouts, verdicts, strict=True):
                rollout.verdict, rollout.reward = verdict, verdict.reward

    def judge_episodes(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Episode]], started: float | None = None
    ) -> list[Group]:
        """Groups of finished episodes, whose answers are judged if the environment leaves that to the run's judge."""
        pending = [[(episode, episode.answer) for episode in group if episode.answer is not None] for group in groups]
        pending = [answered for answered in pending if answered]
        answers = [(answered[0][0].prompt, [answer for _, answer in answered]) for answered in pending]
        for answered, verdicts in zip(pending, self._judge(answers, started), strict=True):
            for (episode, _), verdict in zip(answered, verdicts, strict=True):
                episode.verdict = verdict
                episode.turns[-1].reward += verdict.reward
        return [as_group(prompt, episodes) for prompt, episodes in zip(prompts, groups, strict=True)]

    def _judge(self, answers: Sequence[tuple[Prompt, list[str]]], started: float | None) -> list[list[Verdict]]:
        """Judge the answers to each prompt; record how long it took.

        `started`: when the generation of these answers began, whose duration is recorded as well.
        """
        generated = time.perf_counter()
        items = [(texts, prompt.answer, self.judge.fields(prompt)) for prompt, texts in answers]
        progress = None if self.progress is None or started is None else partial(self.progress, "judging")
        with self.judging:
            verdicts = self.judge.judge_groups(items, progress)
            spent = {"judge": time.perf_counter() - generated}
            if started is not None:
                spent["generate"] = generated - started
            for part, seconds in spent.items():
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        return verdicts

    def check_lengths(self, prompts: Sequence[Prompt], contexts: Sequence[Sequence[int]]) -> None:
        """Raise a `UserError` if a prompt leaves no space for a completion in the context."""
        limit = self.engine.info.max_length
        for prompt, ids in zip(prompts, contexts, strict=True):
            if len(ids) >= limit:
                raise UserError(
                    f"prompt {prompt.id} has {len(ids)} tokens, which leaves no space in a context of {limit}: remove "
                    "it, shorten it (fewer few-shot examples?), or raise model.max_length (or engine.kv_cache_gib)"
                )
