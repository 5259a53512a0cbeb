"""The training process, started by `apart`: questions come in at stdin, and each gets one answer.

It lives for one update, or for a whole warm start.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from assay.algos import Sums
from assay.process.messages import receive, send
from assay.process.spawn import ignore_stop_signals, take_pipes
from assay.train.faults import Fault
from assay.train.learner.pack import Row, out_of_memory
from assay.train.learner.subprocess_updater import MOMENTS, WEIGHTS, SharedTensors, TensorSlot, moments
from assay.train.learner.update import LogprobRecord, RowLogprobs, Scorer
from assay.types import UserError

Result = tuple[tuple[Sums, float, bool], Sequence[Fault], int, Sequence[RowLogprobs]]


def main() -> None:
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    questions: queue.SimpleQueue[tuple[str, Sequence[Any]]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(incoming, questions), daemon=True).start()
    work = Work()
    while True:
        what, details = questions.get()
        send(outgoing, answered(getattr(work, what), details))


def listen(incoming: int, questions: queue.SimpleQueue[tuple[str, Sequence[Any]]]) -> None:
    """In a thread of its own: should who started us end, however that comes about, we end in the middle of a step."""
    try:
        while True:
            questions.put(receive(incoming))
    except EOFError:
        os._exit(1)
    except BaseException:  # nobody would ever answer
        traceback.print_exc()
        os._exit(1)


def answered(work: Callable[..., Any], details: Sequence[Any]) -> tuple[Any, BaseException | None, list[Any]]:
    """What came of it: an answer or an error, and what was warned of."""
    answer, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        try:
            answer = work(*details)
        except BaseException as raised:
            error = portable(raised)
    kinds = [one.category if one.category.__module__ == "builtins" else UserWarning for one in caught]
    return answer, error, [(kind, str(one.message)) for kind, one in zip(kinds, caught, strict=True)]


def portable(error: BaseException) -> BaseException:
    """The error with the story of where it struck, or one that says the same where it cannot travel."""
    story = "in the training process:\n" + "".join(traceback.format_exception(error))
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(story)
    return sent


class Work:
    """What can be asked for, in this order: begin, any number of scores and steps, end."""

    def begin(
        self,
        described: bytes,
        shelves: dict[str, tuple[int, dict[str, TensorSlot]]],
        device: torch.device,
        threads: int,
    ) -> None:
        """Everything onto the device."""
        torch.set_num_threads(threads)  # sums in another order are other sums
        self.shelves = {name: SharedTensors(*one) for name, one in shelves.items()}
        try:
            self.updater, self.algo = NameUnpickler(described, self.shelves, device).load()
            self.updater.policy.to(device)  # what is no parameter
            if self.updater.reference is not None:
                self.updater.reference.to(device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                "weights and optimizer state do not fit on the device next to the engine: "
                "set engine.sleep_while_training = true, or lower engine.memory"
            ) from error

    def step(self, rows: Sequence[Row], lr: float, records: bool) -> Result:
        record = LogprobRecord() if records else None
        sums, norm, skipped = self.updater.step(rows, self.algo, lr, record)
        logprobs = record.by_row(rows, self.updater.mesh) if record else []
        return (on_cpu(sums), norm, skipped), self.updater.faults, self.updater.token_budget, logprobs

    def scores(self, rows: Sequence[Row], by: Scorer) -> list[list[float]]:
        return self.updater.scores(rows, self.algo, by)

    def end(self) -> dict[str, TensorSlot]:
        """Put back what has changed; weights have their place, for moments it is told."""
        policy = self.updater.policy
        self.shelves[WEIGHTS].place({name: p for name, p in policy.named_parameters() if p.requires_grad})
        self.shelves[MOMENTS].place(moments(policy, self.updater.optimizer))
        return self.shelves[MOMENTS].slots


class NameUnpickler(pickle.Unpickler):
    """Reads what `apart.named` wrote: tensors are copied from the shelves to the device."""

    def __init__(self, content: bytes, shelves: dict[str, SharedTensors], device: torch.device) -> None:
        super().__init__(io.BytesIO(content))
        self.shelves, self.device = shelves, device
        self.found: dict[tuple[Any, ...], Any] = {}

    def persistent_load(self, key: tuple[Any, ...]) -> Any:
        if key not in self.found:  # a weight that several share stays one weight
            self.found[key] = self.fetched(*key)
        return self.found[key]

    def fetched(self, kind: str, name: str, trained: bool | None) -> Tensor:
        """`trained` is None for what is no parameter."""
        tensor = self.shelves[kind].tensors()[name].to(self.device, copy=True)
        return tensor if trained is None else nn.Parameter(tensor, requires_grad=trained)


def on_cpu(sums: Sums) -> Sums:
    def moved(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.cpu() for key, value in values.items()}

    return replace(
        sums,
        tokens=sums.tokens.cpu(),
        losses=moved(sums.losses),
        per_token=moved(sums.per_token),
        largest=moved(sums.largest),
    )
