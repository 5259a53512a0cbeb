"""Creation of environments; adapters to and from Gymnasium, checked with Gymnasium's own environment checker."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from sample_env import ValidEnv, build

from assay.envs import make_env
from assay.envs.builtin import to_gymnasium
from assay.system.awaiting import resolve
from assay.tasks import make_task
from assay.testing.env import check_env
from assay.types import UserError


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
