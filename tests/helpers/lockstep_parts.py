"""Programs of test processes with tensor-parallel engines in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from engine_parts import small_decoder
from group_parts import FAMILIES
from native_parts import MODES, engine_for, idle, mixed_requests, words

from assay.engine import Engine, Event, Finished, NativeEngine, Request, SamplingParams, generate
from assay.engine.base import KvOnUpdate
from assay.mesh import Mesh, init_mesh
from assay.models.decoder import Decoder

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


def different_arrivals_are_reported(mesh: Mesh) -> None:
    engine = new_engine("plain", group=init_mesh(tp=2).tp_group)
    first = engine.add(Request([1, 2, 3], replace(PARAMS, stop_token_ids=()), seed=0))
    for _ in range(3):
        assert engine.step(wait=False) == []
    second = engine.add(Request([4] * (1 + mesh.rank), PARAMS, seed=0))
    with pytest.raises(RuntimeError, match="given different requests"):
        engine.step()
    engine.abort([first, second])
    assert idle(engine)
    assert len(generate(engine, [Request([4], PARAMS, seed=0)])) == 1


def lockstep_cases(mesh: Mesh) -> None:
    different_arrivals_are_reported(mesh)
    in_lockstep(mesh, updates, "windows", "keep")
    in_lockstep(mesh, updates, "all at once", "recompute")
    in_lockstep(mesh, arrivals, "all at once")
    in_lockstep(mesh, arrivals, "windows")
