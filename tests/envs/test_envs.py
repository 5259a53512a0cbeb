"""The shipped environments: what they say, what they reward, and that they keep an environment's promises."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from assay.envs import ENVS, Env, TaskEnv, make_env
from assay.envs.base import SEED, as_messages, safe_step
from assay.envs.check import check_env, play
from assay.envs.tools import check_equations, recompute_calls
from assay.tasks import make_task
from assay.types import Status, UserError

SHIPPED: dict[str, dict[str, Any]] = {
    "single": {"task": "abacus"},
    "guess": {},
    "stepwise": {"task": "abacus", "separator": ";"},
    "calculator": {"task": "abacus"},
    "python": {"task": "abacus"},
    "countdown_tries": {},
}


def made(name: str, **args: Any) -> Any:
    task = args.pop("task", None)
    return make_env(name, task=make_task(task) if task else None, **args)


def test_all_are_tested() -> None:
    assert set(SHIPPED) == set(ENVS)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_environments_pass_the_check(name: str) -> None:
    env = made(name, **SHIPPED[name])
    assert [finding for finding in check_env(env, episodes=6) if not finding.ok] == []
    env.close()


def test_guessing() -> None:
    env = made("guess", low=1, high=7, tries=3)
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


def test_lines_are_steps_and_true_sums_are_rewarded() -> None:
    env = made("stepwise", task="abacus", separator=";", line_reward=0.25, max_lines=4)
    env.reset(seed=0)
    answer = env.prompt.answer
    assert env.step("1 + 1 = 2 ;")[1:3] == (0.25, False)
    assert env.step("2 + 1 = 4 ;")[1:3] == (-0.25, False)
    assert env.step("so be it ;")[1:3] == (0.0, False)
    observation, reward, terminated, _, info = env.step(f"#### {answer}")
    assert (observation, reward, terminated) == ("", 1.0, True) and info["verdict"].correct
    env.reset(seed=0)
    assert env.step(f"#### {answer} ;")[2]  # an answer ends it, whatever follows
    env.reset(seed=0)
    assert [env.step("hm ;")[2] for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("4 + 5 = 9", 1),
        ("so (4+5)*2 = 18 apples", 1),
        ("4 + 5 = 9 and 9 + 1 = 11", -1),
        ("4 + 5 = 9, 9 + 1 = 11", -1),
        ("first, 4 + 5 = 9", 1),
        ("1,004 + 5 = 9", 0),  # a comma within a number
        ("4 + 5 = 8", -1),
        ("4 + 5 = 9 + 1 = 10", 1),  # only the last equation has a number on its right
        ("x = 4 + 5 = 9", 1),
        ("9 = 9", 0),  # nothing is computed
        ("3/5 x 100 = 60", 0),
        ("3 / 2 = 1 1/2 hours", 0),
        ("1 - 3/5 = 2/5 of it", 0),
        ("3 / 6 = 50%", 0),
        ("X + 80*2 = 1920", 0),
        ("2 * 600 = 1,200", 0),
        ("no sum", 0),
        ("= = =", 0),
    ],
)
def test_a_line_is_rewarded_for_whole_sums_only(line: str, value: int) -> None:
    assert check_equations(line) == value


def test_reading_the_sums_of_a_line_takes_linear_time() -> None:
    def seconds(line: str) -> float:
        started = time.process_time()
        check_equations(line)
        return time.process_time() - started

    for part in ("1 ", "1+", "("):  # a line of 20,000 such characters takes 20 microseconds, in quadratic time seconds
        assert min(seconds(part * 20_000) for _ in range(3)) < 0.1, part


def test_the_calculator_completes_what_it_is_asked_and_nothing_else() -> None:
    task = make_task("abacus", style="plain")
    env: Any = make_env("calculator", task=task)
    env.reset(seed=1)
    assert env.step("Half of 48 is <<48/2=")[:3] == ("24>>", 0.0, False)
    assert env.step(" and x =")[0] == ""  # no call
    assert env.step(" <<1/3=")[0] == "1/3>>"
    assert env.step(" <<2+=")[0] == "error>>"
    assert env.step(" <<1+1=2")[0] == ""  # it stated a result of its own
    step = env.step(f">> so \\boxed{{{env.prompt.answer}}}")
    assert step[1:3] == (1.0, True) and "<<48/2=24>>" in env.reply
    words: Any = made("calculator", task="abacus")
    words.reset(seed=1)
    assert words.step("<< 4 + 5 =")[0] == " 9 >>"  # its task has words set apart by spaces
    assert {"<<", ">>"} <= set(words.words())


def test_a_line_may_hold_calls_of_the_calculator() -> None:
    task = make_task("abacus", style="plain")
    env: Any = make_env("stepwise", task=task, calculator=True, max_lines=2, line_reward=0.25)
    env.reset(seed=1)
    assert env.step("Half of 48 =")[:3] == ("", 0.0, False)  # no call
    assert env.step(" <<48/2=")[:3] == ("24>>", 0.0, False)
    assert env.step("24\n")[:3] == ("", 0.25, False) and env.lines == 1  # one line, and its sum is true
    assert env.step("<<1/3=\n")[:3] == ("", 0.0, True)  # the line was over before it could be completed
    env.reset(seed=1)
    assert env.step(f"\\boxed{{{env.prompt.answer}}} <<2+2=")[0] == "4>>"
    assert env.step("\n")[1:3] == (1.25, True)  # an answer anywhere in the line ends it
    words: Any = made("stepwise", task="abacus", separator=";", calculator=True)
    assert {"<<", ">>", "="} <= set(words.words())
    assert [finding for finding in check_env(words, episodes=6) if not finding.ok] == []


def test_a_demonstration_has_the_results_of_the_calculator() -> None:
    said = "8*18 = $<<8*18=144.00>>144.00, a third <<1/3=.33>>.33, <<560//10=56>>56 = 56, <<2+2= and << 1 >> x=y"
    shown = "8*18 = $<<8*18=144>>144.00, a third <<1/3=1/3>>.33, <<560//10=error>>56 = 56, <<2+2=4>> and << 1 >> x=y"
    assert recompute_calls(said, "<<", ">>") == shown
    assert recompute_calls("[4 + 5 = 9 ] = 9", "[", "]", " ") == "[4 + 5 = 9 ] = 9"
    assert recompute_calls(shown, "<<", ">>") == shown


@pytest.mark.parametrize(("name", "args"), [("calculator", {}), ("stepwise", {"calculator": True})])
@pytest.mark.parametrize(
    ("split", "first", "changed"), [("test", 200, 8), pytest.param("train", None, 297, marks=pytest.mark.slow)]
)
def test_a_perfect_policy_solves_gsm8k_with_a_calculator(
    name: str, args: dict[str, Any], split: str, first: int | None, changed: int, gsm8k_folder: Path
) -> None:
    task = make_task("gsm8k", gsm8k_folder, annotations=True, solution_style="hash", val_size=0)
    env = make_env(name, task=task, **args)
    prompts = env.prompts(split)[:first]
    played = [play(env, prompt, lambda episode, _: episode.gold_action()) for prompt in prompts]
    assert [prompt.id for prompt, steps in zip(prompts, played, strict=True) if steps[-1][1][1:3] != (1.0, True)] == []
    assert sum(env.gold_completion(prompt) != prompt.solution for prompt in prompts) == changed  # 144.00 becomes 144


def test_python_runs_apart_with_limits() -> None:
    env: Any = make_env("python", task=make_task("abacus", style="plain"), timeout_s=1.0)
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
    env.close()


@pytest.mark.parametrize(
    ("rest", "shown"),
    [
        (".", "<result>4</result>"),
        ("\n\n", "<result>4</result>"),
        ("<", "result>4</result>"),
        ("<x", "<result>4</result>"),
    ],
)
def test_the_token_that_ends_a_call_may_hold_more(rest: str, shown: str) -> None:
    """Tokenizers have tokens such as >. and ><, and write </python><result> with them."""
    env: Any = make_env("python", task=make_task("abacus", style="plain"))
    env.reset(seed=0)
    action = f"so <python>1</python> <python>2+2</python>{rest}"
    assert env.step(action)[0] == shown
    assert env.reply == action + shown
    env.close()


def test_countdown_says_what_was_wrong_and_later_tries_are_worth_less() -> None:
    env = made("countdown_tries", tries=3, decay=0.5)
    env.reset(seed=2)
    nums = env.prompt.fields["nums"]
    observation, reward, terminated, _, _ = env.step(f"<answer>{nums[0]} + {nums[0]}</answer>")
    assert "uses the numbers" in str(observation) and "2 tries left" in str(observation) and not terminated
    _, reward, terminated, _, info = env.step(env.gold_action())
    assert (reward, terminated) == (0.5, True) and info["verdict"].correct
    with pytest.raises(UserError, match="must be Countdown"):
        made("countdown_tries", task="abacus")


def test_a_step_that_fails_is_an_error_and_not_a_wrong_answer() -> None:
    class Broken(TaskEnv):
        def step(self, action: str) -> Any:
            return {"raise": 1 / 0, "form": 3}[action]

    class Nan(TaskEnv):
        def step(self, action: str) -> Any:
            return "", float("nan"), True, False, {}

    for kind, detail in ((Broken, "ZeroDivisionError"), (Nan, "not finite")):
        env = kind(make_task("abacus"))
        env.reset(seed=0)
        _, reward, terminated, _, info = safe_step(env, "raise")
        assert (reward, terminated, info["verdict"].status) == (0.0, True, Status.ERROR)
        assert detail in info["verdict"].detail


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("gess", {}, "did you mean 'guess'"),
        ("stepwise", {}, "needs a task"),
        ("guess", {"task": "abacus"}, "its own problems"),
        ("guess", {"high": 0}, "low must be below high"),
        ("guess", {"hihg": 5}, "hihg"),
        ("guess", {"tries": "many"}, "tries"),
        ("assay.types:Prompt", {}, "needs the argument"),
        ("assay.text:char_tokenizer", {}, "reset and step"),
        ("assay.envs:Env", {}, "must define reset"),
        ("reasoning_gym:chain_sum", {"task": "abacus"}, "remove task.name"),
        ("examples/my_env.py", {}, "name of the class"),
        (f"{__name__}:Failing", {}, "RuntimeError: no screen"),
        (f"{__name__}:Stopped", {}, "tuple of strings"),
        (f"{__name__}:Stepless", {}, "max_steps"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        made(name, **args)
    assert "\n" not in str(error.value)


class Sound(Env):
    name = "sound"
    max_steps = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seen: list[str] = []
        self.secret = random.Random(seed).randint(0, 9)
        return f"seed {seed}", {}

    def step(self, action: str) -> Any:
        self.seen.append(action)
        return f"{len(self.seen)}", float(action == "gold"), action == "gold" or len(self.seen) == 3, False, {}

    def gold_action(self) -> str | None:
        return "gold"


class Failing(Sound):
    def __init__(self) -> None:
        raise RuntimeError("no screen")


class Stopped(Sound):
    stop = "</end>"  # type: ignore[assignment]


class Stepless(Sound):
    max_steps = 0


class Unseeded(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"seed {random.random()}", {}


class Sharing(Sound):
    shared: list[str] = []  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed)
        self.seen = Sharing.shared
        self.seen.clear()
        return found


class Endless(Sound):
    def step(self, action: str) -> Any:
        return "again", 0.0, False, False, {}


class Goldless(Sound):
    def gold_action(self) -> str | None:
        return None


class Misformed(Sound):
    def step(self, action: str) -> Any:
        return "x", 0.0, True


class Mute(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return None, {}


class Alone(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"seed {seed}"


class Raising(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise KeyError("file")


class Hanging(Sound):
    def step(self, action: str) -> Any:
        threading.Event().wait()


class Repeating(Sound):
    inline = True

    def step(self, action: str) -> Any:
        return f"{action} and more", 0.0, False, False, {}


class Masking(Sound):
    def step(self, action: str) -> Any:
        *what, info = super().step(action)
        return (*what, info | {"masked": True})


def test_a_sound_environment_passes() -> None:
    assert [finding for finding in check_env(Sound()) if not finding.ok] == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unseeded, "different observations"),
        (Sharing, "an episode changed another"),
        (Endless, "within 3 steps"),
        (Goldless, "gold_action"),
        (Misformed, "observation, reward, terminated, truncated, info"),
        (Repeating, "repeats the action"),
        (Masking, "every action of the gold policy out of the loss"),
        (Mute, "must be text, or messages with role and content, not None"),
        (Alone, "reset must return (observation, info), not 'seed "),
        (Raising, "failed: KeyError: 'file'"),
    ],
)
def test_the_check_finds_what_is_wrong(kind: type[Env], message: str) -> None:
    assert message in "; ".join(finding.problem for finding in check_env(kind()))


def test_the_check_does_not_wait_for_ever() -> None:
    (found,) = check_env(Hanging(), seconds=0.2)
    assert "longer than 0.2 s" in found.problem


def test_what_the_policy_reads_is_what_its_episode_is_about() -> None:
    """Else it would be judged by another problem than the one it was given."""
    with pytest.raises(UserError, match="another observation"):
        Unseeded().start(Unseeded().prompts("train")[0])
    with pytest.raises(UserError, match=r"failed: KeyError") as error:
        Raising().prompts("train")[0]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((5, 0.0, False, False, {}), "must be text"),
        (([{"role": "tool", "content": 5}], 0.0, False, False, {}), "must be text"),
        (("", None, True, False, {}), "number as reward, not None"),
        (("", 0.0, "no", False, {}), "true or false, not 'no'"),
        (("", 0.0, True, False, {"verdict": "yes"}), "must be a Verdict, not 'yes'"),
        (("", 0.0, True, False, {"masked": "first"}), "info['masked'] must be true or false, not 'first'"),
        (("", 0.0, True, False, {"answer": 5}), "must be a str, not 5"),
    ],
)
def test_a_step_of_the_wrong_form_is_told_from_the_right_one(step: Any, message: str) -> None:
    class Returning(Sound):
        def step(self, action: str) -> Any:
            return step

    assert message in safe_step(Returning(), "")[4]["verdict"].detail


def test_messages_may_come_one_by_one() -> None:
    class Yielding(Sound):
        def step(self, action: str) -> Any:
            return (({"role": "tool", "content": word}) for word in "ab"), 0.0, False, False, {}

    observation = safe_step(Yielding(), "")[0]
    for _ in range(2):
        assert [message["content"] for message in as_messages(observation, "user")] == ["a", "b"]


def test_an_environment_that_leaves_the_program_ends_its_episode_only() -> None:
    class Leaving(Sound):
        def step(self, action: str) -> Any:
            raise SystemExit(3)

    assert safe_step(Leaving(), "")[4]["verdict"].status is Status.ERROR
