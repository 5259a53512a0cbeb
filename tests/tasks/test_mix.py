"""Several tasks as one: proportions, order, judges, splits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from assay.rewards import JudgePool
from assay.tasks import check_gold, make_task
from assay.tasks.registry import cycle_counts, interleave, permuted
from assay.types import TASK_LABEL, Status, UserError

SMALL = {"name": "abacus", "weight": 3, "args": {"train_size": 24, "eval_size": 9}}
COUNTDOWN = {"name": "countdown", "weight": 1}


def mix(*tasks: dict[str, Any], **args: Any) -> Any:
    return make_task("mix", tasks=list(tasks), **args)


def test_train_prompts_have_the_exact_proportions_in_every_cycle() -> None:
    prompts = mix(SMALL, COUNTDOWN).prompts("train")
    labels = [prompts[index].fields[TASK_LABEL] for index in range(80)]
    for start in range(0, 80, 4):
        assert Counter(labels[start : start + 4]) == {"abacus": 3, "countdown": 1}


def test_a_split_with_an_end_is_repeated_in_another_order() -> None:
    prompts = mix(SMALL, COUNTDOWN).prompts("train")
    own = [prompt.id for prompt in prompts[:64] if prompt.fields[TASK_LABEL] == "abacus"]
    first, second = own[:24], own[24:48]
    assert len(set(first)) == 24 and set(first) == set(second) and first != second
    assert [prompt.id for prompt in prompts[30:40]] == [prompts[index].id for index in range(30, 40)]
    other = mix(SMALL, COUNTDOWN, seed=1).prompts("train")
    assert [prompt.id for prompt in other[:8]] != [prompt.id for prompt in prompts[:8]]


def test_evaluation_splits_have_every_problem_once_and_start_in_proportion() -> None:
    prompts = mix(SMALL, COUNTDOWN, eval_size=5).prompts("test")
    assert Counter(prompt.fields[TASK_LABEL] for prompt in prompts) == {"abacus": 9, "countdown": 5}
    assert len({prompt.id for prompt in prompts}) == 14
    assert Counter(prompt.fields[TASK_LABEL] for prompt in prompts[:4]) == {"abacus": 3, "countdown": 1}


def test_each_answer_is_judged_by_the_judge_of_its_task() -> None:
    task = mix(SMALL, COUNTDOWN, eval_size=9)
    assert check_gold(task, "test") == []
    prompts = task.prompts("test")
    with JudgePool(task.judge(), workers=1) as pool:
        verdicts = pool.judge([(task.gold_completion(prompt), prompt.answer, prompt.fields) for prompt in prompts])
        (lost,) = pool.judge([("", "", {})])
    assert all(verdict.correct for verdict in verdicts) and lost.status is Status.ERROR


def test_labels_tell_two_tasks_of_one_name_apart() -> None:
    task = mix(SMALL, {**SMALL, "label": "harder", "args": {"min_steps": 4, "max_steps": 4, "eval_size": 9}})
    ids = [prompt.id for prompt in task.prompts("test")]
    assert len(set(ids)) == 18 and sum(name.startswith("harder/abacus/") for name in ids) == 9
    assert set(task.words()) >= set(make_task("abacus").words())


@pytest.mark.parametrize(
    ("tasks", "word"),
    [
        ([], "needs tasks"),
        ([SMALL, SMALL], "label"),
        ([{"name": "abacus", "weigth": 3}], "did you mean 'weight'"),
        ([{"name": "abacus", "weight": 0}], "above 0"),
        ([{"weight": 1}], "name"),
        ([{"name": "abacuz"}], "did you mean 'abacus'"),
        ([{"name": "abacus", "label": "a/b"}], "slash"),
    ],
)
def test_invalid_mixes_are_user_errors(tasks: list[dict[str, Any]], word: str) -> None:
    with pytest.raises(UserError, match=word):
        mix(*tasks)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([3, 1], [3, 1]), ([0.7, 0.3], [7, 3]), ([1, 1, 2], [1, 1, 2]), ([0.5, 0.25], [2, 1]), ([1e-9, 1], [1, 10_000])],
)
def test_cycle_counts_are_in_proportion_to_the_weights(weights: list[float], counts: list[int]) -> None:
    assert cycle_counts(weights) == counts


def test_tasks_are_interleaved_evenly() -> None:
    order = [number for number, _ in interleave([7, 2, 1])]
    assert Counter(order) == {0: 7, 1: 2, 2: 1}
    for end in range(1, 11):
        assert all(abs(order[:end].count(number) - share * end) < 1 for number, share in enumerate((0.7, 0.2, 0.1)))


@pytest.mark.parametrize("size", [1, 3, 24])
def test_permuted_is_a_permutation_that_depends_on_its_key(size: int) -> None:
    first = [permuted(index, size, "a") for index in range(size)]
    assert sorted(first) == list(range(size))
    assert size < 24 or first not in (list(range(size)), [permuted(index, size, "b") for index in range(size)])
