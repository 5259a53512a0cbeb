"""Hooks with which users' code follows a run from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from assay.types import UserError, describe_user_error


class RunHandle(Protocol):
    """What hooks may use of a run."""

    @property
    def path(self) -> Path: ...

    def request_stop(self) -> None: ...


class Callback:
    """Base class with all hooks; override those that you need. With several processes, the main one calls them.

    `run.request_stop()` in a hook ends the run after the current step, with a checkpoint, as Ctrl-C does.
    """

    def on_step(self, run: RunHandle, step: int, metrics: Mapping[str, float]) -> None:
        """After each training step, with its metrics."""

    def on_evaluation(self, run: RunHandle, step: int, metrics: Mapping[str, float]) -> None:
        """After each evaluation: "eval/accuracy" during training, "before/accuracy" and "after/accuracy" around it."""

    def on_checkpoint(self, run: RunHandle, step: int, path: Path) -> None:
        """After each checkpoint; `path` is its folder."""

    def on_stop(self, run: RunHandle, summary: Mapping[str, Any]) -> None:
        """When the run ends, with its summary; the summary is empty if the run was stopped or failed."""


Hook = Callback | Callable[[RunHandle, int, Mapping[str, float]], object]


def as_callback(value: Any) -> Callback:
    """A callback, or a function f(run, step, metrics) that is called after each step."""
    if isinstance(value, Callback):
        return value
    if isinstance(value, type) or not callable(value):
        raise UserError(f"a callback must be a function f(run, step, metrics) or an assay.Callback, not {value!r:.80}")
    callback: Any = Callback()
    callback.on_step = value
    return callback


def notify(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Call a hook of all callbacks. An error in one of them names it."""
    for callback in callbacks:
        function: Callable[..., None] = getattr(callback, hook)
        try:
            function(*args)
        except UserError:
            raise
        except Exception as error:
            name = getattr(function, "__qualname__", hook)
            raise UserError(f"the callback {name} failed: {describe_user_error(error)}") from error
