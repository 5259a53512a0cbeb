"""Creation of environments, their interface, and adapters to and from Gymnasium, checked with its own checker."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from sample_env import AsyncEnv, RaisingInReset, Unseeded, ValidEnv, build

from assay.envs import TaskEnv, make_env
from assay.envs.base import SEED, StepLimit, as_messages, check_attributes, safe_step
from assay.envs.builtin import GuessNumber, to_gymnasium
from assay.system.awaiting import resolve
from assay.tasks import make_task
from assay.testing.env import check_env
from assay.types import Status, UserError


class Failing(ValidEnv):
    def __init__(self) -> None:
        raise RuntimeError("no screen")


class InvalidStop(ValidEnv):
    stop = "</end>"  # type: ignore[assignment]


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
        ("os:getcwd", {}, "reset and step"),
        ("assay.envs:Env", {}, "must define reset"),
        ("reasoning_gym:chain_sum", {"task": "abacus"}, "remove task.name"),
        ("examples/my_env.py", {}, "name of the class"),
        (f"{__name__}:Failing", {}, "RuntimeError: no screen"),
        (f"{__name__}:InvalidStop", {}, "tuple of strings"),
    ],
)
def test_invalid_names_and_arguments_of_environments_are_user_errors(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        build(name, **args)
    assert "\n" not in str(error.value)


FOREIGN = """
import random

class Parity:
    max_steps = 2
    def reset(self, *, seed=None, options=None):
        self.number = random.Random(seed).randint(0, 99)
        return f"{self.number}: even or odd?", {}
    def step(self, action):
        right = action == self.gold_action()
        return "", float(right), True, False, {}
    def gold_action(self):
        return "odd" if self.number % 2 else "even"
    def words(self):
        return ["even", "odd"]
"""


@pytest.mark.parametrize(("name", "task"), [("guess", None), ("stepwise", "abacus")])
def test_environments_pass_the_gymnasium_checker(name: str, task: str | None) -> None:
    env = to_gymnasium(make_env(name, task=make_task(task) if task else None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(render|spec|metadata).*")
        gymnasium_check(env, skip_render_check=True)
    assert env.reset(seed=5) == env.reset(seed=5)


@pytest.mark.parametrize("how", ["def", "async def"])
def test_gymnasium_style_environment_is_accepted(tmp_path: Path, how: str) -> None:
    source = FOREIGN.replace("def reset", f"{how} reset").replace("def step", f"{how} step")
    (tmp_path / "foreign.py").write_text(source)
    env = make_env(f"{tmp_path}/foreign.py:Parity")
    assert env.max_steps == 2 and len({prompt.question for prompt in env.prompts("train")[:20]}) > 5
    assert [finding for finding in check_env(env, episodes=6) if not finding.ok] == []
    assert to_gymnasium(env).reset(seed=1)[0] == to_gymnasium(env).reset(seed=1)[0]
    assert getattr(env, "words")() == ["even", "odd"]  # noqa: B009  # for models built from scratch


@pytest.mark.parametrize("how", ["def", "async def"])
def test_closing_an_environment_closes_those_of_its_copies(tmp_path: Path, how: str) -> None:
    closed = f"    closed = []\n    {how} close(self):\n        self.closed.append(self)\n"
    (tmp_path / "closing.py").write_text(FOREIGN.replace("    max_steps = 2\n", f"    max_steps = 2\n{closed}"))
    env: Any = make_env(f"{tmp_path}/closing.py:Parity")
    copy, deleted = env.copy(), env.copy()
    record = env.inner.closed
    inner = deleted.inner
    del deleted
    resolve(asyncio.sleep(0.01))
    assert record == [inner]  # closed when the copy is deleted
    env.close()
    env.close()
    assert set(record) == {inner, env.inner, copy.inner} and len(record) == 3  # each exactly once


def test_former_name_of_max_return_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "former.py").write_text(FOREIGN.replace("max_steps = 2", "max_steps = 2; full = 5.0"))
    assert make_env(f"{tmp_path}/former.py:Parity").max_return == 5.0


# The interface


def test_failing_step_gives_an_error_verdict() -> None:
    class Broken(TaskEnv):
        def step(self, action: str) -> Any:
            return {"raise": 1 / 0, "form": 3}[action]

    class Nan(TaskEnv):
        def step(self, action: str) -> Any:
            return "", float("nan"), True, False, {}

    class Leaving(TaskEnv):
        def step(self, action: str) -> Any:
            raise SystemExit(3)

    for kind, detail in ((Broken, "ZeroDivisionError"), (Nan, "not finite"), (Leaving, "SystemExit")):
        env = kind(make_task("abacus"))
        env.reset(seed=0)
        _, reward, terminated, _, info = safe_step(env, "raise")
        assert (reward, terminated, info["verdict"].status) == (0.0, True, Status.ERROR)
        assert detail in info["verdict"].detail


def test_reset_must_return_the_observation_of_the_prompt() -> None:
    with pytest.raises(UserError, match="another observation"):
        Unseeded().start(Unseeded().prompts("train")[0])
    with pytest.raises(UserError, match=r"failed: KeyError") as error:
        RaisingInReset().prompts("train")[0]
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
def test_invalid_return_values_of_step_are_errors(step: Any, message: str) -> None:
    class Returning(ValidEnv):
        def step(self, action: str) -> Any:
            return step

    assert message in safe_step(Returning(), "")[4]["verdict"].detail


def test_observation_may_be_a_generator_of_messages() -> None:
    class Yielding(ValidEnv):
        def step(self, action: str) -> Any:
            return ({"role": "tool", "content": word} for word in "ab"), 0.0, False, False, {}

    observation = safe_step(Yielding(), "")[0]
    assert [[message["content"] for message in as_messages(observation, "user")] for _ in range(2)] == [["a", "b"]] * 2


@pytest.mark.parametrize(
    ("attributes", "word"),
    [
        ({"stop": "</end>"}, "tuple of strings"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_return": float("nan")}, "max_return"),
        ({"role": None}, "role"),
        ({"full": 2.0}, "max_return"),  # former names
        ({"fresh": lambda self: self}, "copy"),
        ({"alone": lambda self: self}, "standalone"),
        ({"gold_action": AsyncEnv.step}, "gold_action must be a plain function"),
        ({"step_all": AsyncEnv.step}, "step_all must be a plain function"),
    ],
)
def test_invalid_and_renamed_attributes_are_user_errors(attributes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        check_attributes(type("Changed", (ValidEnv,), attributes)())


def test_copies_have_independent_episodes_and_share_the_rest() -> None:
    env = TaskEnv(make_task("abacus"))
    env.defer_judging = True
    first, second = env.copy(), env.standalone()
    first.reset(seed=0)
    second.reset(seed=1)
    assert first.prompt != second.prompt and first.task is second.task
    assert "answer" in first.step("x")[4] and "verdict" in second.step("x")[4]  # standalone: judged at once


def test_step_limit_truncates_only_episodes_that_have_not_terminated() -> None:
    env = StepLimit(GuessNumber(1, 4, tries=2), 2)
    env.reset(seed=0)
    assert [env.step("9")[2:4] for _ in range(2)] == [(False, False), (True, False)]  # its own limit comes first
    limited = StepLimit(GuessNumber(1, 4, tries=3), 1)
    for _ in range(2):
        limited.reset(seed=0)
        assert limited.step("9")[2:4] == (False, True)
    other = limited.copy()
    other.reset(seed=1)
    assert other.env is not limited.env and other.secret == other.env.secret and other.max_steps == 1
    assert other.gold_action() == other.env.gold_action()
    assert limited.prompts("test")[0] == limited.env.prompts("test")[0]


def test_async_environment_is_plain_for_loops_that_step_it() -> None:
    async def cell() -> None:  # of a notebook
        env = StepLimit(AsyncEnv(), 2)
        prompt = env.prompts("train")[0]
        assert env.start(prompt)[0] == prompt.messages[0]["content"] == env.reset(seed=prompt.fields[SEED])[0]
        assert [env.step("x")[2:4] for _ in range(2)] == [(False, False), (False, True)]
        env.close()
        assert env.gold_episode(prompt) == (("gold", ""),)

    asyncio.run(cell())
