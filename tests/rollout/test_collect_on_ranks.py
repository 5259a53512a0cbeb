"""Prompts are divided among ranks: all ranks return the same groups and raise the same errors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import pytest
import torch
from processes import start

from assay.engine.base import Capabilities, EngineInfo, Event, Finished, Request, SamplingParams
from assay.mesh import Mesh, init_mesh
from assay.rewards import JudgePool
from assay.rollout import Collector
from assay.tasks import make_task
from assay.text import Renderer, word_tokenizer
from assay.types import Completion, Finish, Status, UserError, Verdict

T = TypeVar("T")
TASK: Any = make_task("abacus", eval_size=40)
PARAMS = SamplingParams(n=2, max_new_tokens=4)
PROMPTS = TASK.prompts("test")[:5]


class SeedEngine:
    """Samples a token that depends on the seed, and records the names of the requests of the last call."""

    info = EngineInfo(0, 64, 8, torch.float32, Capabilities())

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.asked, self.fails = mesh, [], False  # type: ignore[var-annotated]
        self.events: list[Event] = []

    def add(self, request: Request) -> int:
        if not self.events:
            self.asked = []
        self.asked.append(request.name)
        request_id = len(self.asked)
        for sample in range(request.params.n):
            completion = Completion([request.seed % 7 + sample], [0.0], [0.0], Finish.STOP)
            self.events.append(Finished(request_id, sample, completion))
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        if self.fails:
            raise UserError(f"rank {self.mesh.rank} cannot")
        events, self.events = self.events, []
        return events

    def abort(self, ids: Any) -> None:
        self.events = []


class Leaves:
    """Interrupts the work on one rank, and all ranks in `check`."""

    def __init__(self, leaves: bool) -> None:
        self.leaves = leaves

    def interruptible(self, work: Callable[[], T]) -> T | None:
        return None if self.leaves else work()

    def check(self) -> None:
        raise KeyboardInterrupt


def judge(completion: str, answer: str, fields: Any) -> Verdict:
    return Verdict(float(len(completion)), Status.WRONG)


def fails_on_all(completion: str, answer: str, fields: Any) -> Verdict:
    raise ZeroDivisionError


def collector(mesh: Mesh, judged_by: Any = judge) -> Collector:
    engine: Any = SeedEngine(mesh)
    return Collector(engine, Renderer(word_tokenizer(TASK.words())), JudgePool(judged_by, 0, 5.0), mesh)


def share(flat: Mesh) -> None:
    for mesh in (flat, init_mesh(2), init_mesh(4)):
        for count in (5, 2, 1):
            expected = collector(Mesh()).collect(PROMPTS[:count], PARAMS, (3, 1))
            shared = collector(mesh)
            assert shared.collect(PROMPTS[:count], PARAMS, (3, 1)) == expected
            asked: Any = shared.engine
            shares = mesh.all_gather_objects(asked.asked)
            assert sorted(chain(*shares[:: mesh.tp_size])) == sorted(prompt.id for prompt in PROMPTS[:count])
            sizes = [len(names) for names in shares]
            assert max(sizes) - min(sizes) <= 1  # balanced

    failing = collector(flat)
    failing.engine.fails = flat.rank == 2  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="rank 2 cannot"):
        failing.collect(PROMPTS, PARAMS, (3, 1))
    with pytest.raises(UserError, match="the judge failed on all 10 answers"):
        collector(flat, fails_on_all).collect(PROMPTS, PARAMS, (3, 1))
    # A judge that fails on all answers of one rank only is no error of the run.
    some = collector(flat, fails_on_all if flat.rank == 1 else judge).collect(PROMPTS, PARAMS, (3, 1))
    assert {r.verdict.status for r in some[1].rollouts if r.verdict} == {Status.ERROR}

    leaving = collector(flat)
    leaving.stopper = Leaves(flat.rank == 3)
    with pytest.raises(KeyboardInterrupt):
        leaving.collect(PROMPTS, PARAMS, (3, 1))
    assert torch.distributed.is_initialized()


@pytest.mark.slow
def test_prompts_are_divided_among_ranks_and_errors_are_raised_on_all() -> None:
    start(4, share)
