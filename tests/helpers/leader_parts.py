"""Programs of test processes with tensor-parallel engines, in lockstep or with a leader and followers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from engine_parts import small_decoder
from group_parts import FAMILIES
from inflight_parts import Weights as FailingWeights
from native_parts import MODES, Weights, engine_for, idle, mixed_requests, tokens_of, words

from assay.engine import Engine, Event, Finished, NativeEngine, Request, SamplingParams, generate
from assay.engine.base import KvOnUpdate
from assay.engine.client import ClientThread
from assay.engine.native.tensor_parallel import TensorParallelLeader, follow, new_cpu_group
from assay.mesh import Mesh, init_mesh
from assay.models.decoder import Decoder
from assay.types import Completion, UserError

PARAMS = SamplingParams(n=2, temperature=0.8, max_new_tokens=40, stop_token_ids=(3, 5))
LIMIT = 1e-9
Scenario = Callable[[Engine], list[Event]]


def policy(seed: int = 21) -> Decoder:
    return small_decoder(FAMILIES["qwen2"], seed).double()


def new_engine(mode: str, kv_on_update: KvOnUpdate = "recompute", group: Any = None) -> NativeEngine:
    engine = engine_for(policy(), MODES[mode], dtype=torch.float64, decode=words, group=group)
    engine.kv_on_update = kv_on_update
    return engine


def play(engine: Engine, acts: dict[int, Callable[[list[Event]], None]]) -> list[Event]:
    """Step the engine to the end; before step i, call `acts[i]` with the events so far."""
    events: list[Event] = []
    for step in range(1000):
        if step in acts:
            acts[step](events)
        new = engine.step(wait=step > max(acts))
        events += new
        if step > max(acts) and not new:
            return events
    raise AssertionError("this does not end")


def arrivals(engine: Engine) -> list[Event]:
    """Requests of all kinds are added and aborted while others run."""
    requests = mixed_requests(PARAMS)
    ids: list[int] = []

    def add(*more: Request) -> None:
        ids.extend(engine.add(request) for request in more)

    def continue_kept(events: list[Event]) -> None:
        done = [event.completion for event in events if isinstance(event, Finished) and event.completion.handle]
        assert len(done) >= 2
        add(Request([4, 8], PARAMS, seed=70, continues=done[0].handle), Request([999], PARAMS, seed=1, name="bad"))
        engine.release([done[1].handle or 0])

    short = replace(PARAMS, max_new_tokens=2)
    return play(
        engine,
        {
            0: lambda _: add(Request([1, 2, 3], short, seed=5, keep=True), *requests[:3]),
            2: lambda _: add(replace(requests[3], stream=True), *(replace(requests[i], keep=True) for i in (6, 7))),
            5: lambda _: add(*requests[4:6]),
            9: lambda _: engine.abort([ids[1], (ids[3], 1), (ids[4], 0)]),
            14: continue_kept,
            15: lambda _: add(replace(requests[8], params=replace(PARAMS, stop=("c", "xy"), top_p=0.9))),
        },
    )


def updates(engine: Engine) -> list[Event]:
    """Two weight updates while requests run and wait; a later request shares a prefix with the first one."""
    requests = [replace(request, params=replace(PARAMS, stop_token_ids=())) for request in mixed_requests(PARAMS)[6:]]

    def add(some: list[Request]) -> None:
        for request in some:
            engine.add(request)

    return play(
        engine,
        {
            0: lambda _: add(requests[:5]),
            6: lambda _: engine.update_weights(policy(22), version=1),
            9: lambda _: add(requests[3:]),
            15: lambda _: engine.update_weights(policy(23), version=2),
        },
    )


def assert_same_events(ours: list[Event], theirs: list[Event]) -> None:
    assert len(ours) == len(theirs) > 10
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        assert alike(asdict(one), asdict(other)), (one, other)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return math.isclose(one, other, abs_tol=LIMIT) if isinstance(one, float) else one == other


def check_result(scenario: Scenario, ours: list[Event], mode: str, kv_on_update: KvOnUpdate) -> None:
    """Events equal those of one process, step by step."""
    alone = new_engine(mode, kv_on_update)
    assert_same_events(ours, scenario(alone))
    if scenario is updates:
        versions = {version for e in ours if isinstance(e, Finished) for version, _ in e.completion.versions}
        assert versions == {0, 1, 2}
    assert alone.stats.preemptions > 0 or not MODES[mode].blocks


def in_lockstep(mesh: Mesh, scenario: Scenario, mode: str, kv_on_update: KvOnUpdate = "recompute") -> None:
    engine = new_engine(mode, kv_on_update, init_mesh(tp=2).tp_group)
    check_result(scenario, scenario(engine), mode, kv_on_update)


def with_leader(mesh: Mesh, scenario: Scenario, mode: str, kv_on_update: KvOnUpdate = "recompute") -> None:
    def lead(leader: TensorParallelLeader) -> None:
        events = scenario(leader)
        check_result(scenario, events, mode, kv_on_update)
        assert leader.fingerprint() == fingerprint_of(policy(23 if scenario is updates else 21))

    serve(lead, new_engine(mode, kv_on_update, init_mesh(tp=2).tp_group))


def fingerprint_of(model: Decoder) -> str:
    return engine_for(model, dtype=torch.float64).fingerprint()


def serve(lead: Callable[[TensorParallelLeader], None], engine: NativeEngine) -> None:
    """On rank 0 `lead(leader)`; the other ranks follow."""
    cpu_group = new_cpu_group(engine.group)
    if engine.group.rank():
        follow(engine, cpu_group)
        return
    leader = TensorParallelLeader(engine, cpu_group)
    lead(leader)
    leader.close()
    leader.close()  # a second time does nothing
    with pytest.raises(RuntimeError, match="closed"):
        leader.add(Request([1], PARAMS, seed=0))


def different_arrivals_are_reported(mesh: Mesh) -> None:
    engine = new_engine("plain", group=init_mesh(tp=2).tp_group)
    first = engine.add(Request([1, 2, 3], replace(PARAMS, stop_token_ids=()), seed=0))
    for _ in range(3):
        assert engine.step(wait=False) == []
    second = engine.add(Request([4] * (1 + mesh.rank), PARAMS, seed=0))
    with pytest.raises(RuntimeError, match="given different requests"):
        engine.step()
    engine.abort([first, second])
    assert not engine.has_work and idle(engine)
    assert len(generate(engine, [Request([4], PARAMS, seed=0)])) == 1


def failures_leave_all_ranks_consistent(mesh: Mesh) -> None:
    engine = new_engine("windows", group=init_mesh(tp=2).tp_group)
    requests = [replace(request, name=str(i)) for i, request in enumerate(mixed_requests(PARAMS)[:6])]
    expected = generate(new_engine("windows"), requests)

    def check(leader: TensorParallelLeader) -> None:
        assert all(map(alike, tokens_of(generate(leader, requests)), tokens_of(expected)))

    def lead(leader: TensorParallelLeader) -> None:
        check(leader)
        ((kept,),) = generate(leader, [Request([4, 5, 6], replace(PARAMS, n=1, max_new_tokens=5), seed=1, keep=True)])
        one_step_fails_on_the_leader(leader, requests)
        check(leader)
        an_interrupt_waits_for_the_step(leader, requests)
        check(leader)
        commands_fail_on_all_ranks(leader)
        with pytest.raises(TypeError):
            leader.add(Request(["a"], PARAMS, seed=0))  # type: ignore[list-item]
        check(leader)
        whole = [Request([4, 5, 6, *kept.token_ids, 7], PARAMS, seed=3)]
        continued = generate(leader, [Request([7], PARAMS, seed=3, continues=kept.handle)])
        assert tokens_of(continued) == tokens_of(generate(new_engine("windows"), whole))
        nothing_is_sent_when_idle(leader)

    serve(lead, engine)


def one_step_fails_on_the_leader(leader: TensorParallelLeader, requests: list[Request]) -> None:
    outputs = leader.engine.outputs
    calls = iter(range(4))
    with pytest.MonkeyPatch.context() as patch:
        process = outputs.process

        def fail(*args: Any) -> Any:
            if next(calls, None) is None:
                raise MemoryError("no room")
            return process(*args)

        patch.setattr(outputs, "process", fail)
        keeping = [replace(request, keep=True) for request in requests]
        with pytest.raises(MemoryError, match="no room"):
            generate(leader, keeping)


def an_interrupt_waits_for_the_step(leader: TensorParallelLeader, requests: list[Request]) -> None:
    runner = leader.engine.runner
    with pytest.MonkeyPatch.context() as patch:
        decode, calls = runner.decode, iter(range(3))

        def interrupt(*args: Any) -> None:
            if next(calls, None) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            decode(*args)

        patch.setattr(runner, "decode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(leader, requests)


def commands_fail_on_all_ranks(leader: TensorParallelLeader) -> None:
    other = policy(22)
    with pytest.raises(ConnectionError, match="the sender is gone"):
        leader.update_weights(FailingWeights(other, fail_after=3), version=3)
    wrong = ((name, torch.zeros(2, 2) if "layers" in name else weight) for name, weight in other.weights())
    with pytest.raises(UserError, match=r"has shape \(2, 2\)"):
        leader.update_weights(Weights(wrong), version=3)
    assert leader.info.version == 0
    half = {name: weight.bfloat16() for name, weight in other.weights()}
    leader.update_weights(Weights(half.items()), version=4)
    rounded = policy(22)
    rounded.load_state_dict({name: weight.bfloat16().double() for name, weight in rounded.state_dict().items()})
    assert leader.fingerprint() == fingerprint_of(rounded) and leader.info.version == 4
    leader.update_weights(policy(), version=0)
    request_id = leader.add(Request([1], PARAMS, seed=0))
    assert leader.step(wait=False) == []
    with pytest.raises(UserError, match="cannot sleep"):
        leader.sleep()
    leader.abort([request_id])
    leader.sleep()
    leader.wake()
    leader.reset_prefix_cache()
    sequences = [[1, 2, 3, 4], [5, 6]]
    assert alike(leader.score(sequences, 0.7), new_engine("plain").score(sequences, 0.7))
    with pytest.raises(UserError):
        leader.score([[1, 999]])
    leader.release([12345])


def nothing_is_sent_when_idle(leader: TensorParallelLeader) -> None:
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader._link, "exchange", lambda *args, **kwargs: sent.append(args))
        assert leader.step() == [] and leader.step(wait=False) == [] and not sent


def client_thread_on_a_leader(mesh: Mesh) -> None:
    """Consumers in threads, one of which is cancelled, while another thread updates weights."""
    engine = new_engine("all at once", group=init_mesh(tp=2).tp_group)
    requests = [mixed_requests(PARAMS, seed=seed)[3:8] for seed in range(4)]
    alone = new_engine("all at once")
    expected = [tokens_of(generate(alone, some)) for some in requests]

    def lead(leader: TensorParallelLeader) -> None:
        thread = ClientThread(leader)
        halfway = threading.Barrier(5)

        async def sampled(some: list[Request]) -> list[list[Completion]]:
            return [await asyncio.gather(*futures) for futures in list(map(thread.client.submit, some))]

        async def abandoned() -> None:
            for future in thread.client.submit(Request([1, 2], replace(PARAMS, n=4), seed=0)):
                future.cancel()

        def consume(number: int) -> list[Any]:
            first = tokens_of(thread.run(sampled(requests[number])))
            thread.run(abandoned())
            halfway.wait(60)
            return [first] if number == 0 else [first, tokens_of(thread.run(sampled(requests[number])))]

        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(consume, number) for number in range(4)]
            halfway.wait(60)
            leader.update_weights(policy(), version=1)  # the same weights: no token changes
            for result, right in zip(results, expected, strict=True):
                assert all(one == right for one in result.result(60))
        assert tokens_of(thread.run(sampled(requests[0]))) == expected[0]
        thread.close()
        assert not engine.outputs.jobs
        leader.close()

    cpu_group = new_cpu_group(engine.group)  # type: ignore[arg-type]
    if mesh.rank:
        follow(engine, cpu_group)
    else:
        lead(TensorParallelLeader(engine, cpu_group))


def a_follower_fails_alone(mesh: Mesh) -> None:
    engine = new_engine("plain", group=init_mesh(tp=2).tp_group)
    if mesh.rank:
        engine.reset_prefix_cache = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]

    def lead(leader: TensorParallelLeader) -> None:
        leader.reset_prefix_cache()
        generate(leader, [Request([1], PARAMS, seed=0)])

    serve(lead, engine)


def leader_cases(mesh: Mesh) -> None:
    failures_leave_all_ranks_consistent(mesh)
    client_thread_on_a_leader(mesh)
    different_arrivals_are_reported(mesh)
    with_leader(mesh, arrivals, "windows")


def update_cases(mesh: Mesh) -> None:
    in_lockstep(mesh, updates, "windows", "keep")
    with_leader(mesh, updates, "windows", "recompute")
    with_leader(mesh, updates, "all at once", "keep")
    in_lockstep(mesh, arrivals, "all at once")
