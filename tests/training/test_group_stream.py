"""Groups as a stream: the same as those of `Collector.collect`, in the order in which they finish."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.engine import make_engine
from assay.engine.base import SamplingParams
from assay.engine.client import ClientThread
from assay.envs import make_env
from assay.models import build_preset
from assay.rewards import JudgePool
from assay.rollout import Collector
from assay.tasks import make_task
from assay.text import Renderer, word_tokenizer
from assay.training.async_source import GroupStream, Ticket
from assay.types import Group

PARAMS = SamplingParams(n=3, temperature=1.0, max_new_tokens=9)


class Parts:
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
def parts(request: pytest.FixtureRequest) -> Iterator[Parts]:
    made = Parts(request.param)
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


def test_a_stream_samples_the_groups_of_collect(parts: Parts) -> None:
    parts.stream.start(parts.tickets())
    groups = all_groups(parts.stream)
    expected = parts.collector.collect(parts.prompts, PARAMS, (7, 0))
    assert_same([groups[index] for index in range(len(expected))], expected)
    assert all(rollout.verdict is not None for group in groups.values() for rollout in group.rollouts)


def test_groups_that_are_started_later_join_those_that_are_sampled(parts: Parts) -> None:
    tickets = parts.tickets()
    parts.stream.start(tickets[:5])
    first = {ticket.number: group for ticket, group in parts.stream.next()}
    parts.stream.start(tickets[5:])
    groups = first | all_groups(parts.stream)
    assert_same([groups[index] for index in range(8)], parts.collector.collect(parts.prompts, PARAMS, (7, 0)))


def test_dropped_groups_are_not_returned_and_can_be_started_again(parts: Parts) -> None:
    tickets = parts.tickets()
    parts.stream.start(tickets)
    parts.stream.drop(tickets[2:5])
    assert sorted(all_groups(parts.stream)) == [0, 1, 5, 6, 7]
    again = [replace(ticket, restarts=1) for ticket in tickets[2:5]]
    parts.stream.start(again)
    groups = all_groups(parts.stream)
    expected = parts.collector.collect(parts.prompts, PARAMS, (7, 0))
    assert_same([groups[index] for index in (2, 3, 4)], expected[2:5])


def test_groups_can_be_dropped_at_any_time(parts: Parts) -> None:
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
    made = Parts("completions")
    tickets = [replace(one, request=replace(one.request, stream=True)) for one in made.tickets()]
    made.stream.start(tickets)
    made.stream.next()
    lengths = made.stream.drop(tickets)
    assert all(1 <= length <= PARAMS.max_new_tokens for length in lengths)
    made.stream.close()
    made.thread.close()


def test_a_request_that_cannot_be_served_is_an_error(parts: Parts) -> None:
    ticket = parts.tickets()[0]
    invalid = replace(ticket.request, params=replace(ticket.request.params, temperature=-1.0))
    parts.stream.start([replace(ticket, request=invalid)])
    with pytest.raises(Exception, match="temperature"):
        parts.stream.next()
