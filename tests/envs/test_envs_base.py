from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sample_env import AsyncEnv, RaisingInReset, Unseeded, ValidEnv

from assay.envs import TaskEnv
from assay.envs.base import SEED, StepLimit, as_messages, check_attributes, run_with_timeout, safe_step, warn_after
from assay.envs.builtin import GuessNumber
from assay.tasks import make_task
from assay.types import Status, UserError


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


def test_time_limit_and_warning_after_a_delay(recwarn: pytest.WarningsRecorder) -> None:
    assert run_with_timeout(0, lambda: 1) == run_with_timeout(60.0, lambda: 1) == 1
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        run_with_timeout(0.01, lambda: time.sleep(0.5))
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(60.0, lambda: 1 / 0)
    with warn_after(60.0, "too early"):
        pass
    with warn_after(0.01, "still running"):
        deadline = time.monotonic() + 10
        while not recwarn.list and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [str(warning.message) for warning in recwarn.list] == ["still running"]


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
