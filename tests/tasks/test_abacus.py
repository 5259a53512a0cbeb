from __future__ import annotations

import re

import pytest

from assay.tasks import Abacus, check_gold
from assay.tasks.abacus import PRONOUNS, VERBS, split_words
from assay.tasks.base import SPLITS
from assay.types import UserError

OPERATION_OF = {verb: operation for operation, verbs in VERBS.items() for verb in verbs}
SETTINGS = [
    {},
    {"operations": "+-*", "distractors": 2, "max_value": 60, "min_steps": 1, "max_steps": 5},
    {"style": "plain", "operations": "*-", "distractors": 1, "noise": 0.5},
    {"noise": 0.35, "max_change": 20, "min_start": 0, "max_start": 30, "max_value": 30},
]


def read_tokens_question(question: str) -> tuple[int, list[tuple[str, int]]]:
    """Parse start and steps, ignoring distractors."""
    item = re.fullmatch(r".*How many (\w+) \?", question)[1]
    name, start = re.search(rf"(\w+) has (\d+) {item} \.", question).groups()
    sentences = re.findall(rf"{PRONOUNS[name]} (\w+) (\d+) \.", question)
    return int(start), [(OPERATION_OF[verb], int(number)) for verb, number in sentences]


def compute(start: int, steps: list[tuple[str, int]]) -> list[int]:
    values = [start]
    for operation, operand in steps:
        values.append(eval(f"{values[-1]} {operation} {operand}"))
    return values


def test_answer_follows_from_the_question():
    task = Abacus(operations="+-*", distractors=2, min_steps=1, max_steps=4)
    for prompt in task.prompts("train")[:300]:
        values = compute(*read_tokens_question(prompt.question))
        assert prompt.answer == str(values[-1])
        assert all(0 <= value <= task.max_value for value in values)
        assert prompt.solution.endswith(f"; #### {prompt.answer}")


def equations(solution: str) -> list[tuple[int, str, int, int]]:
    found = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", solution)
    return [(int(a), operation, int(b), int(c)) for a, operation, b, c in found]


def test_solutions_without_noise_are_chains_of_correct_equations():
    for prompt in Abacus(operations="+-*").prompts("test")[:150]:
        lines = equations(prompt.solution)
        assert [eval(f"{a}{op}{b}") for a, op, b, _ in lines] == [c for *_, c in lines]
        assert [line[3] for line in lines[:-1]] == [line[0] for line in lines[1:]]
        assert prompt.solution == Abacus(operations="+-*").gold_completion(prompt)


def test_noise_changes_its_share_of_steps_and_nothing_else():
    clean, noisy = Abacus(), Abacus(noise=0.35)
    n_steps = n_wrong = 0
    for before, after in zip(clean.prompts("train")[:800], noisy.prompts("train")[:800], strict=True):
        assert (before.question, before.answer) == (after.question, after.answer)
        assert noisy.gold_completion(after) == before.solution
        lines = equations(after.solution)
        assert [line[3] for line in lines[:-1]] == [line[0] for line in lines[1:]], "continues from the wrong value"
        assert after.solution.endswith(f"#### {lines[-1][3]}")
        n_steps += len(lines)
        n_wrong += sum(eval(f"{a}{op}{b}") != c for a, op, b, c in lines)
    assert 0.30 < n_wrong / n_steps < 0.38


@pytest.mark.parametrize("style", ["tokens", "plain"])
def test_gold_completions_are_correct_even_with_noise(style):
    task = Abacus(style=style, noise=0.5, operations="+-*")
    for split in SPLITS:
        assert check_gold(task, split, limit=100) == []


@pytest.mark.parametrize("settings", SETTINGS)
def test_words_cover_all_prompts_and_solutions(settings):
    task = Abacus(**settings)
    words = task.words()
    assert words == sorted(set(words)) and len(words) >= 40
    assert {word for word in task.words(digits=True) if word.isdigit()} == set("0123456789")
    for split, count in (("train", 800), ("validation", 50), ("test", 50)):
        for prompt in task.prompts(split)[:count]:
            used = split_words(f"{prompt.question} {prompt.solution} {task.gold_completion(prompt)} {prompt.answer}")
            assert set(words).issuperset(used)
            assert task.style == "plain" or prompt.question.split() == split_words(prompt.question)


def test_problem_depends_only_on_its_index():
    prompts = Abacus().prompts("train")
    assert len(prompts) == 2**31
    assert prompts[1_000_000_007] == prompts[1_000_000_007:][0] == Abacus().prompts("train")[1_000_000_007]
    assert prompts[-1].id == f"abacus/train/{2**31 - 1}"
    assert [p.id for p in prompts[4:10:3]] == ["abacus/train/4", "abacus/train/7"]
    assert prompts[5].question != Abacus(seed=1).prompts("train")[5].question
    with pytest.raises(IndexError):
        Abacus(eval_size=10).prompts("test")[10]


def test_difficulty_settings():
    task = Abacus(min_steps=4, max_steps=6, max_change=3, min_start=5, max_start=6, operations="-+")
    counts = set()
    for prompt in task.prompts("train")[:150]:
        counts.add(len(prompt.fields["steps"]))
        assert 5 <= prompt.fields["start"] <= 6
        assert all(1 <= operand <= 3 for _, operand in prompt.fields["steps"])
    assert counts == {4, 5, 6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_steps": 3, "max_steps": 2}, "min_steps"),
        ({"max_value": 5}, "max_value"),
        ({"operations": "+/"}, "operations"),
        ({"style": "prose"}, "style"),
        ({"noise": 1.5}, "noise"),
        ({"distractors": 9}, "distractors"),
    ],
)
def test_invalid_settings_are_user_errors(settings, message):
    with pytest.raises(UserError, match=message):
        Abacus(**settings)


def test_empty_split_is_a_user_error():
    task = Abacus(min_steps=1, max_steps=1, max_change=1, min_start=1, max_start=1, operations="+")
    with pytest.raises(UserError, match="no problem in the"):
        _ = [task.prompts(split)[0] for split in SPLITS]
    with pytest.raises(UserError, match='unknown split "dev"'):
        task.prompts("dev")
