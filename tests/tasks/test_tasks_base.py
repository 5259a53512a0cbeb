from __future__ import annotations

import time

import pytest

from assay.tasks import Task, base, check_gold, overlap
from assay.tasks.base import (
    MAX_REJECTED,
    UNLIMITED,
    FilteredPrompts,
    LazyPrompts,
    carve_validation,
    prompts_of,
)
from assay.types import Prompt, UserError


def ask(name: str, text: str) -> Prompt:
    return Prompt(name, ({"role": "user", "content": text},))


def test_overlap_ignores_case_and_whitespace():
    train = [ask("t0", "How many  apples?"), ask("t1", "Two"), ask("t2", "three")]
    evaluation = [ask("e0", "how many\napples? "), ask("e1", "four"), ask("e2", "THREE")]
    report = overlap(train, evaluation)
    assert (report.n_train_checked, report.n_eval, report.n_shared) == (3, 3, 2)
    assert report.examples == (("e0", "t0"), ("e2", "t2"))
    assert not report.sampled and str(report).startswith("2 of 3 evaluation prompts")


def test_overlap_of_long_splits_is_sampled():
    unlimited = LazyPrompts(lambda index: ask(f"t{index}", str(index)), 2**31)
    report = overlap(unlimited, [ask("e0", "17"), ask("e1", "-1")])
    assert report.n_shared == 1 and report.sampled and "sample" in str(report)
    assert report.n_train_checked < 10_000
    assert overlap(unlimited, [ask("e0", "17")], limit=100).n_train_checked == 100


def numbered(keep) -> FilteredPrompts:
    prompts = LazyPrompts(lambda index: ask(f"t/{index}", str(index)), UNLIMITED)
    return FilteredPrompts(prompts, lambda prompt: keep(int(prompt.question)), "the rule")


def test_generated_prompts_that_take_long_are_compared_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def slow(index: int) -> Prompt:
        made.append(index)
        time.sleep(0.02)
        return ask(f"t{index}", str(index))

    monkeypatch.setattr(base, "LAZY_S", 0.1)
    report = overlap(LazyPrompts(slow, UNLIMITED), [ask("e0", "1"), ask("e1", "-1")])
    assert report.sampled and report.n_shared == 1 and 2 <= report.n_train_checked == len(made) < 100


def test_rejected_problems_of_an_endless_split_are_replaced_by_others():
    prompts = numbered(lambda number: number % 3 > 0)
    ids = [int(prompt.id.removeprefix("t/")) for prompt in prompts[:300]]
    assert len(prompts) == UNLIMITED and all(number % 3 for number in ids) and len(set(ids)) == 300
    assert [index for index, number in enumerate(ids) if index == number] == [i for i in range(300) if i % 3]
    assert prompts.rejected >= 100
    alone = numbered(lambda number: number % 3 > 0)
    assert alone[153] == prompts[153] and alone[10**7] and alone[UNLIMITED - 1]  # depends on the index only


def test_a_filter_that_rejects_everything_is_an_error():
    with pytest.raises(UserError, match="256 generated problems in a row violate the rule"):
        numbered(lambda number: False)[0]
    assert numbered(lambda number: number == UNLIMITED - MAX_REJECTED)[0].id == f"t/{UNLIMITED - MAX_REJECTED}"


class Sums(Task):
    name = "sums"
    instruction = "Be brief."

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt("sums/0", ({"role": "user", "content": "1 + 1?\nBe brief."},), "2")]


def test_default_judge_accepts_the_default_gold_completion() -> None:
    task = Sums()
    (prompt,) = task.prompts("train")
    assert task.gold_completion(prompt) == r"\boxed{2}" and task.bare_question(prompt) == "1 + 1?"
    assert check_gold(task, "train") == []
    assert check_gold(task, "train", judge=task.judge("hash")) == ["sums/0"]


def test_split_all_exists_only_for_single_files() -> None:
    with pytest.raises(UserError, match="all"):
        prompts_of(Sums(), "all")


def test_validation_is_the_head_of_a_seeded_shuffle() -> None:
    train, validation = carve_validation(100, 10, seed=3)
    assert sorted(train + validation) == list(range(100)) and len(validation) == 10 and train == sorted(train)
    assert carve_validation(100, 10, seed=3) == (train, validation) != carve_validation(100, 10, seed=4)
    with pytest.raises(UserError, match="val_size"):
        carve_validation(10, 10, seed=0)
