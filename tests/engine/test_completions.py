"""Completions and streams from sampled tokens; stop strings; state after errors."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_parts import small_decoder
from native_parts import (
    MODES,
    SPECS,
    Consumer,
    Mode,
    assert_same_groups,
    assert_scores,
    engine_for,
    idle,
    mixed_prompts,
    mixed_requests,
    requests_for,
    words,
)

from assay.engine import Failed, Finished, Request, SamplingParams, generate
from assay.engine.completions import OutputProcessor
from assay.engine.running_batch import StepOutput
from assay.engine.sequence import Job, RowState, Sample, assign_slot, close_gaps
from assay.models.decoder import Decoder
from assay.types import Finish

WIDE = Mode(max_batch=7, window=8, ahead=1)
WAYS = {"plain": MODES["plain"], "wide windows": WIDE, "all at once": MODES["all at once"]}


@functools.cache
def model() -> Decoder:
    return small_decoder(SPECS["qwen3"], seed=21)


@pytest.mark.parametrize("mode", WAYS)
def test_streamed_tokens_are_complete_and_in_order(mode: str) -> None:
    params = SamplingParams(n=2, max_new_tokens=40, stop_token_ids=(1, 2, 3))
    requests = mixed_requests(params, seed=3)[:6]
    requests[0] = replace(requests[0], params=replace(requests[0].params, stop=("x", "yz")))
    engine = engine_for(model(), WAYS[mode], decode=words)
    quiet = generate(engine, requests)
    consumer = Consumer(engine, on_token=lambda request, sample, token: None)
    consumer.run(requests)
    groups = consumer.groups()
    assert_same_groups(model(), requests, groups, quiet)
    every = {(r, s): completion for r, group in enumerate(groups) for s, completion in enumerate(group)}
    assert consumer.tokens == {key: completion.token_ids for key, completion in every.items()}
    assert consumer.logprobs == {key: completion.engine_logprobs for key, completion in every.items()}
    assert list(consumer.finished) != sorted(consumer.finished)  # in the order in which they finish
    assert (engine.stats.preemptions > 0) == (mode == "all at once")


def test_chunks_arrive_while_other_samples_are_running() -> None:
    order: list[str] = []
    engine = engine_for(model(), Mode(max_batch=2))
    limits = [Request([i], SamplingParams(max_new_tokens=5), seed=i) for i in range(4)]
    Consumer(
        engine,
        on_token=lambda request, sample, token: order.append(f"token of {request}"),
        on_finish=lambda request, sample, completion: order.append(f"end of {request}"),
    ).run(limits)
    first = order.index("end of 0")
    assert order[:4] == ["token of 0", "token of 1"] * 2
    assert "token of 2" not in order[:first] and "token of 2" in order[first:]


@pytest.mark.parametrize("mode", WAYS)
def test_completion_ends_with_the_token_that_completes_a_stop_string(mode: str) -> None:
    """Also inside a window, when the device has already continued."""
    plain = SamplingParams(n=2, max_new_tokens=30)
    engine = engine_for(model(), WAYS[mode], decode=words)
    requests = requests_for(mixed_prompts(seed=2)[2:10], plain)
    free = generate(engine, requests)
    ends = [5 + 2 * i for i in range(len(requests))]  # where the first sample should stop
    wanted = [words(group[0].token_ids[end - 3 : end]) for group, end in zip(free, ends, strict=True)]
    stopping = [
        replace(request, params=replace(plain, stop=("no such thing", text)), keep=True)
        for request, text in zip(requests, wanted, strict=True)
    ]
    for i in (1, 3):
        stopping[i] = replace(requests[i], keep=True)  # some requests have no stop strings
    groups = generate(engine, stopping)
    for request, group, without in zip(stopping, groups, free, strict=True):
        for completion, whole in zip(group, without, strict=True):
            text, stops = words(whole.token_ids), request.params.stop
            end = text.index(stops[1]) + 3 if stops and stops[1] in text else 30
            assert completion.token_ids == whole.token_ids[:end]
            assert completion.finish is (Finish.STOP if end < 30 or text.endswith(stops or ("?",)) else Finish.LENGTH)
            assert_scores(model(), request.prompt_ids, completion, request.params)
    assert sum(completion.finish is Finish.STOP for group in groups for completion in group) >= 6
    if mode == "wide windows":
        assert engine.stats.windows < engine.stats.decode_steps
    # Tokens that the device sampled after the end are not part of the sequence.
    more = [Request([9, 9, 9], plain, seed=5, continues=group[0].handle) for group in groups]
    fresh = engine_for(model(), decode=words)
    whole_lists = [[*r.prompt_ids, *g[0].token_ids, 9, 9, 9] for r, g in zip(stopping, groups, strict=True)]
    lists = [Request(ids, plain, seed=5) for ids in whole_lists]
    assert_same_groups(model(), lists, generate(engine, more), generate(fresh, lists))


def test_device_error_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a window: some of its steps were taken but not recorded."""
    requests = mixed_requests(SamplingParams(max_new_tokens=30, stop_token_ids=(1, 2, 3)), seed=5)[3:9]
    engine = engine_for(model(), WIDE)
    step, calls = engine.runner._step, itertools.count()

    def fail(size: int, span: int) -> None:
        if next(calls) == 13:
            raise MemoryError("out of memory")
        step(size, span)

    monkeypatch.setattr(engine.runner, "_step", fail)
    with pytest.raises(MemoryError, match="out of memory"):
        generate(engine, requests)
    assert idle(engine)
    assert_same_groups(model(), requests, generate(engine, requests), generate(engine_for(model()), requests))


# -- the parts, without an engine


def new_processor() -> OutputProcessor:
    def keep(sample: Sample, tokens: list[int]) -> int:
        kept.append(tokens)
        return len(kept)

    kept: list[list[int]] = []
    outputs = OutputProcessor(4, words, keep)
    outputs.versions.current = 6
    outputs.start(0)
    return outputs


def an_output(
    samples: list[Sample], first: int, tokens: list[list[int]], after: list[tuple[int, RowState]]
) -> StepOutput:
    ids = torch.tensor(tokens, dtype=torch.int32)
    scores = torch.stack([-ids.float(), -2.0 * ids, ids / 100, ids / 10])
    return StepOutput(samples, first, ids, scores, torch.tensor(after).T)


def test_completions_are_read_from_the_history() -> None:
    outputs = new_processor()
    running: list[Sample] = []
    jobs = [Job(i, Request([i], SamplingParams(n=1 + (i == 0)), seed=0, keep=i == 0), [i], 9) for i in range(3)]
    for job in jobs:
        outputs.add(job)
    for sample in (jobs[0].samples[1], jobs[0].samples[0], jobs[1].samples[0], jobs[2].samples[0]):
        assign_slot(sample, running, 0)
    samples = list(running)
    run = RowState.RUNNING
    ended = outputs.process(
        an_output(
            samples, 0, [[1, 2, 3, 4], [5, 6, 7, 8]], [(2, run), (1, RowState.STOP), (2, RowState.LENGTH), (2, run)]
        ),
        running,
    )
    assert ended == [(samples[1], RowState.STOP), (samples[2], RowState.LENGTH)]
    close_gaps(running, [sample for sample, _ in ended], 2)
    assert (
        outputs.process(an_output(running, 2, [[9, 10]], [(3, run), (3, RowState.BROKEN)]), running)[0][0] is samples[3]
    )
    close_gaps(running, [samples[3]], 3)
    outputs.process(an_output(running, 3, [[11]], [(4, RowState.LENGTH)]), running)
    events = outputs.take_events()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.request_id == 2 and re.match("request 2: .*token 2 of sample 0 are not numbers", failed.error)
    done = {(event.request_id, event.sample): event.completion for event in events if isinstance(event, Finished)}
    first, second = [done[0, 0], done[0, 1]], [done[1, 0]]
    assert len(done) == 3 and not outputs.jobs and not outputs.take_events()
    assert [completion.token_ids for completion in first] == [[2], [1, 5, 9, 11]]  # by sample
    assert [completion.handle for completion in first] == [1, 2] and second[0].handle is None
    assert first[1].engine_logprobs == [-1.0, -5.0, -9.0, -11.0] and first[1].sampling_logprobs == [-2, -10, -18, -22]
    assert first[1].kept_mass == pytest.approx(0.065) and first[1].entropy == pytest.approx(0.65)
    assert second[0].token_ids == [3, 7] and second[0].finish is Finish.LENGTH and first[0].finish is Finish.STOP
    assert {completion.version for completion in (*first, *second)} == {6}
    assert outputs.tokens == 7


def test_tokens_before_a_preemption_are_prepended_and_means_are_weighted_by_length() -> None:
    outputs = new_processor()
    running: list[Sample] = []
    job = Job(0, Request([1], SamplingParams(), seed=0, keep=True), [1], 4)
    outputs.add(job)
    (sample,) = job.samples
    for step, count in ((0, 3), (5, 0), (6, 1)):  # periods of three tokens and of none, and the last one
        assign_slot(sample, running, step)
        outputs.history.first = min(outputs.history.first, step)
        if count:
            tokens = [[10 * step + i] for i in range(count)]
            state = RowState.LENGTH if step == 6 else RowState.RUNNING
            outputs.process(an_output(running, step, tokens, [(len(sample.drawn) + count, state)]), running)
        if step < 6:
            outputs.pause(sample, len(sample.drawn) + count)
            close_gaps(running, [sample], step + count)
    (event,) = outputs.take_events()
    assert isinstance(event, Finished)
    completion = event.completion
    assert completion.token_ids == [0, 1, 2, 60] and completion.engine_logprobs == [0.0, -1.0, -2.0, -60.0]
    assert completion.sampling_logprobs == [0.0, -2.0, -4.0, -120.0]
    assert completion.kept_mass == pytest.approx(np.mean([0, 0.01, 0.02, 0.6]))
    assert completion.entropy == pytest.approx(np.mean([0, 0.1, 0.2, 6.0]))
    assert outputs.tokens == 4


def test_stop_strings_apply_only_to_requests_that_set_them() -> None:
    outputs = new_processor()
    running: list[Sample] = []
    stops = [(words([7]),), (), (words([8]),)]
    for index, stop in enumerate(stops):
        job = Job(index, Request([1], SamplingParams(stop=stop), seed=0), [1], 9)
        outputs.add(job)
        assign_slot(job.samples[0], running, 0)
    samples = list(running)
    tokens = [[8, 10, 12], [9, 7, 8], [7, 8, 13]]
    assert outputs.process(an_output(samples, 0, tokens, [(3, RowState.RUNNING)] * 3), running) == [
        (samples[0], RowState.STOP),
        (samples[2], RowState.STOP),
    ]
    done = {event.request_id: event.completion for event in outputs.take_events() if isinstance(event, Finished)}
    assert {index: completion.token_ids for index, completion in done.items()} == {0: [8, 9, 7], 2: [12, 8]}
    assert outputs.stopping is not None
    known = {stop: np.flatnonzero(kinds).tolist() for stop, kinds in outputs.stopping.kinds.items()}
    assert known == {stops[0]: [7, 8, 9], stops[2]: [8, 12, 13]}  # no other tokens were decoded
