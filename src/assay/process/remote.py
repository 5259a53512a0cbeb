"""Method calls to an object in another, trusted process: results, errors and warnings come back to the caller.

Messages are pickled, so this is not for processes that run code written by a model.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from assay.process.messages import receive, send
from assay.process.spawn import ChildProcess, ignore_stop_signals, take_pipes

Call = tuple[str, Sequence[Any]]  # name of a method and its arguments
Reply = tuple[Any, BaseException | None, list[tuple[type[Warning], str]]]


class WorkerDied(Exception):
    """The worker process ended instead of replying."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class RemoteWorker(ChildProcess):
    """A child process whose module calls `serve`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of the method. Its warnings are issued here and its error is raised here."""
        try:
            self.send((method, arguments))
            result, error, caught = self.receive()
        except (EOFError, BrokenPipeError):
            raise WorkerDied(self.process.wait()) from None
        for category, text in caught:
            warnings.warn(text, category, stacklevel=2)
        if error is not None:
            raise error
        return result


def serve(target: object) -> NoReturn:
    """In the worker: answer calls to methods of `target` until the parent process ends, or closes the pipe."""
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(incoming, calls), daemon=True).start()
    while True:
        method, arguments = calls.get()
        send(outgoing, reply(getattr(target, method), arguments))


def _listen(incoming: int, calls: queue.SimpleQueue[Call]) -> None:
    """In its own thread, so that the process ends with its parent even in the middle of a call."""
    try:
        while True:
            calls.put(receive(incoming))
    except EOFError:
        os._exit(1)
    except BaseException:  # a malformed message would never be answered
        traceback.print_exc()
        os._exit(1)


def reply(method: Callable[..., Any], arguments: Sequence[Any]) -> Reply:
    """Call the method; its result or error, and the warnings it issued."""
    result, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        try:
            result = method(*arguments)
        except BaseException as raised:
            error = _portable(raised)
    categories = [one.category if one.category.__module__ == "builtins" else UserWarning for one in caught]
    return result, error, [(kind, str(one.message)) for kind, one in zip(categories, caught, strict=True)]


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note; a RuntimeError with the same text if it cannot be pickled."""
    note = "in the worker process:\n" + "".join(traceback.format_exception(error))
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    return sent
