from __future__ import annotations

from typing import Any

import pytest
from envs.sample_env import ValidEnv, build

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
