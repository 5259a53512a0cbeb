from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from assay.engine.base import SamplingParams
from assay.evals import report as module
from assay.evals.report import evaluate
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict


class Oracle:
    """A collector that is right on every third question, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, int]]] = []

    def collect(self, prompts: Sequence[Prompt], params: SamplingParams, seed: tuple[int, int]) -> list[Group]:
        self.calls.append((len(prompts), seed))
        return [Group(p, [self.rollout(p, i) for i in range(params.n)]) for p in prompts]

    def rollout(self, prompt: Prompt, sample: int) -> Rollout:
        status = Status.OK if int(prompt.id) % 3 == 0 else Status.WRONG
        completion = Completion([1], [0.0], [0.0], Finish.STOP)
        return Rollout(prompt, sample, [Turn([0], completion, "")], Verdict(0.0, status, "1"))


PROMPTS = [Prompt(str(index), ()) for index in range(30)]


@pytest.mark.parametrize(("samples", "at_once", "sizes"), [(1, 4096, [30]), (1, 12, [12, 12, 6]), (4, 40, [10] * 3)])
def test_questions_come_in_parts_that_fit_and_in_order(
    monkeypatch: pytest.MonkeyPatch, samples: int, at_once: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", at_once)
    oracle: Any = Oracle()
    report, groups = evaluate(oracle, PROMPTS, SamplingParams(n=samples), seed=9)
    assert [size for size, _ in oracle.calls] == sizes
    assert report.ids == [p.id for p in PROMPTS] == [g.prompt.id for g in groups]
    assert report.accuracy == pytest.approx(1 / 3) and report.correct.shape == (30, samples)


def test_the_noise_knows_the_seed_and_no_training_step() -> None:
    oracle: Any = Oracle()
    evaluate(oracle, PROMPTS, SamplingParams(), seed=9)
    assert {seed for _, seed in oracle.calls} == {(9, -1)}


def test_more_samples_than_are_held_at_once_still_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", 2)
    oracle: Any = Oracle()
    report, _ = evaluate(oracle, PROMPTS[:3], SamplingParams(n=5), seed=0)
    assert [size for size, _ in oracle.calls] == [1, 1, 1] and report.correct.shape == (3, 5)
