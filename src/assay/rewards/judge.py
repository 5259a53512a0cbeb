"""What a judge is, and the small tools that every judge and every caller of judges shares.

A user's own reward function as a judge.

Mixing accuracy, format and length into one reward.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from assay.rewards.importing import absolute_path, load_object
from assay.types import Status, UserError, Verdict


class Judge(Protocol):
    """Strings in, a verdict out. Implementations are small frozen dataclasses, so that worker processes can have them.

    A judge may also have `prepare()`, called once in each worker before the clock of the first answer starts.
    """

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict: ...


def graded(status: Status, parsed: str | None, form: float, detail: str = "") -> Verdict:
    """The verdict of a right-or-wrong judge; `form` says whether an answer stood in the asked form."""
    reward = 1.0 if status is Status.OK else 0.0
    return Verdict(reward, status, parsed, {"accuracy": reward, "format": form}, detail)


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as one short line: its type and what it says."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= limit else line[: limit - 3] + "..."


def judge_safely(judge: Judge, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
    """A judge that fails gives a verdict with status `error`; only an interrupt from the keyboard goes through."""
    try:
        return judge(completion, answer, fields)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and libraries whose timeouts derive from BaseException
        return failed(judge, Status.ERROR, one_line(error))


def failed(judge: Judge, status: Status, detail: str) -> Verdict:
    """The verdict on an answer that the judge could not finish with; a reward mix has its say on what it is worth."""
    verdict = Verdict(0.0, status, detail=detail)
    shape = getattr(judge, "shape", None)
    return shape(verdict, "") if shape is not None else verdict


def check_verdicts(
    verdicts: Sequence[Verdict], who: str = "the judge", what: str = "the reward function or the task's answers"
) -> None:
    """Raise if the judge failed on every single answer: then the judge is broken, not the answers."""
    if verdicts and all(verdict.status is Status.ERROR for verdict in verdicts):
        raise UserError(
            f"{who} failed on all {len(verdicts)} answers; the first failure: {verdicts[0].detail or 'no detail'}; "
            f"mend {what}"
        )


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


_UNREAD = (Status.NO_ANSWER, Status.UNPARSABLE, Status.TIMEOUT)


@dataclass(frozen=True)
class RewardMix:
    """reward = accuracy x A + format x F + length x L, with the components A, F, L in `parts` before weighting.

    A: `correct` or `wrong` (in between for a judge that gives partial credit), `unparsable` if there was no readable
       answer or it took too long, 0 if the judge itself failed. (1, 0, -1) is the classic choice.
    F: 1 if the answer stands in the asked form, or if `format_pattern` is found in the completion; else 0.
    L: 1 up to `target_length` characters, then falling linearly to 0 at twice that.
    The status stays that of the judge.
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
        prepare = getattr(self.judge, "prepare", None)
        if prepare is not None:
            prepare()

    def shape(self, verdict: Verdict, completion: str) -> Verdict:
        """The judge's verdict with the mixed reward in place of its own."""
        parts = dict(verdict.parts)
        failed = verdict.status in (Status.TIMEOUT, Status.ERROR)
        parts["accuracy"] = self._accuracy(verdict)
        parts["format"] = 0.0 if failed else self._format(verdict, completion)
        parts["length"] = 0.0 if failed else length_score(completion, self.target_length)
        reward = self.accuracy * parts["accuracy"] + self.format * parts["format"] + self.length * parts["length"]
        return Verdict(reward, verdict.status, verdict.parsed, parts, verdict.detail)

    def _accuracy(self, verdict: Verdict) -> float:
        if verdict.status in _UNREAD:
            return self.unparsable
        if verdict.status is Status.ERROR:
            return 0.0
        return self.wrong + (self.correct - self.wrong) * verdict.reward

    def _format(self, verdict: Verdict, completion: str) -> float:
        if self.format_pattern is not None:
            return float(_compiled(self.format_pattern).search(completion) is not None)
        return verdict.parts.get("format", float(verdict.status in (Status.OK, Status.WRONG)))


def length_score(completion: str, target_length: int) -> float:
    """1 up to the target, 0 from twice the target on, a straight line between."""
    return min(1.0, max(0.0, 2.0 - len(completion) / target_length))


@lru_cache(maxsize=32)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"the reward's 'format_pattern' is not a regular expression: {error}") from None
