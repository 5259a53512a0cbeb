"""Datasets of reasoning-gym: the package's own problems and scores, and splits that share no problem."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import pytest

from assay.envs import make_env
from assay.envs.check import check_env
from assay.rewards import JudgePool
from assay.rewards.verifiers import dataset
from assay.tasks import SPLITS, check_gold, make_task
from assay.tasks.base import overlap
from assay.types import Status, UserError

QUICK = ["chain_sum", "gcd"]
SLOW = ["basic_arithmetic", "mini_sudoku", "word_sorting", "spell_backward", "acre"]


@pytest.fixture(scope="module")
def gym() -> Any:
    return importlib.import_module("reasoning_gym")  # takes seconds


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset.cache_clear()
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
    for make in (make_task, make_env):
        with pytest.raises(UserError, match=r'reasoning_gym:gcd needs .* pip install "assay\[reasoning-gym\]"'):
            make("reasoning_gym:gcd")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_gold_answers_score_one_and_splits_are_disjoint(gym: Any, name: str) -> None:
    task = make_task(f"reasoning_gym:{name}", size=200)
    for split in SPLITS:
        assert check_gold(task, split, limit=10) == []
    parts = [task.prompts(split)[:80] for split in SPLITS]
    assert overlap(parts[0], parts[1]).n_shared == overlap(parts[0], parts[2]).n_shared == 0
    assert overlap(parts[1], parts[2]).n_shared == 0


def test_problems_equal_those_of_the_package(gym: Any) -> None:
    task = make_task("reasoning_gym:chain_sum", seed=3, size=50, eval_size=20, min_terms=5, max_terms=5)
    train, test = task.prompts("train"), task.prompts("test")
    assert len(train) == 50 and len(test) == len(task.prompts("validation")) == 20
    for prompt in (train[0], train[49], test[7]):
        place = prompt.fields
        theirs = gym.create_dataset(
            "chain_sum", seed=place["dataset_seed"], size=place["dataset_size"], min_terms=5, max_terms=5
        )[place["dataset_index"]]
        assert task.bare_question(prompt) == theirs["question"] and prompt.answer == theirs["answer"]
        assert prompt.question.count(" + ") + prompt.question.count(" - ") == 4
    other = make_task("reasoning_gym:chain_sum", seed=4, size=50, min_terms=5, max_terms=5)
    assert overlap(train, other.prompts("train")).n_shared == 0  # not the same problems shifted by one
    assert task.prompts("train")[5] == train[5]
    json.dumps(train[0].fields)  # as rollouts are written


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_scores_equal_those_of_the_package_and_only_full_scores_are_correct(gym: Any, workers: int) -> None:
    task = make_task("reasoning_gym:spell_backward", min_word_len=6, size=20)
    prompt = task.prompts("train")[0]
    items = {
        f"<answer>{prompt.answer}</answer>": (Status.OK, 1.0),
        f"Surely <answer>x</answer>. No: <answer> {prompt.answer} </answer>": (Status.OK, 1.0),
        f"<answer>{prompt.answer[:-1]}</answer>": (Status.WRONG, None),
        prompt.answer: (Status.NO_ANSWER, 0.0),
        f"<answer>{prompt.answer}": (Status.UNPARSABLE, 0.0),
        f"\\boxed{{{prompt.answer}}}": (Status.NO_ANSWER, 0.0),
    }
    source = gym.create_dataset("spell_backward", min_word_len=6)
    with JudgePool(task.judge(), workers=workers, timeout_s=60.0) as pool:
        verdicts = pool.judge([(text, prompt.answer, prompt.fields) for text in items])
    for verdict, (status, reward) in zip(verdicts, items.values(), strict=True):
        assert verdict.status is status, verdict
        assert reward is None or verdict.reward == reward
    partial = verdicts[2].reward
    assert 0 < partial < 1 and partial == source.score_answer(prompt.answer[:-1], {"answer": prompt.answer})
    relaxed = task.judge(strict=False)
    assert relaxed(f"\\boxed{{{prompt.answer}}}", prompt.answer, prompt.fields).status is Status.OK


def test_package_failure_gives_unparsable_and_missing_fields_give_error(gym: Any) -> None:
    task = make_task("reasoning_gym:prime_factorization")
    judge, prompt = task.judge(), task.prompts("test")[0]
    verdict = judge("<answer>no idea</answer>", prompt.answer, prompt.fields)
    assert verdict.status is Status.UNPARSABLE and "ValueError" in verdict.detail and verdict.reward == 0
    assert judge("<answer>7</answer>", prompt.answer, {}).status is Status.ERROR


def test_wrong_arguments_are_user_errors(gym: Any) -> None:
    for name, args, said in (
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "'max_term' of reasoning_gym:chain_sum: did you mean 'max_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "rejects these arguments"),
        ("chain_sum", {"seed": 64}, "seed must be from 0 to 63"),
        ("chain_sum", {"size": 0}, "size must be from 1 to 65,536"),
        ("chain_sum", {"path": "x"}, "unknown argument 'path'"),
    ):
        with pytest.raises(UserError, match=said):
            make_task(f"reasoning_gym:{name}", **args)


def test_dataset_with_too_few_problems_is_a_user_error(gym: Any) -> None:
    task = make_task("reasoning_gym:count_bits", min_n=5, max_n=5)
    with pytest.raises(UserError, match="too few different problems"):
        _ = [task.prompts(split)[0] for split in SPLITS]


def test_dataset_is_a_single_step_environment(gym: Any) -> None:
    env = make_env("reasoning_gym:chain_sum", max_terms=3)
    assert [finding for finding in check_env(env, 4) if not finding.ok] == []
    env.reset(options={"prompt": env.prompts("train")[2]})
    _, reward, terminated, _, info = env.step(f"<answer>{env.prompts('train')[2].answer}</answer>")
    assert reward == 1.0 and terminated and info["verdict"].status is Status.OK
