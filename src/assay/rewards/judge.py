"""What a judge is, and the small tools that every judge and every caller of judges shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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
