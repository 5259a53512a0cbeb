from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_env import build

from assay.envs import make_env
from assay.envs.base import SEED
from assay.envs.builtin import check_equations, recompute_calls
from assay.tasks import make_task
from assay.testing.env import check_env, play
from assay.types import Status, UserError


def test_stepwise_rewards_correct_equations() -> None:
    env = build("stepwise", task="abacus", separator=";", line_reward=0.25, max_lines=4)
    env.reset(seed=0)
    answer = env.prompt.answer
    assert env.step("1 + 1 = 2 ;")[1:3] == (0.25, False)
    assert env.step("2 + 1 = 4 ;")[1:3] == (-0.25, False)
    assert env.step("no equation ;")[1:3] == (0.0, False)
    observation, reward, terminated, _, info = env.step(f"#### {answer}")
    assert (observation, reward, terminated) == ("", 1.0, True) and info["verdict"].correct
    env.reset(seed=0)
    assert env.step(f"#### {answer} ;")[2]  # an answer ends the episode
    env.reset(seed=0)
    assert [env.step("hm ;")[2] for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (1, ["4 + 5 = 9", "so (4+5)*2 = 18 apples", "first, 4 + 5 = 9", "x = 4 + 5 = 9"]),
        (1, ["4 + 5 = 9 + 1 = 10"]),  # only the last equation has a number on its right
        (-1, ["4 + 5 = 9 and 9 + 1 = 11", "4 + 5 = 9, 9 + 1 = 11", "4 + 5 = 8"]),
        (0, ["1,004 + 5 = 9", "2 * 600 = 1,200"]),  # a comma within a number
        (0, ["9 = 9", "no equation", "= = ="]),  # no operation
        (0, ["3/5 x 100 = 60", "3 / 2 = 1 1/2 hours", "1 - 3/5 = 2/5 of it", "3 / 6 = 50%", "X + 80*2 = 1920"]),
        (0, [part * 500_000 for part in ("1 ", "1+", "(")]),  # in quadratic time this would take more than an hour
    ],
)
def test_only_complete_equations_of_a_line_are_checked(value: int, lines: list[str]) -> None:
    assert [line[:99] for line in lines if check_equations(line) != value] == []


def test_calculator_completes_calls_and_nothing_else() -> None:
    task = make_task("abacus", style="plain")
    env: Any = make_env("calculator", task=task)
    env.reset(seed=1)
    assert env.step("Half of 48 is <<48/2=")[:3] == ("24>>", 0.0, False)
    assert env.step(" and x =")[0] == ""  # no call
    assert env.step(" <<1/3=")[0] == "1/3>>"
    assert env.step(" <<2+=")[0] == "error>>"
    assert env.step(" <<1+1=2")[0] == ""  # the policy stated a result itself
    step = env.step(f">> so \\boxed{{{env.prompt.answer}}}")
    assert step[1:3] == (1.0, True) and "<<48/2=24>>" in env.reply
    words: Any = build("calculator", task="abacus")
    words.reset(seed=1)
    assert words.step("<< 4 + 5 =")[0] == " 9 >>"  # words of this task are separated by spaces
    assert {"<<", ">>"} <= set(words.words())


def test_stepwise_with_calculator() -> None:
    task = make_task("abacus", style="plain")
    env: Any = make_env("stepwise", task=task, calculator=True, max_lines=2, line_reward=0.25)
    env.reset(seed=1)
    assert env.step("Half of 48 =")[:3] == ("", 0.0, False)  # no call
    assert env.step(" <<48/2=")[:3] == ("24>>", 0.0, False)
    assert env.step("24\n")[:3] == ("", 0.25, False) and env.lines == 1  # one line with a correct equation
    assert env.step("<<1/3=\n")[:3] == ("", 0.0, True)  # the line ended before the call was completed
    env.reset(seed=1)
    assert env.step(f"\\boxed{{{env.prompt.answer}}} <<2+2=")[0] == "4>>"
    assert env.step("\n")[1:3] == (1.25, True)  # an answer anywhere in the line ends the episode
    words: Any = build("stepwise", task="abacus", separator=";", calculator=True)
    assert {"<<", ">>", "="} <= set(words.words())
    assert [finding for finding in check_env(words, episodes=6) if not finding.ok] == []


def test_results_in_worked_solutions_are_those_of_the_calculator() -> None:
    solution = "8*18 = $<<8*18=144.00>>144.00, a third <<1/3=.33>>.33, <<560//10=56>>56 = 56, <<2+2= and << 1 >> x=y"
    expected = "8*18 = $<<8*18=144>>144.00, a third <<1/3=1/3>>.33, <<560//10=error>>56 = 56, <<2+2=4>> and << 1 >> x=y"
    assert recompute_calls(solution, "<<", ">>") == expected
    assert recompute_calls("[4 + 5 = 9 ] = 9", "[", "]", " ") == "[4 + 5 = 9 ] = 9"
    assert recompute_calls(expected, "<<", ">>") == expected


@pytest.mark.parametrize(("name", "args"), [("calculator", {}), ("stepwise", {"calculator": True})])
@pytest.mark.parametrize(
    ("split", "first", "changed"), [("test", 200, 8), pytest.param("train", 1_500, 54, marks=pytest.mark.slow)]
)
def test_gold_policy_solves_gsm8k_with_a_calculator(
    name: str, args: dict[str, Any], split: str, first: int | None, changed: int, gsm8k_folder: Path
) -> None:
    task = make_task("gsm8k", gsm8k_folder, annotations=True, solution_style="hash", val_size=0)
    env = make_env(name, task=task, **args)
    prompts = env.prompts(split)[:first]
    played = [play(env, prompt, lambda episode, _: episode.gold_action()) for prompt in prompts]
    assert [prompt.id for prompt, steps in zip(prompts, played, strict=True) if steps[-1][1][1:3] != (1.0, True)] == []
    assert sum(env.gold_completion(prompt) != prompt.solution for prompt in prompts) == changed  # 144.00 becomes 144


@pytest.fixture(scope="module")
def python_tool() -> Iterator[Any]:
    env = make_env("python", task=make_task("abacus", style="plain"), timeout_s=1.0)
    yield env
    env.close()


def test_python_tool_evaluates_expressions_with_limits(python_tool: Any) -> None:
    env = python_tool
    calls = [
        ("<python>sum(x*x for x in range(4))</python>", "14"),
        ("<python>comb(5, 2)</python>", "10"),
        ("<python>().__class__</python>", "Attribute is not allowed"),
        ("<python>open('x')</python>", "open"),
        ("<python>1/0</python>", "ZeroDivisionError"),
        ("<python>sum(1 for _ in range(10**12))</python>", "<result>took longer than 1 s"),
        ("</python>", "no expression"),
    ]
    episodes = [env.copy() for _ in calls]
    for episode in episodes:
        episode.reset(seed=0)
    steps = env.step_all(episodes, [f"so {call}" for call, _ in calls])
    for (call, expected), (observation, _, terminated, _, _) in zip(calls, steps, strict=True):
        assert expected in observation and observation.endswith("</result>") and not terminated, call
    last = episodes[0].step(f"\\boxed{{{episodes[0].prompt.answer}}}")
    assert last[1] == 1.0 and "<result>14</result>" in episodes[0].reply


@pytest.mark.parametrize("rest", [".", "\n\n", "<", "<x"])
def test_token_that_ends_a_python_call_may_hold_more_text(python_tool: Any, rest: str) -> None:
    """Tokenizers have tokens such as >. and ><, as in </python><result>."""
    env = python_tool.copy()
    env.reset(seed=0)
    action = f"so <python>1</python> <python>2+2</python>{rest}"
    shown = "result>4</result>" if rest == "<" else "<result>4</result>"
    assert env.step(action)[0] == shown and env.reply == action + shown


def test_python_tool_cannot_be_used_after_close() -> None:
    env: Any = make_env("python", task=make_task("abacus", style="plain"))
    env.reset(seed=0)
    for _ in range(2):
        env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step("<python>1</python>")


def test_guess_a_number() -> None:
    env = build("guess", low=1, high=7, tries=3)
    for prompt in env.prompts("test")[:20]:
        env.start(prompt)
        assert 1 <= env.secret <= 7 and random.Random(prompt.fields[SEED]).randint(1, 7) == env.secret
    env.secret = 6
    assert env.step("4")[:4] == ("Higher .", 0.0, False, False)
    assert env.step("the 7")[:4] == ("Lower .", 0.0, False, False)
    observation, reward, terminated, _, info = env.step("no idea")
    assert (observation, reward, terminated, info["verdict"].status) == ("Lost .", 0.0, True, Status.NO_ANSWER)
    words = set(env.words())
    assert all(set(m["content"].split()) <= words for p in env.prompts("train")[:5] for m in p.messages)


def test_countdown_tries_gives_feedback_and_decays_the_reward() -> None:
    env = build("countdown_tries", tries=3, decay=0.5)
    env.reset(seed=2)
    nums = env.prompt.fields["nums"]
    observation, reward, terminated, _, _ = env.step(f"<answer>{nums[0]} + {nums[0]}</answer>")
    assert "uses the numbers" in str(observation) and "2 tries left" in str(observation) and not terminated
    _, reward, terminated, _, info = env.step(env.gold_action())
    assert (reward, terminated) == (0.5, True) and info["verdict"].correct
    with pytest.raises(UserError, match="must be Countdown"):
        build("countdown_tries", task="abacus")
