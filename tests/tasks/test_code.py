"""The task `code`: generated problems, and rows in its own layout and those of MBPP and HumanEval."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from assay.rewards import CodeJudge
from assay.tasks import SPLITS, check_gold, make_task
from assay.tasks.code import NAME, OPERATIONS, STARTS, CodeProblem, draw_problem
from assay.types import Status, UserError

MBPP = {
    "task_id": 901,
    "text": "Write a function that adds two numbers.",
    "code": "import math\r\ndef helper(a):\r\n    return a\r\ndef sum(a, b):\r\n    return helper(a) + b",
    "test_list": ["assert sum(1, 2) == 3", "assert math.isclose(sum(0.1, 0.2), 0.3)"],
    "test_setup_code": "import math",
    "challenge_test_list": ["assert sum(10**9, 1) == 10**9 + 1"],
}
HUMANEVAL = {
    "task_id": "Own/1",
    "prompt": "from typing import List\n\ndef shift(x: int) -> int:\n    return x + 1\n\n"
    'def last(values: List[int]) -> int:\n    """Return the last value."""\n',
    "canonical_solution": "    return values[-1]\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert True\n    assert candidate([1, 2]) == 2\n"
    "    for n in range(3):\n        values = [n, shift(n)]\n        assert candidate(values) == n + 1\n"
    "    empty = []\n    try:\n        candidate(empty)\n        assert False\n    except IndexError:\n        pass\n",
    "entry_point": "last",
}
OWN = {
    "prompt": "Write a function double(x).",
    "tests": [{"call": "double(2)", "expected": 4}, "assert double(-1) == -2"],
    "solution": "def double(x):\n    return 2 * x",
}


pytestmark = pytest.mark.usefixtures("confined")


def stored(folder: Path, *rows: dict[str, Any], **args: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task("code", path=str(folder / "rows.jsonl"), **args)


@pytest.mark.parametrize("split", SPLITS)
def test_reference_programs_of_generated_problems_pass(split: str) -> None:
    task = make_task("code", timeout_s=60.0)
    assert check_gold(task, split, limit=12) == []
    prompt = task.prompts(split)[0]
    assert len(prompt.fields["tests"]) == 8 and "returns" in prompt.question


def test_tests_are_not_shown_and_wrong_programs_fail() -> None:
    task = make_task("code", timeout_s=60.0)
    for index in range(3):
        prompt = task.prompts("train")[index]
        assert not any(test["call"] in prompt.question for test in prompt.fields["tests"])
        constant = f"```python\ndef solve(x):\n    return {prompt.fields['tests'][0]['expected']!r}\n```"
        verdict = task.judge()(constant, prompt.answer, prompt.fields)
        assert verdict.status is Status.WRONG and verdict.reward == 0.0 < verdict.parts["tests"] < 1.0


def test_prompts_have_short_examples_and_the_number_of_steps() -> None:
    """A list of 300 multiples is a hidden test, not an example."""
    prompts = make_task("code", steps=[1, 1]).prompts("train")[:300]
    assert max(len(prompt.question) for prompt in prompts) < 900
    assert max(len(repr(test["expected"])) for prompt in prompts for test in prompt.fields["tests"]) > 300
    for prompt in make_task("code", steps=[4, 4], tests=3).prompts("train")[:5]:
        assert "\n4. " in prompt.question and "\n5. " not in prompt.question and len(prompt.fields["tests"]) == 3


@pytest.mark.parametrize("row", [OWN, MBPP, HUMANEVAL], ids=["own", "MBPP", "HumanEval"])
def test_layouts_of_rows(row: dict[str, Any], tmp_path: Path) -> None:
    task = stored(tmp_path, row, timeout_s=60.0)
    assert check_gold(task, "all") == []
    (prompt,) = task.prompts("all")
    wrong = task.judge()("```python\ndef last(v): return 0\ndef sum(a, b): return 0\n```", "", prompt.fields)
    assert wrong.status is Status.WRONG
    answered = stored(tmp_path, row, form="answer-tag", timeout_s=60.0)
    assert check_gold(answered, "all") == [] and "<answer>" in answered.prompts("all")[0].question


def test_mbpp_shows_the_requested_tests(tmp_path: Path) -> None:
    (prompt,) = stored(tmp_path, MBPP).prompts("all")
    assert prompt.id == "code/901" and prompt.fields["entry_points"] == ["sum"]
    assert MBPP["test_list"][0] in prompt.question and MBPP["test_list"][1] not in prompt.question
    (prompt,) = stored(tmp_path, {**MBPP, "prompt": MBPP["text"], "text": None}, shown_tests=0).prompts("all")
    assert "assert" not in prompt.question
    sanitized = {**MBPP, "test_setup_code": None, "test_imports": ["import math"]}
    assert check_gold(stored(tmp_path, sanitized, timeout_s=60.0), "all") == []


def test_humaneval_is_split_into_tests(tmp_path: Path) -> None:
    task = stored(tmp_path, HUMANEVAL, timeout_s=60.0)
    (prompt,) = task.prompts("all")
    assert len(prompt.fields["tests"]) == 3 and prompt.fields["entry_points"] == ["last"]
    judge = CodeJudge(partial=True, timeout_s=60.0)
    first = "```python\ndef last(values: List[int]):\n    return values[0] * 2\n```"
    assert judge(first, "", prompt.fields).parts["tests"] == pytest.approx(2 / 3)
    # A program cannot replace the functions of the prompt that tests use.
    cheat = "```python\ndef shift(x): return 2\ndef last(values): return 2\n```"
    assert judge(cheat, "", prompt.fields).parts["tests"] == pytest.approx(1 / 3)
    assert judge("```python\n    return values[-1]\n```", "", prompt.fields).correct


def test_humaneval_as_continuation(tmp_path: Path) -> None:
    task = stored(tmp_path, HUMANEVAL, form="continuation", timeout_s=60.0)
    (prompt,) = task.prompts("all")
    assert prompt.question == HUMANEVAL["prompt"] and prompt.solution == "    return values[-1]"
    assert check_gold(task, "all") == []
    judged = task.judge()("    return values[-1]\n\ndef other():\n    1 / 0\n\nprint(1 / 0)", "", prompt.fields)
    assert judged.correct


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"rows.jsonl:1 is not a code problem: it needs \"prompt\" and \"tests\""),
        ({"prompt": "x", "tests": []}, "a list that is not empty"),
        ({"prompt": "x", "tests": ["assert f("]}, "rows.jsonl:1, test 1 is not valid Python"),
        ({"prompt": "x", "tests": ["f(1)"], "setup": "import"}, "set-up of the tests is not valid Python"),
        ({"tests": ["f(1)"]}, 'has no column "prompt" or'),
        ({**MBPP, "test_list": "assert f(1)"}, "must be a list of assert statements"),
        ({**MBPP, "code": "def f("}, 'rows.jsonl:1, "code" is not valid Python'),
        ({**MBPP, "code": "x = 1"}, 'no test in "test_list" uses a function of "code"'),
        ({**HUMANEVAL, "entry_point": "first"}, "does not define the entry point first"),
        ({**HUMANEVAL, "test": "assert last([1]) == 1"}, r"must define one function check\(candidate\)"),
        ({**HUMANEVAL, "test": "def check(c):\n    c(1)"}, "must consist of assert statements"),
    ],
)
def test_malformed_rows_are_one_line_errors(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        stored(tmp_path, row).prompts("all")
    assert "\n" not in str(error.value)


def test_invalid_arguments_are_user_errors(tmp_path: Path) -> None:
    for args in ({"steps": [0, 1]}, {"tests": 1}, {"form": "boxed"}, {"form": "continuation"}, {"memory_mb": 1}):
        with pytest.raises(UserError):
            make_task("code", **args)
    with pytest.raises(UserError, match='no "prefix" to continue'):
        stored(tmp_path, OWN, form="continuation").prompts("all")


BY_SENTENCE = {operation.sentence: operation for operation in OPERATIONS}
BY_ARGUMENT = {start.argument: start for start in STARTS}


def run(problem: CodeProblem, value: Any) -> Any:
    names: dict[str, Any] = {}
    exec(problem.program, names)
    return names[NAME](value)


@pytest.mark.parametrize(
    ("argument", "sentences", "value", "result"),
    [
        ("numbers", ["Keep only the odd numbers.", "Take the sum."], [1, 2, -3, 5], 3),
        ("numbers", ["Square each number.", "Sort the numbers in descending order."], [1, -3, 2], [9, 4, 1]),
        ("numbers", ["Replace each number by the sum of all numbers up to and including it."], [1, 2, 3], [1, 3, 6]),
        ("numbers", ["Add the first number, subtract the second, add the third, and so on."], [5, 1, 2], 6),
        ("n", ["Build the list of its positive divisors in ascending order.", "Count the numbers."], 12, 6),
        ("n", ["Write it in base 2, as a string of 0 and 1.", "Reverse it."], 6, "011"),
        ("words", ["Reverse each string.", "Sort the strings alphabetically."], ["ab", "xa"], ["ax", "ba"]),
        ("text", ["Remove all vowels (a, e, i, o, u, in lower and upper case).", "Count its characters."], "a boat", 3),
        ("scores", ["Keep only the entries whose value is even."], {"Ann": 2, "Ben": 3}, {"Ann": 2}),
        ("scores", ["Build the list of the values in ascending order."], {"Ann": 2, "Ben": 1}, [1, 2]),
    ],
)
def test_programs_do_what_the_sentences_say(argument: str, sentences: list[str], value: Any, result: Any) -> None:
    lines = [BY_SENTENCE[sentence].line for sentence in sentences]
    assert run(CodeProblem(BY_ARGUMENT[argument], tuple(sentences), tuple(lines)), value) == result


def test_every_operation_has_its_parameters_and_fits_others() -> None:
    kinds = {start.kind for start in STARTS}
    for operation in OPERATIONS:
        for name in operation.parameters:
            assert f"{{{name}}}" in operation.sentence and f"{{{name}}}" in operation.line
        assert operation.takes in kinds | {other.gives for other in OPERATIONS}
    assert len(BY_SENTENCE) >= len(OPERATIONS) - 1  # "Reverse the list." is for numbers and for strings


def test_all_drawn_programs_run_on_all_inputs() -> None:
    rng = random.Random(0)
    used: Counter[str] = Counter()
    for _ in range(600):
        problem = draw_problem(rng, rng.randint(1, 4))
        if problem is None:
            continue
        calls = problem.calls(rng, 6)  # raises if the program does
        used.update(problem.lines)
        if calls is not None:
            assert len({call for call, _ in calls}) == 6
            assert len({repr(result) for _, result in calls}) > 1
    assert len(used) > 200
