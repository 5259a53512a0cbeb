from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from assay import evals as module
from assay.engine.base import SamplingParams
from assay.evals import Report, bootstrap, compare, evaluate, paired_test, wilson
from assay.runs.rollouts import read_lines, write_rollouts
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict


def one_group(prompt: Prompt, statuses: list[Status], parsed: str | None) -> Group:
    completion = Completion([1], [0.0], [0.0], Finish.STOP)
    verdicts = [Verdict(float(status is Status.OK), status, parsed) for status in statuses]
    return Group(prompt, [Rollout(prompt, i, [Turn([2], completion, "")], v) for i, v in enumerate(verdicts)])


def make_groups(questions: int, samples: int, seed: int = 0, ids: list[str] | None = None) -> list[Group]:
    draw = random.Random(seed)
    groups = []
    for question in range(questions):
        prompt = Prompt(ids[question] if ids else f"q/{question}", ())
        rollouts = []
        for sample in range(samples):
            status = draw.choice([Status.OK, Status.OK, Status.WRONG, Status.NO_ANSWER, Status.UNPARSABLE])
            parsed = {Status.OK: "7", Status.WRONG: draw.choice("89")}.get(status)
            finish = draw.choice([Finish.STOP, Finish.LENGTH])
            written = [1] * draw.randint(1, 20)
            completion = Completion(written, [0.0] * len(written), [0.0] * len(written), finish)
            turns = [Turn([2, 3], completion, "")]
            rollouts.append(Rollout(prompt, sample, turns, Verdict(float(status is Status.OK), status, parsed)))
        groups.append(Group(prompt, rollouts))
    return groups


def same(one: Report, other: Report) -> bool:
    equal = np.array_equal(one.correct, other.correct)
    return equal and (one.ids, one.outcomes, one.tasks) == (other.ids, other.outcomes, other.tasks)


@pytest.mark.parametrize(("questions", "samples"), [(40, 1), (25, 4), (1, 3)])
def test_summary_equals_counting_by_hand(questions: int, samples: int) -> None:
    groups = make_groups(questions, samples)
    answers = [rollout for group in groups for rollout in group.rollouts]
    verdicts = [rollout.verdict for rollout in answers if rollout.verdict]
    found = Report.of(groups).summary()
    assert found["n"] == questions and found["samples"] == samples
    assert found["accuracy"] == pytest.approx(fmean(v.status is Status.OK for v in verdicts))
    assert found["mean_length"] == pytest.approx(fmean(r.length for r in answers))
    assert found["truncated"] == pytest.approx(fmean(r.truncated for r in answers))
    assert found["format"] == pytest.approx(fmean(v.parsed is not None for v in verdicts))
    assert sum(found["statuses"].values()) == len(answers)
    assert found["statuses"].get("ok", 0) == sum(v.status is Status.OK for v in verdicts)
    low, high = found["ci95"]
    assert 0 <= low <= found["accuracy"] <= high <= 1
    if samples == 1:
        assert (low, high) == wilson(sum(v.correct for v in verdicts), questions)
        assert "pass_at_k" not in found
    json.dumps(found)  # JSON numbers only


def test_pass_at_k_and_majority_by_brute_force() -> None:
    groups = make_groups(12, 4, seed=2)
    found = Report.of(groups).summary()
    for k in range(1, 5):
        passes, majorities = [], []
        for group in groups:
            verdicts = [r.verdict for r in group.rollouts if r.verdict]
            subsets = list(itertools.combinations(verdicts, k))
            passes.append(fmean(any(v.correct for v in subset) for subset in subsets))
            votes = [v.parsed for v in verdicts[:k] if v.parsed is not None]
            winner = max(votes, key=lambda vote: (votes.count(vote), -votes.index(vote))) if votes else None
            majorities.append(winner == "7")
        assert found["pass_at_k"][str(k)] == pytest.approx(fmean(passes))
        assert found["majority_at_k"][str(k)] == pytest.approx(fmean(majorities))
        if k < 4:
            assert tuple(found["pass_at_k_ci95"][str(k)]) == pytest.approx(bootstrap(passes, seed=0))
        else:  # k = 4 of 4: values are 0 or 1
            assert tuple(found["pass_at_k_ci95"]["4"]) == wilson(int(sum(passes)), 12)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("status", [Status.OK, Status.WRONG])
def test_interval_of_equal_answers_has_a_width(samples: int, status: Status) -> None:
    groups = [one_group(Prompt(f"q/{n}", ()), [status] * samples, "7") for n in range(30)]
    found = Report.of(groups).summary()
    right = 30 if status is Status.OK else 0
    # Samples of one question are not independent: the interval is that of 30 answers, not of 120.
    assert tuple(found["ci95"]) == wilson(right, 30) and found["ci95"][1] - found["ci95"][0] > 0.1
    assert found["accuracy"] == right / 30 and found["ci95"][0 if right == 0 else 1] == found["accuracy"]


def test_majority_is_omitted_without_parsed_answers() -> None:
    statuses = [Status.OK, Status.WRONG, Status.OK]
    unread = Report.of([one_group(Prompt("q/0", ()), statuses, None)]).summary()
    assert "majority_at_k" not in unread and unread["pass_at_k"]["1"] == pytest.approx(2 / 3)
    groups = [one_group(Prompt("q/0", ()), statuses, None), one_group(Prompt("q/1", ()), statuses, "7")]
    assert Report.of(groups).summary()["majority_at_k"]["3"] == 0.5  # one question with parsed answers is enough


@pytest.mark.parametrize("samples", [1, 3])
def test_report_read_from_files_equals_report_of_groups(tmp_path: Path, samples: int) -> None:
    groups = make_groups(15, samples, seed=3)
    write_rollouts(tmp_path, 4, groups, "eval", split="test")
    assert same(Report.read(read_lines(tmp_path, 4, "eval", "test")), Report.of(groups))


def test_questions_with_the_same_id_are_kept_separate(tmp_path: Path) -> None:
    groups = make_groups(4, 2, ids=["a", "b", "a", "c"])
    write_rollouts(tmp_path, 0, groups, "eval")
    assert same(Report.read(read_lines(tmp_path, 0, "eval")), Report.of(groups))


@pytest.mark.parametrize("samples", [1, 3])
def test_compare_is_the_paired_test_of_mean_correctness(samples: int) -> None:
    before, after = Report.of(make_groups(60, samples, seed=4)), Report.of(make_groups(60, samples, seed=5))
    expected = paired_test(before.correct.mean(axis=1), after.correct.mean(axis=1), seed=0)
    found = compare(before, after)
    assert (found.gained, found.lost) == (expected.gained, expected.lost) and found.gained and found.lost
    assert found.p_value == pytest.approx(expected.p_value)


def test_compare_requires_the_same_questions() -> None:
    with pytest.raises(AssertionError, match="same questions"):
        compare(Report.of(make_groups(3, 1)), Report.of(make_groups(3, 1, ids=["x", "y", "z"])))


class Oracle:
    """A collector that is correct on every third question, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, int]]] = []
        self.shown: list[str] = []

    def collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, seed: tuple[int, int], what: str
    ) -> list[Group]:
        self.calls.append((len(prompts), seed))
        self.shown.append(what)
        return [Group(p, [self.rollout(p, i) for i in range(params.n)]) for p in prompts]

    def rollout(self, prompt: Prompt, sample: int) -> Rollout:
        status = Status.OK if int(prompt.id) % 3 == 0 else Status.WRONG
        completion = Completion([1], [0.0], [0.0], Finish.STOP)
        return Rollout(prompt, sample, [Turn([0], completion, "")], Verdict(0.0, status, "1"))


PROMPTS = [Prompt(str(index), ()) for index in range(30)]


@pytest.mark.parametrize(
    ("samples", "at_once", "sizes"), [(1, 4096, [30]), (1, 12, [12, 12, 6]), (4, 40, [10] * 3), (5, 2, [1] * 30)]
)
def test_evaluate_splits_prompts_into_batches_in_order(
    monkeypatch: pytest.MonkeyPatch, samples: int, at_once: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", at_once)
    oracle: Any = Oracle()
    report, groups = evaluate(oracle, PROMPTS, SamplingParams(n=samples), seed=9)
    assert oracle.calls == [(size, (9, -1)) for size in sizes]  # seeds do not depend on the training step
    parts = [f"evaluating, part {part} of {len(sizes)}" for part in range(1, len(sizes) + 1)]
    assert oracle.shown == (parts if len(sizes) > 1 else ["evaluating"])
    assert report.ids == [p.id for p in PROMPTS] == [g.prompt.id for g in groups]
    assert report.accuracy == pytest.approx(1 / 3) and report.correct.shape == (30, samples)
