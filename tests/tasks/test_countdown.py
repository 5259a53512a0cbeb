from __future__ import annotations

import itertools
import json
import re
from fractions import Fraction

import pytest

from assay.tasks import check_gold, make_task
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
