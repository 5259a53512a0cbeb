"""A user's own reward function as a judge."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from assay.rewards.importing import absolute_path, load_object
from assay.rewards.judge import one_line
from assay.types import Status, UserError, Verdict

MAX_TEXT = 10_000  # characters of what a user's function may say about an answer


@dataclass(frozen=True)
class FunctionJudge:
    """Calls `def reward(completion: str, answer: str, **fields) -> float | dict | Verdict`, plain or async.

    `path` is "package.module:function" or "file.py:function"; worker processes import it by that. A function without
    `**fields` gets only the fields that it names. A number means status ok from 1.0 up, else wrong. A dict holds
    `reward` and, if wanted, `status`, `parsed`, `parts` and `detail`. A function that raises, or returns anything else
    or a reward that is not finite, gives status error.
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_path(self.path))
        self.prepare()  # a wrong path is told at once, not once for each answer

    def prepare(self) -> None:
        _function(self.path)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        function, names = _function(self.path)
        extra = {
            name: value
            for name, value in fields.items()
            if name not in ("completion", "answer") and (names is None or name in names)
        }
        try:
            result = function(completion, answer, **extra)
            if inspect.isawaitable(result):
                result = _await(result)
            return as_verdict(result)
        except Exception as error:
            return Verdict(0.0, Status.ERROR, detail=one_line(error))


def as_verdict(result: Any) -> Verdict:
    """What a user's function returned, as a verdict. Raises TypeError or ValueError if it is not one."""
    if isinstance(result, Verdict):
        return _checked(result)
    if isinstance(result, Mapping):
        unknown = set(result) - {"reward", "status", "parsed", "parts", "detail"}
        if unknown or "reward" not in result:
            raise ValueError(
                "a reward function's dict needs 'reward' and may have 'status', 'parsed', 'parts', 'detail'; "
                f"got {sorted(map(str, result))}"
            )
        reward = _number(result["reward"])
        status = Status(result.get("status", _status(reward)))
        parsed = result.get("parsed")
        parts = {str(name): _number(value) for name, value in (result.get("parts") or {}).items()}
        return _checked(
            Verdict(
                reward,
                status,
                None if parsed is None else str(parsed)[:MAX_TEXT],
                parts,
                str(result.get("detail", ""))[:MAX_TEXT],
            )
        )
    reward = _number(result)
    return _checked(Verdict(reward, _status(reward), parts={"accuracy": reward}))


def _status(reward: float) -> Status:
    return Status.OK if reward >= 1.0 else Status.WRONG


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"a reward function must return a number, a dict or a Verdict, not {type(value).__name__}")
    return float(value)


def _checked(verdict: Verdict) -> Verdict:
    if not math.isfinite(verdict.reward):
        raise ValueError(f"the reward function returned {verdict.reward}, which is not a finite number")
    return verdict


@lru_cache(maxsize=32)
def _function(path: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """The function, and the names of the fields it takes (None: all)."""
    function = load_object(path)
    if not callable(function):
        raise UserError(f"'{path}' is a {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return function, None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function, None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return function, frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)


def _await(awaitable: Any) -> Any:
    import asyncio  # here: loading it would slow the start of every worker

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())
