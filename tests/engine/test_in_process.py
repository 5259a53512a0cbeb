"""Engines in this process: exceptions within a step, calls from other threads, no growth over many requests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from event_parts import (
    add_all,
    assert_equal_completions,
    assert_nothing_left,
    build,
    native,
    policy,
    run,
    varied_requests,
)
from inflight_parts import decoder
from native_parts import Mode

from assay.engine import Engine, HFEngine, Request, SamplingParams, generate
from assay.types import Completion, UserError

SMALL_CACHE = Mode(max_batch=6, window=2, ahead=1, cache=112, prefill_tokens=20)

# Where a step can be interrupted: an object of the engine, and its method.
NATIVE_POINTS = {
    "prefill": lambda engine: (engine.runner, "compute"),
    "copy of blocks": lambda engine: (engine.runner, "copy"),
    "arrange": lambda engine: (engine.runner, "arrange"),
    "decode": lambda engine: (engine.runner, "decode"),
    "plan": lambda engine: (engine.scheduler, "plan"),
    "rows enter": lambda engine: (engine.rows, "enter"),
    "tables": lambda engine: (engine.rows, "write_tables"),
    "rows move": lambda engine: (engine.rows, "move"),
    "read": lambda engine: (engine.rows, "read"),
    "process": lambda engine: (engine.outputs, "process"),
    "release": lambda engine: (engine.scheduler, "release"),
    "preemption": lambda engine: (engine.outputs, "pause"),
    "accept": lambda engine: (engine.scheduler, "add"),
}


class Interrupted:
    """Raises Ctrl-C in the n-th call of a method, before or after its work."""

    def __init__(self, owner: Any, method: str, call: int, after: bool) -> None:
        self.owner, self.method, self.left, self.after = owner, method, call, after
        self.original: Callable[..., Any] = getattr(owner, method)
        self.raised = False
        setattr(owner, method, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            self._raise()
        result = self.original(*args, **kwargs)
        if self.left == 0:
            self._raise()
        return result

    def _raise(self) -> None:
        self.raised = True
        raise KeyboardInterrupt

    def remove(self) -> None:
        delattr(self.owner, self.method)


def kept_first(engine: Engine) -> tuple[list[int], int]:
    ((first,),) = generate(engine, [Request([1, 2, 3, 4], SamplingParams(max_new_tokens=9), seed=3, keep=True)])
    assert first.handle is not None
    return [1, 2, 3, 4, *first.token_ids], first.handle


def interrupt(engine: Engine, owner: Any, method: str, call: int, after: bool, handles: list[int]) -> bool:
    """Serve requests, one of which continues a kept sequence, until a call is interrupted; return whether it was."""
    fault = Interrupted(owner, method, call, after)
    try:
        add_all(engine, varied_requests(stream=True, max_new_tokens=40))
        engine.add(Request([5], SamplingParams(n=2, max_new_tokens=60), seed=1, continues=handles[0]))
        with pytest.raises(KeyboardInterrupt):
            run(engine)
            raise KeyboardInterrupt
    finally:
        fault.remove()
    return fault.raised


@cache
def undisturbed(backend: str, before: tuple[int, ...]) -> list[list[Completion]]:
    """Completions of a new engine: of a continuation sent as a whole prompt, and of `varied_requests`."""
    params = SamplingParams(n=2, max_new_tokens=8)
    return generate(build(backend, policy(backend)), [Request([*before, 7], params, seed=2), *varied_requests()])


def assert_usable(engine: Engine, backend: str, before: list[int], handle: int) -> None:
    """There are no requests left, a kept sequence can be continued, and results equal those of a new engine."""
    assert engine.step() == []
    params = SamplingParams(n=2, max_new_tokens=8)
    group = generate(engine, [Request([7], params, seed=2, continues=handle)])[0]
    expected = undisturbed(backend, tuple(before))
    assert_equal_completions(group, expected[0], 1e-4)
    for ours, theirs in zip(generate(engine, varied_requests()), expected[1:], strict=True):
        assert_equal_completions(ours, theirs, 1e-4)


def before_or_after(points: Iterable[str]) -> list[tuple[str, bool]]:
    """Points, interrupted before or after their work in turn."""
    return [(point, bool(index % 2)) for index, point in enumerate(points)]


@pytest.mark.parametrize(("point", "after"), before_or_after(NATIVE_POINTS))
def test_interrupted_step_leaves_the_native_engine_usable(point: str, after: bool) -> None:
    interrupted = 0
    for call in (1, 4):
        engine = native(decoder(0, torch.float32), SMALL_CACHE, dtype=torch.float32)
        kept = [kept_first(engine), kept_first(engine)]
        owner, method = NATIVE_POINTS[point](engine)
        raised = interrupt(engine, owner, method, call, after, [kept[0][1]])
        interrupted += raised
        for before, handle in kept if raised else kept[1:]:  # the first one was being continued
            assert_usable(engine, "native", before, handle)
        engine.release([handle for _, handle in kept])
        assert_nothing_left(engine)
    assert interrupted


@pytest.mark.parametrize(("method", "after"), before_or_after(["_forward", "_shrink", "_accept", "_next"]))
def test_interrupted_step_leaves_the_hf_engine_usable(method: str, after: bool) -> None:
    engine = build("hf", mode=Mode(max_batch=4))
    assert isinstance(engine, HFEngine)
    kept = [kept_first(engine), kept_first(engine)]
    assert interrupt(engine, engine, method, 2, after, [kept[0][1]])
    for before, handle in kept:
        assert_usable(engine, "hf", before, handle)
    engine.release([handle for _, handle in kept])
    assert_nothing_left(engine)


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_sequences_kept_in_an_interrupted_step_are_released(backend: str) -> None:
    """Their handles were never returned."""
    engine = build(backend, policy(backend))
    add_all(engine, [replace(request, keep=True) for request in varied_requests(max_new_tokens=4)])
    finish = engine.outputs._finish  # type: ignore[attr-defined]

    def interrupted(ended: Any) -> None:
        finish(ended)
        if ended:
            raise KeyboardInterrupt

    engine.outputs._finish = interrupted  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    del engine.outputs._finish  # type: ignore[attr-defined]
    assert engine.step() == []
    assert_nothing_left(engine)


def test_ctrl_c_in_a_queued_call_is_raised_in_the_stepping_thread() -> None:
    engine = native(decoder(0))
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=80), seed=0))
    errors: list[BaseException] = []

    class Stopped:
        def weights(self) -> Any:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            raise UserError("served by the wrong thread")

    def trainer() -> None:
        try:
            engine.update_weights(Stopped(), 1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=trainer)
    with engine.boundary.lock:
        thread.start()
        while not engine.boundary.queue:
            pass
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    thread.join(30)
    assert [type(error) for error in errors] == [KeyboardInterrupt] and engine.info.version == 0
    run(engine)
    assert_nothing_left(engine)


# -- nothing accumulates


@pytest.mark.slow
def test_hf_engine_keeps_no_objects_of_finished_requests() -> None:
    engine = build("hf", mode=Mode(max_batch=4))
    serve = [Request([1 + number % 60], SamplingParams(max_new_tokens=1), number) for number in range(30)]
    generate(engine, serve)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(3):
        generate(engine, serve)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert_nothing_left(engine)
