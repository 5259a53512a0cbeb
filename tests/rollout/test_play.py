"""Concurrent episodes: the same trajectories as in synchronous rounds in fewer steps, time limits, errors, no leaks."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from processes import start
from waiting import comes_true, until

from assay.bench import engine as bench
from assay.bench.engine import Rounds
from assay.engine import Request, RequestError, SamplingParams, make_engine
from assay.engine.client import ClientThread
from assay.engine.sequence import BLOCK_SIZE
from assay.envs import Env, make_env
from assay.mesh import Mesh, init_mesh
from assay.models import build_preset
from assay.rewards import JudgePool
from assay.rollout import Collector, Limits, episodes
from assay.tasks import make_task
from assay.text import Renderer, char_tokenizer, word_tokenizer
from assay.training.async_source import GroupStream, Ticket
from assay.types import Group, Rollout, Status, UserError

PARAMS = SamplingParams(n=3, max_new_tokens=60)


class Chatter(bench.Chatter):
    """Continues up to four times after any action; actions of a random policy have many lengths."""

    max_steps = 5


def collector(
    env: Env,
    limits: Limits = Limits(step_tokens=24),  # noqa: B008
    length: int = 320,
    dtype: torch.dtype = torch.float32,
    device: str = "cuda",
    **options: Any,
) -> Collector:
    """`device`: of the mesh. If it is a GPU, slow environments are stepped in threads; the engine runs on the CPU."""
    words = getattr(env, "words", None)
    tokenizer = word_tokenizer(words()) if words else char_tokenizer()
    policy = build_preset("nano", tokenizer.vocab_size, length, seed=3).to(dtype)
    renderer = Renderer(tokenizer)
    options |= {"max_length": length, "decode": renderer.decode}
    engine = make_engine("native", policy, device="cpu", dtype=dtype, **options)
    mesh = Mesh(device=torch.device(device))
    return Collector(engine, renderer, JudgePool(env.judge(), 0, 5.0), mesh, env=env, limits=limits)


def rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def assert_nothing_left(part: Collector) -> None:
    engine: Any = part.engine
    assert not (engine.scheduler.kept or engine.blocks.in_use or engine.scheduler.unfinished)


def as_data(groups: Sequence[Group]) -> list[Any]:
    return [
        (r.token_ids, r.loss_mask, r.reward, r.verdict, r.cut_off, [turn.text for turn in r.turns])
        for r in rollouts(groups)
    ]


def deferred(name: str, **args: Any) -> Env:
    env: Any = make_env(name, task=make_task("abacus", max_value=15), **args)
    env.defer_judging = True
    return env


ENVS = {
    "guess": lambda: make_env("guess", high=6, tries=5),
    "stepwise": lambda: deferred("stepwise", separator=";"),
    "calculator": lambda: deferred("calculator"),
    "chatter": Chatter,
}


@pytest.mark.parametrize(("name", "max_batch"), [("guess", 64), ("stepwise", 5), ("calculator", 64), ("chatter", 5)])
def test_trajectories_equal_those_of_synchronous_rounds(name: str, max_batch: int) -> None:
    env = ENVS[name]()
    part = collector(env, max_batch=max_batch)
    prompts = env.prompts("train")[:8]
    ours = part.collect(prompts, PARAMS, (4, 2))
    assert_nothing_left(part)
    assert any(len(rollout.turns) > 1 for rollout in rollouts(ours))
    engine: Any = part.engine
    engine.reset_prefix_cache()
    part.engine = Rounds(engine)  # type: ignore[assignment]
    assert as_data(part.collect(prompts, PARAMS, (4, 2))) == as_data(ours)


def test_episode_longer_than_the_kv_cache_is_truncated() -> None:
    """As at the end of the context: a sequence cannot be longer than the whole cache."""
    env = Chatter()
    prompts = env.prompts("train")[:6]
    part = collector(env, max_batch=4, kv_cache_gib=6.5e-5)
    engine: Any = part.engine
    held = engine.blocks.total * BLOCK_SIZE
    assert held < 80 and engine.info.max_length == held + 1  # the last token is sampled and not stored
    found = rollouts(part.collect(prompts, PARAMS, (7, 1)))
    cut = [rollout for rollout in found if rollout.cut_off]
    assert cut and len(cut) < len(found)
    for rollout in cut:
        assert rollout.verdict and rollout.verdict.status is Status.NO_ANSWER
        assert f"context of {held + 1} tokens" in rollout.verdict.detail and rollout.truncated
    assert_nothing_left(part)


class WithoutHandles:
    """The same engine without the `handles` capability."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.step, self.abort, self.release = engine, engine.step, engine.abort, engine.release
        self.info = replace(engine.info, capabilities=replace(engine.info.capabilities, handles=False))
        self.lengths: list[int] = []  # prompt lengths

    def add(self, request: Request) -> int:
        assert not request.keep and request.continues is None
        self.lengths.append(len(request.prompt_ids))
        return self.engine.add(request)


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_engine_without_handles_gets_all_tokens_again(name: str) -> None:
    env = ENVS[name]()
    part = collector(env, max_batch=16)
    prompts = env.prompts("train")[:8]
    expected = part.collect(prompts, PARAMS, (4, 2))
    engine: Any = part.engine
    engine.reset_prefix_cache()
    resending: Any = WithoutHandles(engine)
    part.engine = resending
    found = part.collect(prompts, PARAMS, (4, 2))
    assert as_data(found) == as_data(expected)
    assert_nothing_left(replace(part, engine=engine))
    contexts = [len(group.rollouts[0].turns[0].context_ids) for group in found]
    for one, other in zip(rollouts(found), rollouts(expected), strict=True):
        assert one.engine_logprobs == pytest.approx(other.engine_logprobs, abs=1e-5)
        sizes = [len(turn.context_ids) + len(turn.completion.token_ids) for turn in one.turns]
        contexts += [sum(sizes[:place]) + len(turn.context_ids) for place, turn in enumerate(one.turns) if place]
    assert sorted(resending.lengths) == sorted(contexts) and len(contexts) > len(found)


class Sleeper(Chatter):
    """The first step of the first episode does not return until other episodes have taken 20 steps."""

    slow = True
    max_steps = 4

    def __init__(self) -> None:
        self.others, self.enough, self.lock = [0], threading.Event(), threading.Lock()

    def step(self, action: str) -> Any:
        if self.seed == FIRST and not self.steps:
            assert self.enough.wait(60), "the engine waits for this step"
        elif self.seed != FIRST:
            with self.lock:
                self.others[0] += 1
                if self.others[0] == 20:
                    self.enough.set()
        self.steps += 1
        return "go on", 0.25, self.steps == 4, False, {"thread": threading.current_thread().name}


FIRST = Chatter().prompts("train")[0].fields["episode_seed"]


class AsyncSleeper(Sleeper):
    async def step(self, action: str) -> Any:
        if self.seed == FIRST:
            assert await asyncio.to_thread(self.enough.wait, 60), "the engine waits for this step"
        return super().step(action)


@pytest.mark.parametrize(  # in a thread of the engine, also on a CPU
    ("where", "kind"), [("gpu", Sleeper), ("thread", Sleeper), ("thread", AsyncSleeper)]
)
def test_engine_continues_during_a_slow_environment_step(where: str, kind: type[Sleeper]) -> None:
    env = kind()
    prompts = [replace(p, id=f"p{i}") for i, p in enumerate(Chatter().prompts("train")[:10])]
    part = collector(env, max_batch=12)
    thread = ClientThread(part.engine)
    found = (part if where == "gpu" else replace(part, mesh=Mesh(), thread=thread)).collect(prompts, PARAMS, (1, 1))
    thread.close()
    assert env.enough.is_set() and env.others[0] == 27 * 4
    assert all(r.verdict and r.verdict.status is Status.OK and len(r.turns) == 4 for r in rollouts(found))
    assert_nothing_left(part)
    env.enough.set()
    part.engine.reset_prefix_cache()
    part.engine = Rounds(part.engine)  # type: ignore[assignment]
    assert as_data(part.collect(prompts, PARAMS, (1, 1))) == as_data(found)


def test_slow_environments_use_no_threads_on_a_cpu() -> None:
    class Named(Chatter):
        slow = True

        def step(self, action: str) -> Any:
            assert threading.current_thread() is threading.main_thread()
            return super().step(action)

    part = collector(Named(), device="cpu", max_batch=12)
    found = part.collect(Chatter().prompts("train")[:3], PARAMS, (1, 1))
    assert Status.ERROR not in {r.verdict.status for r in rollouts(found) if r.verdict}


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # of the mesh only: without and with threads
def test_errors_and_time_limits_of_steps_end_only_their_episodes(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(episodes, "MIN_STEP_S", 0.2)
    prompts = Chatter().prompts("train")[:4]

    class Hanging(Chatter):
        slow = True

        def step(self, action: str) -> Any:
            if self.seed == prompts[1].fields["episode_seed"]:
                raise KeyError("lost")
            return threading.Event().wait() if self.seed == FIRST else super().step(action)

    part = collector(Hanging(), Limits(step_tokens=24, seconds=0.2), device=device, max_batch=12)
    found = part.collect(prompts, replace(PARAMS, n=1), (1, 1))
    first, second, *others = [rollout.verdict for rollout in rollouts(found) if rollout.verdict]
    assert first.status is Status.ERROR and "longer than 0.2 s" in first.detail
    assert second.status is Status.ERROR and "KeyError" in second.detail
    assert len(others) == 2 and Status.ERROR not in {verdict.status for verdict in others}
    assert_nothing_left(part)


@pytest.mark.parametrize("how", ["plain", "slow", "async"])
def test_long_step_without_a_time_limit_is_reported(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(episodes, "REPORT_S", 0.05)
    env = Chatter()
    env.slow = how == "slow"

    def step(episode: Env, action: str) -> Any:
        comes_true(lambda: bool(found), 30)
        return Chatter.step(episode, action)  # type: ignore[arg-type]

    async def step_async(episode: Env, action: str) -> Any:
        return await asyncio.to_thread(step, episode, action)

    one = step_async if how == "async" else step
    monkeypatch.setattr(env, "step_all", lambda envs, actions: [one(*pair) for pair in zip(envs, actions, strict=True)])
    part = collector(env, Limits(step_tokens=1), max_batch=4)  # both episodes act at the same time
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        part.collect(Chatter().prompts("train")[:1], replace(PARAMS, n=2), (1, 1))
    said = "a step of 2 episodes" if how == "plain" else "a step"
    assert str(found[0].message).startswith(f"{env.name}: {said} has been running for 0.05 s; set env.max_seconds")


class AsyncChatter(Chatter):
    """`Chatter` with async methods, whose steps end in an order that depends on the clock."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(random.random() / 500)
        return super().step(action)


def test_async_environment_gives_the_same_bits_as_a_plain_one() -> None:
    """Results are applied in the order of requests and samples, whatever the order in which the steps end."""
    prompts = Chatter().prompts("train")[:8]
    assert list(AsyncChatter().prompts("train")[:8]) == list(prompts)
    found = []
    for env in (Chatter(), AsyncChatter(), AsyncChatter()):
        part = collector(env, device="cpu", max_batch=12)
        added, engine = [], cast(Any, part.engine)
        add = engine.add
        engine.add = lambda request, add=add, added=added: (added.append(request), add(request))[1]
        groups = part.collect(prompts, PARAMS, (3, 3))
        assert_nothing_left(part)
        logprobs = [rollout.engine_logprobs for rollout in rollouts(groups)]
        found.append((as_data(groups), logprobs, [(r.prompt_ids, r.seed) for r in added]))
    assert found[0] == found[1] == found[2]


class Waiting(Chatter):
    """The first steps of all episodes return only when `together` of them are running."""

    def __init__(self, together: int) -> None:
        self.barrier = asyncio.Barrier(together)

    async def step(self, action: str) -> Any:
        if not self.steps:
            async with asyncio.timeout(30):
                await self.barrier.wait()
        return super().step(action)


@pytest.mark.parametrize("where", ["cpu", "loop", "thread", "slow"])
def test_async_steps_run_concurrently_without_threads(where: str) -> None:
    env = Waiting(24)
    env.slow = where == "slow"
    part = collector(env, Limits(step_tokens=1, seconds=60.0), max_batch=24)
    prompts, params = Chatter().prompts("train")[:8], replace(PARAMS, n=3)
    thread, before, threads = ClientThread(part.engine), set(threading.enumerate()), set()
    env.step_all = lambda *given: (threads.update(threading.enumerate()), Chatter.step_all(env, *given))[1]  # type: ignore[method-assign]

    async def cell() -> list[Group]:  # of a notebook
        return part.collect(prompts, params, (1, 1))

    if where in ("thread", "slow"):
        part.thread = thread
    groups = asyncio.run(cell()) if where == "loop" else part.collect(prompts, params, (1, 1))
    thread.close()
    assert Status.ERROR not in {r.verdict.status for r in rollouts(groups) if r.verdict}
    assert not [one for one in threads - before if one.name == "assay-env"]
    assert_nothing_left(part)


@pytest.mark.parametrize("slow", [False, True])
def test_errors_and_time_limits_of_async_steps_end_only_their_episodes(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    monkeypatch.setattr(episodes, "MIN_STEP_S", 0.2)
    released: list[int] = []

    class Failing(Chatter):
        async def step(self, action: str) -> Any:
            if self.number == 0:
                raise KeyError("lost")
            if self.number == 1:
                raise asyncio.CancelledError
            if self.number == 2:
                sys.exit(1)
            if self.number == 3:
                return "too short"
            try:
                await asyncio.sleep(60 if self.number == 4 else 0)
            finally:
                released.append(self.number)
            return "go on", 1.0, True, False, {}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.number = int(options["prompt"].id) if options else 0
            return super().reset(seed=seed)

    env = Failing()
    env.slow = slow
    prompts = [replace(prompt, id=str(i)) for i, prompt in enumerate(Chatter().prompts("train")[:6])]
    part = collector(env, Limits(step_tokens=4, seconds=0.2), max_batch=12)
    groups = part.collect(prompts, replace(PARAMS, n=1), (1, 1))
    *failed, fine = [rollout.verdict for rollout in rollouts(groups) if rollout.verdict]
    assert {verdict.status for verdict in failed} == {Status.ERROR} and fine.status is Status.OK
    details = "KeyError", "CancelledError", "SystemExit", "step must return", "longer than 0.2 s"
    assert all(text in verdict.detail for verdict, text in zip(failed, details, strict=True)), failed
    until(lambda: sorted(released) == [4, 5], 30)  # the event loop of the environment is cancelling the step
    assert_nothing_left(part)


def test_dropped_group_cancels_its_async_steps() -> None:
    events: list[str] = []
    running = threading.Event()

    class Endless(Chatter):
        async def step(self, action: str) -> Any:
            try:
                running.set()
                await asyncio.Event().wait()
            finally:
                events.append("cancelled")

    part = collector(Endless(), Limits(step_tokens=1), max_batch=4)
    ((prompt, request),) = part.requests_for(Chatter().prompts("train")[:1], replace(PARAMS, n=1), (1, 1))
    thread = ClientThread(part.engine)
    stream = GroupStream(part, thread)
    ticket = Ticket(0, 0, prompt, request, 0)
    stream.start([ticket])
    assert running.wait(30)
    assert stream.drop([ticket]) == [1]
    until(lambda: events == ["cancelled"], 30)
    stream.close()
    thread.close()
    assert_nothing_left(part)


def test_failing_async_reset_is_an_error_of_the_run() -> None:
    class Broken(Chatter):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if options:
                raise OSError("no connection")
            return super().reset(seed=seed)

    part = collector(Broken(), device="cpu", max_batch=12)
    with pytest.raises(UserError, match=r"reset.*no connection"):
        part.collect(Chatter().prompts("train")[:2], PARAMS, (1, 1))
    assert_nothing_left(part)


@pytest.mark.parametrize("slow", [False, True])
def test_interrupted_batch_leaves_nothing_in_the_engine(slow: bool) -> None:
    class Stops(Chatter):
        calls = 0

        def step_all(self, episodes: Any, actions: Any) -> Any:
            Stops.calls += 1
            if Stops.calls > 6:
                raise KeyboardInterrupt
            return super().step_all(episodes, actions)

    env = Stops()
    env.slow = slow
    part = collector(env, max_batch=12)
    with pytest.raises(KeyboardInterrupt):
        part.collect(env.prompts("train")[:8], PARAMS, (0, 0))
    assert_nothing_left(part)


def test_failed_request_is_raised_after_the_other_episodes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    part = collector(Chatter(), max_batch=12)
    prompts = Chatter().prompts("train")[:8]
    going = next(prompt for prompt in prompts if prompt.fields["episode_seed"] % 5)
    next_turn = part.renderer.next_turn_ids
    steps: list[str] = []
    step = Chatter.step

    def broken(prompt: Any, reply: Any, messages: Any) -> list[int]:
        return [10**6] if prompt.id == going.id else next_turn(prompt, reply, messages)

    def noted(env: Chatter, action: str) -> Any:
        steps.append(f"{env.seed}")
        return step(env, action)

    monkeypatch.setattr(part.renderer, "next_turn_ids", broken)
    monkeypatch.setattr(Chatter, "step", noted)
    with pytest.raises(RequestError, match=f"request '{going.id}': .*outside the vocabulary.*more requests failed"):
        part.collect(prompts, PARAMS, (0, 0))
    assert len(set(steps)) > 4
    assert_nothing_left(part)


def test_events_of_another_consumer_raise() -> None:
    part = collector(Chatter(), max_batch=12)
    other = part.engine.add(Request([1, 2], SamplingParams(max_new_tokens=1), seed=0))
    with pytest.raises(RuntimeError, match="through one EngineClient"):
        part.collect(Chatter().prompts("train")[:2], PARAMS, (0, 0))
    part.engine.abort([other])
    assert_nothing_left(part)


def episodes_on_ranks(mesh: Mesh) -> None:
    env = Chatter()
    prompts = env.prompts("train")[:6]
    alone = collector(env, max_batch=8, dtype=torch.float64)
    expected = alone.collect(prompts, PARAMS, (2, 1))
    split = init_mesh(2)
    shared = collector(env, max_batch=8, dtype=torch.float64, group=split.tp_group)
    shared.mesh = split
    assert as_data(shared.collect(prompts, PARAMS, (2, 1))) == as_data(expected)
    engines: Any = shared.engine, alone.engine
    assert engines[0].stats.decode_steps == engines[1].stats.decode_steps  # turns continue while other requests run
    assert_nothing_left(shared)


@pytest.mark.slow
def test_tensor_parallel_ranks_run_the_same_episodes_as_one_process() -> None:
    start(2, episodes_on_ranks)
