"""The judge interface, users' reward functions as judges, and the mix of accuracy, format and length in one reward."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from assay.rewards.importing import absolute_path, load_object
from assay.types import Status, UserError, Verdict, describe_error


class Judge(Protocol):
    """Maps a completion, the gold answer and the prompt's fields to a verdict.

    Implementations are small frozen dataclasses, which can be sent to worker processes. A judge may also have
    `prepare()`, called once per worker before its first time limit starts.
    """

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict: ...


def prepare_judge(judge: Judge) -> None:
    """Call `prepare` of a judge, if it has one."""
    getattr(judge, "prepare", lambda: None)()


def binary_verdict(status: Status, parsed: str | None, in_form: float, detail: str = "") -> Verdict:
    """Return a verdict with reward 1 or 0; `in_form` is 1 if there was an answer in the requested form."""
    reward = 1.0 if status is Status.OK else 0.0
    return Verdict(reward, status, parsed, {"accuracy": reward, "format": in_form}, detail)


def judge_safely(judge: Judge, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
    """Call a judge. If it raises anything except KeyboardInterrupt, return a verdict with status error."""
    try:
        return judge(completion, answer, fields)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and libraries whose timeouts derive from BaseException
        return failed_verdict(judge, Status.ERROR, describe_error(error))


def failed_verdict(judge: Judge, status: Status, detail: str) -> Verdict:
    """Return the verdict on a completion that could not be judged; a RewardMix decides its reward."""
    verdict = Verdict(0.0, status, detail=detail)
    shape = getattr(judge, "shape", None)
    return shape(verdict, "") if shape is not None else verdict


def check_verdicts(
    verdicts: Sequence[Verdict], who: str = "the judge", what: str = "the reward function or the task's gold answers"
) -> None:
    """Raise a UserError if the judge failed or timed out on every completion: then the judge is at fault."""
    statuses = {verdict.status for verdict in verdicts}
    if not verdicts or not statuses <= {Status.ERROR, Status.TIMEOUT}:
        return
    how = "timed out" if Status.ERROR not in statuses else "failed" if len(statuses) == 1 else "failed or timed out"
    remedy = f"fix {what}" + (", or raise reward.timeout_s" if Status.TIMEOUT in statuses else "")
    answers = "the only answer" if len(verdicts) == 1 else f"all {len(verdicts)} answers"
    raise UserError(f"{who} {how} on {answers}; the first failure: {verdicts[0].detail or 'no detail'}; {remedy}")


MAX_TEXT = 10_000  # characters of `parsed` and `detail` of a user's function


@dataclass(frozen=True)
class FunctionJudge:
    """Calls the user's `def reward(completion: str, answer: str, **fields) -> float | dict | Verdict`, plain or async.

    `path` is "package.module:function" or "file.py:function", from which worker processes import it. A function without
    `**fields` gets only the fields that it names. A number of at least 1.0 means status ok, a smaller one wrong. A dict
    has `reward` and optionally `status`, `parsed`, `parts` and `detail`. If the function raises, returns anything else
    or a reward that is not finite, the status is error.
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_path(self.path))
        self.prepare()  # reports a wrong path now, not once per completion

    def prepare(self) -> None:
        _function(self.path)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        function, names = _function(self.path)
        taken = (fields.keys() if names is None else names & fields.keys()) - {"completion", "answer"}
        try:
            result = function(completion, answer, **{name: fields[name] for name in fields if name in taken})
            if inspect.isawaitable(result):
                result = _await(result)
            return as_verdict(result)
        except Exception as error:
            return Verdict(0.0, Status.ERROR, detail=describe_error(error))


def as_verdict(result: Any) -> Verdict:
    """Convert what a user's function returned. Raises TypeError or ValueError if it is invalid."""
    verdict = result if isinstance(result, Verdict) else _new_verdict(result)
    if not math.isfinite(verdict.reward):
        raise ValueError(f"the reward function returned {verdict.reward}, which is not a finite number")
    return verdict


def _new_verdict(result: Any) -> Verdict:
    values = result if isinstance(result, Mapping) else {"reward": result, "parts": {"accuracy": result}}
    if "reward" not in values or set(values) - {"reward", "status", "parsed", "parts", "detail"}:
        raise ValueError(
            "a reward function's dict needs 'reward' and may have 'status', 'parsed', 'parts', 'detail'; "
            f"got {sorted(map(str, values))}"
        )
    reward = _number(values["reward"])
    status = Status(values.get("status", Status.OK if reward >= 1.0 else Status.WRONG))
    parsed = None if values.get("parsed") is None else str(values["parsed"])[:MAX_TEXT]
    parts = {str(name): _number(value) for name, value in (values.get("parts") or {}).items()}
    return Verdict(reward, status, parsed, parts, str(values.get("detail", ""))[:MAX_TEXT])


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"a reward function must return a number, a dict or a Verdict, not {type(value).__name__}")
    return float(value)


@lru_cache(maxsize=32)
def _function(path: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """Return the function and the names of the fields it takes (None: all)."""
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
    import asyncio  # imported late: it would slow down the start of every worker

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


_UNREADABLE = (Status.NO_ANSWER, Status.UNPARSABLE, Status.TIMEOUT)


@dataclass(frozen=True)
class RewardMix:
    """reward = accuracy x A + format x F + length x L, with the components A, F, L in `parts` before weighting.

    A: `correct` or `wrong` (interpolated for a judge that gives partial credit), `unparsable` if there was no readable
       answer or judging timed out, 0 if the judge itself failed. (1, 0, -1) is a common choice.
    F: 1 if the answer has the requested form, or if `format_pattern` is found in the completion; else 0.
    L: 1 up to `target_length` characters, then decreasing linearly to 0 at twice that.
    The status is that of the judge.
    """

    judge: Judge
    accuracy: float = 1.0
    format: float = 0.0
    length: float = 0.0
    correct: float = 1.0
    wrong: float = 0.0
    unparsable: float = 0.0
    format_pattern: str | None = None
    target_length: int = 1000

    def __post_init__(self) -> None:
        for name in ("accuracy", "format", "length", "correct", "wrong", "unparsable"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"the reward's '{name}' must be a finite number, not {getattr(self, name)}")
        if self.target_length <= 0:
            raise UserError(f"the reward's 'target_length' must be at least 1, not {self.target_length}")
        if self.format_pattern is not None:
            _compiled(self.format_pattern)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return self.shape(self.judge(completion, answer, fields), completion)

    def prepare(self) -> None:
        prepare_judge(self.judge)

    def shape(self, verdict: Verdict, completion: str) -> Verdict:
        """Return the judge's verdict with the mixed reward."""
        parts = dict(verdict.parts)
        failed = verdict.status in (Status.TIMEOUT, Status.ERROR)
        parts["accuracy"] = self._accuracy(verdict)
        parts["format"] = 0.0 if failed else self._format(verdict, completion)
        parts["length"] = 0.0 if failed else length_score(completion, self.target_length)
        reward = self.accuracy * parts["accuracy"] + self.format * parts["format"] + self.length * parts["length"]
        return Verdict(reward, verdict.status, verdict.parsed, parts, verdict.detail)

    def _accuracy(self, verdict: Verdict) -> float:
        if verdict.status in _UNREADABLE:
            return self.unparsable
        if verdict.status is Status.ERROR:
            return 0.0
        return self.wrong + (self.correct - self.wrong) * verdict.reward

    def _format(self, verdict: Verdict, completion: str) -> float:
        if self.format_pattern is not None:
            return float(_compiled(self.format_pattern).search(completion) is not None)
        return verdict.parts.get("format", float(verdict.status in (Status.OK, Status.WRONG)))


def length_score(completion: str, target_length: int) -> float:
    """Return 1 up to the target, 0 from twice the target on, linear in between."""
    return min(1.0, max(0.0, 2.0 - len(completion) / target_length))


@lru_cache(maxsize=32)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"the reward's 'format_pattern' is not a regular expression: {error}") from None
