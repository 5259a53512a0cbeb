"""The judge interface, and rewards from several parts: accuracy, format and length; several judges; one per task."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, Protocol

from assay.rewards.functions import NOT_APPLICABLE
from assay.system.awaiting import attempt, is_async, resolve, then, together
from assay.types import TASK_LABEL, Prompt, Status, UserError, Verdict, describe_error


class Judge(Protocol):
    """Maps a completion, the gold answer and the prompt's fields to a verdict.

    Implementations are small frozen dataclasses, which can be sent to worker processes. A judge may also have
    `prepare()`, called once per worker before its first time limit starts.

    A judge with `sees_group = True` has `judge_group(completions, answer, fields)`, which returns a verdict for each
    answer to a prompt. With `wants_prompt = True`, its fields also contain `messages` and `solution` of the prompt.

    Both methods may be `async`: many answers are then judged concurrently.
    """

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict | Awaitable[Verdict]: ...


def prepare_judge(judge: Judge) -> None:
    """Call `prepare` of a judge, if it has one."""
    getattr(judge, "prepare", lambda: None)()


def sees_group(judge: Any) -> bool:
    """Return whether the judge compares the answers to a prompt: all of them are then judged together."""
    return bool(getattr(judge, "sees_group", False))


def wants_prompt(judge: Any) -> bool:
    return bool(getattr(judge, "wants_prompt", False))


def judged_fields(judge: Any, prompt: Prompt) -> Mapping[str, Any]:
    """Return the fields of a prompt for its judge, with the prompt itself if the judge asks for it."""
    if not wants_prompt(judge):
        return prompt.fields
    given: dict[str, Any] = {**prompt.fields, "messages": [dict(message) for message in prompt.messages]}
    return given if prompt.solution is None else given | {"solution": prompt.solution}


def judges_async(judge: Any) -> bool:
    """Return whether verdicts have to be awaited."""
    if getattr(judge, "is_async", False) or is_async(judge) or is_async(getattr(judge, "judge_group", None)):
        return True
    return any(map(judges_async, inner_judges(judge)))


def inner_judges(judge: Any) -> Sequence[Any]:
    return [judge.judge, *getattr(judge, "others", ())] if hasattr(judge, "judge") else getattr(judge, "judges", ())


def judge_group(judge: Any, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any:
    """Judge all answers to a prompt, together if the judge compares them; awaitable if the judge is `async`."""
    if sees_group(judge):
        return judge.judge_group(completions, answer, fields)
    return together([judge(completion, answer, fields) for completion in completions])


def judge_group_safely(judge: Judge, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any:
    """Judge all answers to a prompt. If the judge raises anything except KeyboardInterrupt, their status is error."""

    def failed(error: BaseException) -> list[Verdict]:
        return [failed_verdict(judge, Status.ERROR, describe_error(error)) for _ in completions]

    # SystemExit, and libraries whose timeouts derive from BaseException
    return attempt(lambda: judge_group(judge, completions, answer, fields), failed, BaseException)


def require_verdict(value: Any) -> Verdict:
    if not isinstance(value, Verdict):
        raise TypeError(f"a judge, which takes (completion, answer, fields), must return a Verdict, not {value!r:.80}")
    return value


def binary_verdict(status: Status, parsed: str | None, in_form: float, detail: str = "") -> Verdict:
    """Return a verdict with reward 1 or 0; `in_form` is 1 if there was an answer in the requested form."""
    reward = 1.0 if status is Status.OK else 0.0
    return Verdict(reward, status, parsed, {"accuracy": reward, "format": in_form}, detail)


def judge_safely(judge: Judge, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
    """As `judge_group_safely`, for one answer; waits for the verdict."""
    (verdict,) = resolve(judge_group_safely(judge, [completion], answer, fields))
    return verdict


def failed_verdict(judge: Judge, status: Status, detail: str) -> Verdict:
    """Return the verdict on a completion that could not be judged; a RewardMix decides its reward."""
    verdict = Verdict(0.0, status, detail=detail)
    if isinstance(judge, RewardMix):
        verdict = judge.shape(verdict, "")
        verdict.reward *= judge.weights[0]
    return verdict


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


class SeveralJudges(ABC):
    """A judge that consists of others."""

    @property
    def sees_group(self) -> bool:
        return any(map(sees_group, inner_judges(self)))

    @property
    def wants_prompt(self) -> bool:
        return any(map(wants_prompt, inner_judges(self)))

    def prepare(self) -> None:
        for judge in inner_judges(self):
            prepare_judge(judge)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Any:
        return then(self.judge_group([completion], answer, fields), itemgetter(0))

    @abstractmethod
    def judge_group(self, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any: ...


_UNREADABLE = (Status.NO_ANSWER, Status.UNPARSABLE, Status.TIMEOUT)


@dataclass(frozen=True)
class RewardMix(SeveralJudges):
    """reward = accuracy x A + format x F + length x L, with the components A, F, L in `parts` before weighting.

    A: `correct` or `wrong` (interpolated for a judge that gives partial credit), `unparsable` if there was no readable
       answer or judging timed out, 0 if the judge itself failed. (1, 0, -1) is a common choice.
    F: 1 if the answer has the requested form, or if `format_pattern` is found in the completion; else 0.
    L: 1 up to `target_length` characters, then decreasing linearly to 0 at twice that.
    The judge sets the status.

    With `names`, reward = sum of weight x reward of the judge, mixed as above if `shaped`, and of the others; `parts`
    also has the reward of each, before weighting, by its name. The first judge decides status and parsed answer. If a
    judge fails, the status is error. A function that returns None for an answer does not apply to it and adds nothing,
    as in TRL.
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
    others: tuple[Judge, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    names: tuple[str, ...] = ()  # of all judges
    shaped: bool = True

    def __post_init__(self) -> None:
        for name in ("accuracy", "format", "length", "correct", "wrong", "unparsable"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"the reward's '{name}' must be a finite number, not {getattr(self, name)}")
        if self.target_length <= 0:
            raise UserError(f"the reward's 'target_length' must be at least 1, not {self.target_length}")
        if self.format_pattern is not None:
            _compiled(self.format_pattern)

    def judge_group(self, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any:
        by_judge = together([judge_group(judge, completions, answer, fields) for judge in (self.judge, *self.others)])
        return then(by_judge, lambda by_judge: list(map(self._sum, completions, *by_judge)))

    def _sum(self, completion: str, first: Verdict, *others: Verdict) -> Verdict:
        verdicts = [self.shape(first, completion), *map(require_verdict, others)]
        if not self.names:
            return verdicts[0]
        named = [item for item in zip(self.names, self.weights, verdicts, strict=True) if not _skipped(item[2])]
        if not named:
            return Verdict(0.0, Status.ERROR, detail="no reward function applies to this answer: all returned None")
        first = named[0][2]
        parts = {**first.parts, **{name: verdict.reward for name, _, verdict in named}}
        failed = next(((name, verdict) for name, _, verdict in named if verdict.status is Status.ERROR), None)
        if failed is not None:
            return Verdict(0.0, Status.ERROR, first.parsed, parts, f"{failed[0]}: {failed[1].detail}")
        reward = sum(weight * verdict.reward for _, weight, verdict in named)
        return Verdict(reward, first.status, first.parsed, parts, first.detail)

    def shape(self, verdict: Verdict, completion: str) -> Verdict:
        """Return the first judge's verdict with the mixed reward."""
        require_verdict(verdict)
        if not self.shaped:
            return verdict
        parts = dict(verdict.parts)
        failed = verdict.status in (Status.TIMEOUT, Status.ERROR)
        parts["accuracy"] = self._accuracy(verdict)
        parts["format"] = 0.0 if failed else self._format(verdict, completion)
        parts["length"] = 0.0 if failed else min(1.0, max(0.0, 2.0 - len(completion) / self.target_length))
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


@lru_cache(maxsize=32)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"the reward's 'format_pattern' is not a regular expression: {error}") from None


def _skipped(verdict: Verdict) -> bool:
    return verdict.status is Status.ERROR and verdict.detail == NOT_APPLICABLE


@dataclass(frozen=True)
class JudgeByTask(SeveralJudges):
    """Judges each answer with the judge of its task, which a field of the prompt names."""

    judges: tuple[Judge, ...]
    labels: tuple[str, ...]

    def judge_group(self, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any:
        if fields.get(TASK_LABEL) not in self.labels:
            raise UserError(f"the field {TASK_LABEL} must be one of {', '.join(self.labels)}")
        return judge_group(self.judges[self.labels.index(fields[TASK_LABEL])], completions, answer, fields)
