"""Asynchronous training: groups as a stream; which are trained when, exactly once and never too stale; kills."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_run import SmallRuns

from assay.algos import make_algorithm
from assay.config import TrainConfig
from assay.engine import make_engine
from assay.engine.base import SamplingParams
from assay.engine.client import ClientThread
from assay.envs import make_env
from assay.models import build_preset
from assay.rewards import JudgePool
from assay.rollout import Collector
from assay.runs.rollouts import read_rollouts
from assay.tasks import make_task
from assay.text import Renderer, word_tokenizer
from assay.training.async_source import MAX_RESTARTS, AsyncSource, GroupStream, Ticket
from assay.training.progress import RunState, Schedule
from assay.training.sources import PromptStream, SampledGroups, version_of
from assay.types import Completion, Finish, Group, Rollout, Status, Turn, UserError, Verdict
from tests.training.test_env_runs import GUESS

PARAMS = SamplingParams(n=3, temperature=1.0, max_new_tokens=9)


class StreamParts:
    """A collector and a stream that share an engine."""

    def __init__(self, kind: str) -> None:
        task: Any = make_task("abacus", eval_size=40) if kind == "completions" else make_env("guess", high=4, tries=3)
        tokenizer = word_tokenizer(task.words())
        policy, renderer = build_preset("nano", tokenizer.vocab_size, 64, seed=3), Renderer(tokenizer)
        engine = make_engine("native", policy, device="cpu", dtype=torch.float32, max_length=64, decode=renderer.decode)
        self.thread = ClientThread(engine)
        judge = JudgePool(task.judge(), 0, 5.0)
        env = None if kind == "completions" else task
        self.collector = Collector(engine, renderer, judge, env=env, thread=self.thread)
        self.stream = GroupStream(self.collector, self.thread)
        self.prompts = list(task.prompts("test")[:8])

    def tickets(self) -> list[Ticket]:
        requests = self.collector.requests_for(self.prompts, PARAMS, (7, 0))
        return [Ticket(index, index, prompt, request, 0) for index, (prompt, request) in enumerate(requests)]


@pytest.fixture(params=["completions", "episodes"])
def parts(request: pytest.FixtureRequest) -> Iterator[StreamParts]:
    made = StreamParts(request.param)
    yield made
    made.stream.close()
    made.thread.close()


def all_groups(stream: GroupStream) -> dict[int, Group]:
    groups: dict[int, Group] = {}
    while finished := stream.next():
        groups |= {ticket.number: group for ticket, group in finished}
    return groups


def assert_same(groups: Sequence[Group], expected: Sequence[Group]) -> None:
    """All is equal, but for the rounding of log-probabilities, which may depend on the batch."""
    parts = deepcopy((groups, expected))
    values: tuple[list[float], list[float]] = [], []
    for some, found in zip(parts, values, strict=True):
        for completion in (turn.completion for group in some for one in group.rollouts for turn in one.turns):
            assert completion.entropy is not None
            found += [*completion.engine_logprobs, *completion.sampling_logprobs, completion.entropy]
            completion.engine_logprobs, completion.sampling_logprobs, completion.entropy = [], [], 0.0
    assert parts[0] == parts[1] and values[0] == pytest.approx(values[1], abs=1e-5)


def test_a_stream_samples_the_groups_of_collect(parts: StreamParts) -> None:
    tickets = parts.tickets()
    parts.stream.start(tickets[:5])
    groups = {ticket.number: group for ticket, group in parts.stream.next()}
    parts.stream.start(tickets[5:])  # joins those that are sampled
    groups |= all_groups(parts.stream)
    expected = parts.collector.collect(parts.prompts, PARAMS, (7, 0))
    assert_same([groups[index] for index in range(len(expected))], expected)
    assert all(rollout.verdict is not None for group in groups.values() for rollout in group.rollouts)


def test_dropped_groups_are_not_returned_and_can_be_started_again(parts: StreamParts) -> None:
    tickets = parts.tickets()
    parts.stream.start(tickets)
    parts.stream.drop(tickets[2:5])
    assert sorted(all_groups(parts.stream)) == [0, 1, 5, 6, 7]
    again = [replace(ticket, restarts=1) for ticket in tickets[2:5]]
    parts.stream.start(again)
    groups = all_groups(parts.stream)
    expected = parts.collector.collect(parts.prompts, PARAMS, (7, 0))
    assert_same([groups[index] for index in (2, 3, 4)], expected[2:5])


def test_groups_can_be_dropped_at_any_time(parts: StreamParts) -> None:
    """Groups are dropped at different moments of their sampling: every other one is returned, and nothing is left."""
    engine: Any = parts.collector.engine
    for round_ in range(5):
        own = [replace(ticket) for ticket in parts.tickets()]
        parts.stream.start(own)
        time.sleep(0.002 * round_)
        parts.stream.drop(own[round_::2])
        returned = all_groups(parts.stream)
        assert sorted(returned) == [ticket.number for ticket in own if ticket not in own[round_::2]]
    assert all_groups(parts.stream) == {}
    parts.thread.close()
    assert not (engine.scheduler.kept or engine.blocks.in_use or engine.scheduler.unfinished)


def test_lengths_of_dropped_sequences_are_reported_if_the_engine_streams_them() -> None:
    made = StreamParts("completions")
    tickets = [replace(one, request=replace(one.request, stream=True)) for one in made.tickets()]
    made.stream.start(tickets)
    made.stream.next()
    lengths = made.stream.drop(tickets)
    assert all(1 <= length <= PARAMS.max_new_tokens for length in lengths)
    made.stream.close()
    made.thread.close()


def test_a_request_that_cannot_be_served_is_an_error(parts: StreamParts) -> None:
    ticket = parts.tickets()[0]
    invalid = replace(ticket.request, params=replace(ticket.request.params, temperature=-1.0))
    parts.stream.start([replace(ticket, request=invalid)])
    with pytest.raises(Exception, match="temperature"):
        parts.stream.next()


pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
TASK: Any = make_task("abacus", train_size=400, eval_size=4)
PROMPTS = 3


class ScriptedStream:
    """Finishes groups when the test says so."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.sampling: dict[Ticket, None] = {}  # started, and neither returned nor dropped
        self.started: list[Ticket] = []
        self.finished: deque[tuple[Ticket, Group]] = deque()
        self.closed = False
        self.finished_at = time.perf_counter()

    def start(self, tickets: Sequence[Ticket]) -> None:
        with self.changed:
            self.sampling |= dict.fromkeys(tickets)
            self.started += tickets

    def next(self, wait: bool = True) -> list[tuple[Ticket, Group]]:
        with self.changed:
            while wait and self.sampling and not self.finished and not self.closed:
                self.changed.wait(0.01)
            taken, self.finished = list(self.finished), deque()
            for ticket, _ in taken:
                del self.sampling[ticket]
            return taken

    def drop(self, tickets: Iterable[Ticket]) -> list[int]:
        with self.changed:
            dropped = [ticket for ticket in tickets if self.sampling.pop(ticket, 0) is None]
            return [5] * (2 * len(dropped))

    def close(self) -> None:
        self.closed = True

    def finish(self, *numbers: int) -> None:
        """Finish these groups, or all of them; a group has the version that it was started with."""
        with self.changed:
            for ticket in [one for one in self._unfinished() if one.number in numbers or not numbers]:
                completions = [Completion([1, 2], [-0.5, -0.5], [-0.5, -0.5], Finish.STOP, ticket.version)] * 2
                rollouts = [
                    Rollout(ticket.prompt, index, [Turn([0], one, "x")], Verdict(float(index), Status.WRONG), index)
                    for index, one in enumerate(completions)
                ]
                self.finished.append((ticket, Group(ticket.prompt, rollouts)))
            self.changed.notify_all()

    @property
    def numbers(self) -> list[int]:
        return sorted(ticket.number for ticket in self._unfinished())

    def _unfinished(self) -> list[Ticket]:
        with self.changed:
            finished = {ticket for ticket, _ in self.finished}
            return [ticket for ticket in self.sampling if ticket not in finished]


class Parts:
    """A source with a scripted stream."""

    def __init__(
        self, max_staleness: int, steps: int = 1000, algo: str = "grpo", budget: int = 0, cancel_stale: bool = False
    ) -> None:
        source = {"name": "async", "max_staleness": max_staleness, "cancel_stale": cancel_stale}
        settings = {"source": source, "device": "cpu"}
        self.cfg = TrainConfig(**settings, train={"prompts": PROMPTS, "samples": 2, "steps": steps, "budget": budget})
        tokenizer = word_tokenizer(TASK.words())
        policy, renderer = build_preset("nano", tokenizer.vocab_size, 64, seed=3), Renderer(tokenizer)
        engine = make_engine("native", policy, device="cpu", dtype=torch.float32, max_length=64, decode=renderer.decode)
        collector = Collector(engine, renderer, JudgePool(TASK.judge(), 0, 5.0))
        schedule = Schedule(steps, PROMPTS * 2, budget)
        stream = PromptStream(TASK.prompts("train"), 0)
        self.source = AsyncSource(self.cfg, make_algorithm(algo), collector, stream, schedule)
        self.source.stream = self.stream = ScriptedStream()
        self.state = RunState()

    def next(self, *numbers: int, but: int | None = None) -> SampledGroups:
        """The batch of a step during which these groups finish (none: all, or all but one), and its training step."""

        ended = threading.Event()

        def finish() -> None:
            time.sleep(0.02)  # until stale groups are restarted
            while not set(self.stream.numbers) - {but} or not set(numbers) <= set(self.stream.numbers):
                if ended.wait(0.001):
                    return  # the batch was ready, and no group was started
            self.stream.finish(*(numbers or [one for one in self.stream.numbers if one != but]))

        thread = threading.Thread(target=finish)
        thread.start()
        try:
            sampled = self.source.next(self.state)
        finally:
            ended.set()
            thread.join()
        assert not set(numbers) & set(self.stream.numbers), f"{self.stream.numbers} are not finished"
        self.state.step += 1
        return sampled


@pytest.fixture
def make_parts() -> Iterator[Any]:
    made: list[Parts] = []

    def make(*args: Any, **options: Any) -> Parts:
        made.append(Parts(*args, **options))
        return made[-1]

    yield make
    for parts in made:
        parts.source.close()


def test_groups_of_later_batches_are_started_before_the_learner_updates(make_parts: Any) -> None:
    parts = make_parts(max_staleness=2)
    parts.next(0, 1, 2)
    assert parts.stream.numbers == [3, 4, 5, 6, 7, 8]  # those of the next two batches
    parts.next(3, 4, 5)
    assert parts.stream.numbers == [6, 7, 8, 9, 10, 11]
    assert [ticket.version for ticket in parts.stream.started] == [0] * 9 + [1] * 3


def test_the_groups_that_finish_first_are_trained_first(make_parts: Any) -> None:
    parts = make_parts(max_staleness=2)
    sampled = parts.next(1, 4, 7)
    wanted = [ticket.prompt.id for ticket in parts.stream.started if ticket.number in (1, 4, 7)]
    assert [group.prompt.id for group in sampled.groups] == wanted
    assert sampled.metrics["async/staleness"] == 0


@pytest.mark.parametrize("cancels", [False, True])
def test_a_group_that_becomes_too_stale_is_restarted_or_cancelled(make_parts: Any, cancels: bool) -> None:
    parts = make_parts(max_staleness=1, cancel_stale=cancels)
    parts.next(1, 2, 3)
    parts.next(4, 5, 6)  # 0 was started with version 0
    started = len(parts.stream.started)
    sampled = parts.next(*([7, 8, 9] if cancels else [0, 7, 8]))
    again = [ticket for ticket in parts.stream.started[started:] if ticket.number == 0]
    assert len(again) == (0 if cancels else 1)
    kind = "async/cancelled" if cancels else "async/restarted"
    assert sampled.metrics[kind] == 2 and sampled.metrics[f"{kind}_q1"] == 2  # two sequences of five tokens
    assert sampled.metrics["async/restarted"] == (0 if cancels else 2) and len(sampled.groups) == PROMPTS


@pytest.mark.parametrize("budget", [0, 4 * PROMPTS * 2])  # by steps or by answers
def test_the_end_of_the_run_is_not_sampled_past(make_parts: Any, budget: int) -> None:
    parts = make_parts(max_staleness=2, steps=4, budget=budget)
    while not parts.source.schedule.done(parts.state):
        parts.next()
    assert len(parts.stream.started) == 4 * PROMPTS and not parts.stream.numbers
    assert parts.state.answers == 4 * PROMPTS * 2


def test_a_step_uses_as_many_groups_as_a_synchronous_one_also_if_some_are_dropped(make_parts: Any) -> None:
    """Without resampling, a step samples `train.prompts` groups; those that are dropped are not replaced."""
    parts = make_parts(max_staleness=4, steps=5)
    parts.source.algo.keep = lambda groups: (groups[1:], groups[:1])
    while not parts.source.schedule.done(parts.state):
        sampled = parts.next()
        assert (len(sampled.groups), len(sampled.dropped)) == (PROMPTS - 1, 1)
    assert len(parts.stream.started) == 5 * PROMPTS and parts.state.answers == 5 * PROMPTS * 2


def test_dropped_groups_are_replaced_if_the_algorithm_resamples(make_parts: Any) -> None:
    parts = make_parts(max_staleness=2, steps=3, algo="dapo")
    assert parts.source.algo.zero_variance.rounds > 1
    drops: list[Group] = []

    def keep(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        dropped = list(groups[:1]) if len(groups) == PROMPTS else []  # one of the first round
        drops.extend(dropped)
        return [group for group in groups if group not in dropped], dropped

    parts.source.algo.keep = keep
    with finishing(parts.stream, lambda numbers: numbers):
        while not parts.source.schedule.done(parts.state):
            assert len(parts.source.next(parts.state).groups) == PROMPTS
            parts.state.step += 1
    assert len(drops) == 3 and parts.state.answers == 3 * (PROMPTS + 1) * 2


@contextmanager
def finishing(stream: ScriptedStream, chosen: Callable[[list[int]], Sequence[int]]) -> Iterator[None]:
    """Groups finish in another thread: those that `chosen` returns of the unfinished ones."""
    ended = threading.Event()

    def finish() -> None:
        while not ended.wait(0.001):
            if numbers := stream.numbers:
                stream.finish(*chosen(numbers))

    thread = threading.Thread(target=finish)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_slow_group_is_restarted_with_its_seed_and_then_waited_for(make_parts: Any) -> None:
    parts = make_parts(max_staleness=1)
    restarts = Counter[int]()
    for _ in range(20):
        waits = any(one.restarts == MAX_RESTARTS for one in parts.stream.sampling)
        sampled = parts.next(but=None if waits else 0)
        restarts.update({"restarted": int(sampled.metrics["async/restarted"])})
        if any(group.prompt.id == parts.stream.started[0].prompt.id for group in sampled.groups):
            break
    else:
        pytest.fail("the slow group was never trained")
    tries = [ticket for ticket in parts.stream.started if ticket.number == 0]
    assert len(tries) == 1 + MAX_RESTARTS and len({ticket.request.seed for ticket in tries}) == 1
    assert [ticket.version for ticket in tries] == [0, 2, 4]
    assert restarts["restarted"] == 2 * MAX_RESTARTS  # both samples of the group, each time
    assert sampled.metrics["async/staleness_max"] <= 1


def test_every_group_is_trained_once_and_none_is_too_stale(make_parts: Any) -> None:
    parts, draw = make_parts(max_staleness=2, steps=40), random.Random(2)
    trained: list[str] = []
    with finishing(parts.stream, lambda numbers: [draw.choice(numbers)]):
        while not parts.source.schedule.done(parts.state):
            sampled = parts.source.next(parts.state)
            assert len(sampled.groups) == PROMPTS
            assert all(0 <= parts.state.step - version_of(group) <= 2 for group in sampled.groups)
            trained += [group.prompt.id for group in sampled.groups]
            parts.state.step += 1
    assert Counter(trained) == Counter(prompt.id for prompt in PromptStream(TASK.prompts("train"), 0).next(120))


def test_a_resumed_source_trains_every_group_once(make_parts: Any) -> None:
    first = make_parts(max_staleness=2, steps=6)
    trained = [group.prompt.id for _ in range(2) for group in first.next(1, 2, 4, 5, 7, 8).groups]
    first.stream.finish(9)
    saved, groups = first.source.state_dict(), first.source.saved_groups()
    assert len(saved["source"]["running"]) + len(groups) == 2 * PROMPTS and groups
    second = make_parts(max_staleness=2, steps=6)
    second.state = replace(first.state)
    second.source.load_state_dict(saved, groups)
    while not second.source.schedule.done(second.state):
        trained += [group.prompt.id for group in second.next().groups]
    assert Counter(trained) == Counter(prompt.id for prompt in PromptStream(TASK.prompts("train"), 0).next(18))
    seeds = {ticket.number: ticket.request.seed for ticket in first.stream.started}
    again = {ticket.number: ticket.request.seed for ticket in second.stream.started if ticket.number in seeds}
    assert again and again.items() <= seeds.items()


def test_a_queue_that_lacks_a_group_is_refused(make_parts: Any) -> None:
    first, second = make_parts(max_staleness=2), make_parts(max_staleness=2)
    first.next(0, 1, 2, 3)
    with pytest.raises(UserError, match="resume from another checkpoint"):
        second.source.load_state_dict(first.source.state_dict())


def test_an_interrupted_step_is_saved_as_it_was_before(make_parts: Any) -> None:
    parts = make_parts(max_staleness=1)
    parts.next(0, 1, 2)
    before = parts.source.state_dict()
    parts.source.stopping = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        parts.source.next(parts.state)
    assert parts.source.state_dict() == before


class Interrupt:
    """Stops the run while it waits for groups."""

    def check(self) -> None: ...

    def interruptible(self, work: Any) -> Any:
        raise KeyboardInterrupt


def same_but_async(runs: SmallRuns, one: str, other: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SmallRuns.same_run`, without the metrics that only asynchronous runs have."""
    metrics = SmallRuns.metrics

    def without(self: SmallRuns, name: str = "small") -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if not k.startswith("async/")} for row in metrics(self, name)]

    monkeypatch.setattr(SmallRuns, "metrics", without)
    runs.same_run(one, other, steps)


@pytest.mark.parametrize(
    "words",
    [
        ["--algo", "dapo", "--algo.resample", 3, "--sampling.max_new_tokens", 2, "--train.budget", 40],
        pytest.param(["--algo", "remax", "--eval.every", 1, "--train.steps", 3], marks=pytest.mark.slow),
        None,  # episodes
    ],
)
def test_without_staleness_a_run_equals_the_synchronous_one(
    small: SmallRuns, words: list[object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words is None:
        small.config.write_text(GUESS)
    common = ["--save.every", 1, *(words or [])]
    assert small.train("--name", "sync", *common) == 0
    assert small.train("--name", "async", *common, "--source", "async", "--source.max_staleness", 0) == 0
    same_but_async(small, "sync", "async", small.summary("sync")["steps"], monkeypatch)


def check_epoch(runs: SmallRuns) -> None:
    """Eight steps are one epoch: no group is lost, trained twice or too stale."""
    found = {step: read_rollouts(runs.runs / "small", step) for step in range(1, 9)}
    ids = [group.prompt.id for groups in found.values() for group in groups]
    assert len(ids) == len(set(ids)) == 24
    assert all(0 <= step - 1 - version_of(group) <= 2 for step, groups in found.items() for group in groups)


def test_a_stale_run_trains_every_prompt_once_per_epoch(small: SmallRuns) -> None:
    assert small.train("--train.steps", 8, "--source", "async", "--source.max_staleness", 2, "--eval.every", 2) == 0
    rows = [row for row in small.metrics() if "async/staleness" in row]
    assert len(rows) == 8 and all(row["async/staleness_max"] <= 2 for row in rows)
    check_epoch(small)


ON_A_GPU = ["--device", "cuda", "--engine.kv_cache_gib", 1]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param([], id="cpu", marks=pytest.mark.slow),
        pytest.param(ON_A_GPU, id="gpu", marks=pytest.mark.gpu),
        pytest.param([*ON_A_GPU, "--engine.name", "assay"], id="gpu of two processes", marks=pytest.mark.gpu),
    ],
)
def test_a_killed_run_resumes_with_its_queue(small: SmallRuns, where: list[object]) -> None:
    words = ["--train.steps", 8, "--source", "async", "--source.max_staleness", 2, "--save.every", 1, "--save.keep", 9]
    process = small.process("train", small.config, *words, *where)
    while not small.checkpoint(3).exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert small.resume("small") == 0
    check_epoch(small)
