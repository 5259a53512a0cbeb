"""Generated tasks: Countdown and abacus."""

from __future__ import annotations

import itertools
import json
import re
from fractions import Fraction

import pytest

from assay.tasks import Abacus, check_gold, make_task
from assay.tasks.abacus import PRONOUNS, VERBS, split_words
from assay.tasks.base import SPLITS
from assay.tasks.countdown import Countdown, Term, solve
from assay.types import UserError


def reachable(nums: tuple[int, ...]) -> set[Fraction]:
    """Return all values of expressions that use every number once, by recursive splitting into two parts."""
    if len(nums) == 1:
        return {Fraction(nums[0])}
    values = set()
    for size in range(1, len(nums)):
        for left in itertools.combinations(range(len(nums)), size):
            right = [index for index in range(len(nums)) if index not in left]
            for a in reachable(tuple(nums[i] for i in left)):
                for b in reachable(tuple(nums[i] for i in right)):
                    values |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return values


def test_problems_are_solvable_and_within_the_settings():
    task = Countdown(max_number=30, max_target=60)
    lengths = set()
    for prompt in task.prompts("train")[:40]:
        nums, target = prompt.fields["nums"], prompt.fields["target"]
        lengths.add(len(nums))
        assert all(1 <= number <= 30 for number in nums) and 1 <= target <= 60
        assert Fraction(target) in reachable(tuple(nums))
        assert str(target) in prompt.question and all(str(number) in prompt.question for number in nums)
    assert lengths == {3, 4}


def test_solutions_are_correct():
    for integers in (True, False):
        task = Countdown(integers=integers)
        for split in SPLITS:
            assert check_gold(task, split, limit=25) == []
        for prompt in task.prompts("train")[:40]:
            thought, expression = re.fullmatch(
                r"<think>\n(.*)\n</think>\n<answer>(.*)</answer>", prompt.solution, re.DOTALL
            ).groups()
            assert sorted(map(int, re.findall(r"\d+", expression))) == sorted(prompt.fields["nums"])
            assert abs(eval(expression) - prompt.fields["target"]) < 1e-9
            for line in thought.split("\n"):
                left, right = line.split(" = ")
                assert abs(eval(left) - eval(right)) < 1e-9
                assert not integers or re.fullmatch(r"[1-9]\d*", right)


def test_solver_agrees_with_brute_force():
    for nums in ((1, 2, 3), (4, 4, 7), (2, 3, 5, 9)):
        values = reachable(nums)
        for target in range(1, 40):
            solution = solve([Term(number, str(number)) for number in nums], target)
            assert (solution is not None) == (Fraction(target) in values)
            assert solution is None or solution.value == target


def test_problems_from_a_file(tmp_path):
    own = [{"role": "user", "content": "my own wording"}]
    rows = [{"nums": [2, 3, 4], "target": 14, "messages": own}] + [
        {"nums": [n, 3, 4], "target": n + 7} for n in range(9)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = make_task("countdown", path=str(tmp_path / "mine.jsonl"))
    rows_given = task.prompts("all")
    assert rows_given[0].messages == tuple(own) and rows_given[0].fields == {"nums": [2, 3, 4], "target": 14}
    assert "Reach 8 with the numbers 1, 3, 4." in rows_given[2].question
    assert check_gold(task, "all") == []
    assert [len(task.prompts(split)) for split in SPLITS] == [8, 1, 1]
    (tmp_path / "mine.jsonl").write_text('{"nums": [1, 1], "target": 99}\n')
    assert check_gold(make_task("countdown", path=str(tmp_path / "mine.jsonl")), "all") == ["countdown/all/0"]


def test_invalid_input_is_a_user_error(tmp_path):
    file = tmp_path / "bad.jsonl"
    for row, message in (
        ({"nums": "1 2", "target": 3}, '"nums" must be a list'),
        ({"nums": [1, 2], "target": "3"}, '"target" must be'),
        ({"target": 3}, 'has no column "nums" or "numbers"; it has "target"'),
    ):
        file.write_text(json.dumps(row))
        with pytest.raises(UserError, match=message):
            make_task("countdown", path=str(file)).prompts("all")
    with pytest.raises(UserError, match="single file"):
        Countdown().prompts("all")
    with pytest.raises(UserError, match="numbers must be a range"):
        Countdown(numbers=(3, 9))


def test_tries_add_failed_attempts_to_the_solution_and_keep_the_problem():
    plain, searching = (Countdown(numbers=(3, 3), tries=tries) for tries in (0, 4))
    misses = []
    for before, prompt in zip(plain.prompts("train")[:100], searching.prompts("train")[:100], strict=True):
        assert prompt.messages == before.messages and prompt.fields == before.fields
        assert prompt.solution.rpartition("\n")[2] == before.solution.rpartition("\n")[2]
        *failures, hit = re.search(r"<think>\n(.*)\n</think>", prompt.solution, re.DOTALL)[1].split("\n")
        for line, ending in (*((line, "no") for line in failures), (hit, "yes")):
            *equations, verdict = line.split(", ")
            sides = [equation.split(" = ") for equation in equations]
            results = [result for left, result in sides if eval(left) == int(result)]
            assert verdict == ending and len(results) == len(equations) == 2
            assert (int(results[-1]) == prompt.fields["target"]) == (ending == "yes")
        assert len(set(failures)) == len(failures)
        misses.append(len(failures))
    assert set(misses) == {0, 1, 2, 3, 4}
    assert check_gold(searching, "test", limit=60) == []
    with pytest.raises(UserError, match="tries"):
        Countdown(tries=-1)


# Abacus


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
