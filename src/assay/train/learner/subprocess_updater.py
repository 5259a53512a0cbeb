"""Named tensors in main memory that two processes share: a file without a name, which both of them map.

Training in a process of its own, a new one for each update: when it ends, every byte that it had on the GPU is free.

Between updates weights, moments and the reference wait in main memory, on shelves that both processes see. The training
process takes copies to the device, makes its steps as any `Updater` does, and puts weights and moments back. So the
result is that of training in this process. Here remain the engine and everything else.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import signal
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from assay.algos import Algorithm, Sums
from assay.config import TrainConfig
from assay.mesh import Mesh
from assay.models import PolicyModel
from assay.process.spawn import ChildProcess, exit_reason
from assay.train.learner.pack import Row
from assay.train.learner.update import LogprobRecord, Scorer, Updater
from assay.types import UserError

ALIGNED = 64  # bytes, as torch's own memory is


@dataclass(frozen=True)
class TensorSlot:
    """Where on the shelf a tensor lies."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


class SharedTensors:
    """It grows as tensors are placed, and goes when the last process that has it open ends, however that comes about.

    `descriptor` and `slots` are those of another process, which handed its file on.
    """

    def __init__(self, descriptor: int | None = None, slots: Mapping[str, TensorSlot] | None = None) -> None:
        self.file = os.fdopen(new_file() if descriptor is None else descriptor, "r+b", buffering=0)
        self.slots = dict(slots or {})
        self._views: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        return max((slot.end for slot in self.slots.values()), default=0)

    @torch.no_grad()
    def place(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the shelf, each to its own slot, and give those that lie there."""
        for name, tensor in tensors.items():
            if name not in self.slots:
                start = -(-self.size // ALIGNED) * ALIGNED
                self.slots[name] = TensorSlot(start, tuple(tensor.shape), tensor.dtype)
        if self.file.seek(0, os.SEEK_END) < self.size:
            self.file.truncate(self.size)
        views = self.tensors()
        for name, tensor in tensors.items():
            if tensor.data_ptr() != views[name].data_ptr():  # else it is the one that lies there
                views[name].copy_(tensor)
        return {name: views[name] for name in tensors}

    def tensors(self) -> dict[str, Tensor]:
        """All that is there. Whatever is written to these, the other process sees in its own."""
        if self._views.keys() != self.slots.keys():
            memory = mmap.mmap(self.file.fileno(), self.size)  # stays for as long as a tensor needs it
            self._views = {
                name: torch.frombuffer(memory, dtype=slot.dtype, count=math.prod(slot.shape), offset=slot.offset).view(
                    slot.shape
                )
                for name, slot in self.slots.items()
            }
        return self._views


def new_file() -> int:
    """In memory where the system can: unlike /dev/shm, which containers keep small, that has no size of its own."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("assay")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


WEIGHTS, MOMENTS, REFERENCE = "weights", "moments", "reference"  # the shelves


def policy_device(cfg: TrainConfig, mesh: Mesh) -> torch.device:
    """Where its weights are between updates. Refuses what does not go together with a training process of its own."""
    if cfg.train.process == "same":
        return mesh.device
    wanted = "train.process = 'separate'"
    if mesh.world > 1:
        raise UserError(f"{wanted} is for one GPU, not for {mesh.world} processes: start one, or leave it out")
    if mesh.device.type == "mps":
        raise UserError(f"{wanted} is for CUDA: on this device there is one memory for all, so leave it out")
    if cfg.train.compile == "on":
        raise UserError(f"{wanted} would compile anew in every step: leave out train.compile = 'on', or the former")
    return torch.device("cpu")


@dataclass
class SubprocessUpdater(Updater):
    """An `Updater` whose steps are made elsewhere: on the device of `mesh`, while its own tensors are on the CPU."""

    shelves: dict[str, SharedTensors] = field(init=False)
    trainer: TrainingProcess | None = field(init=False, default=None)
    spares: list[TrainingProcess] = field(init=False, default_factory=list)  # the next one, if it was started

    def __post_init__(self) -> None:
        self.shelves = {name: SharedTensors() for name in (WEIGHTS, MOMENTS, REFERENCE)}
        weakref.finalize(self, close_all, self.spares)

    @classmethod
    def of(cls, updater: Updater) -> SubprocessUpdater:
        return cls(**settings(updater))

    @contextmanager
    def working(self, reference: bool = False) -> Iterator[None]:
        """From the first step within it to its end there is a training process.

        Then the next one is started if another update is expected: what it imports, which takes longest, it imports
        while others have the device.
        """
        try:
            yield
            if self.trainer is not None:
                self._take_back(self.trainer.ask("end"))
                if self.expects_more:
                    with suppress(OSError):  # there may be no memory for it now: then it is started when it is needed
                        self.spares.append(TrainingProcess(self._files()))
        finally:
            if self.trainer is not None:
                self.trainer.close()
                self.trainer = None

    def step(
        self, rows: Sequence[Row], algo: Algorithm, lr: float, record: LogprobRecord | None = None
    ) -> tuple[Sums, float, bool]:
        self.trainer = self.trainer or self._start(algo, algo.needs.ref_logprobs_in_loss)
        result, self.faults, self.token_budget, logprobs = self.trainer.ask("step", rows, lr, record is not None)
        if record is not None:
            record.put(rows, logprobs)
        return result

    def scores(self, rows: Sequence[Row], algo: Algorithm, by: Scorer) -> list[list[float]]:
        if not rows:
            return []
        self.trainer = self.trainer or self._start(algo, by == "reference" or algo.needs.ref_logprobs_in_loss)
        return self.trainer.ask("scores", rows, by)

    def _start(self, algo: Algorithm, with_reference: bool) -> TrainingProcess:
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps here for later, another process could not use
        described = self._described(algo, self.reference if with_reference else None)
        shelves = {name: (shelf.file.fileno(), shelf.slots) for name, shelf in self.shelves.items()}
        trainer = self._process()
        try:
            trainer.ask("begin", described, shelves, self.mesh.device, torch.get_num_threads())
        except BaseException:
            trainer.close()
            raise
        return trainer

    def _process(self) -> TrainingProcess:
        """The one that was started ahead, if it is still there."""
        if self.spares and self.spares[-1].running:
            return self.spares.pop()
        close_all(self.spares)
        try:
            return TrainingProcess(self._files())
        except OSError as error:
            raise UserError(
                f"no training process can be started ({error.strerror or error}): see how many processes and how much "
                "memory you may have (ulimit -u, free), or set train.process = 'same', and resume the run"
            ) from error

    def _files(self) -> list[int]:
        return [shelf.file.fileno() for shelf in self.shelves.values()]

    def _described(self, algo: Algorithm, reference: PolicyModel | None) -> bytes:
        """A plain updater with the algorithm, in which every tensor is named by its place on a shelf."""
        names = self._shelve(WEIGHTS, dict(self.policy.named_parameters()))
        names |= self._shelve(MOMENTS, moments(self.policy, self.optimizer))
        if reference is not None and reference is not self.policy:
            names |= self._shelve(REFERENCE, dict(reference.named_parameters()))
        plain = Updater(**settings(self) | {"reference": reference})
        return named((plain, algo), names)

    def _shelve(self, kind: str, tensors: dict[str, Tensor]) -> dict[int, tuple[Any, ...]]:
        """From now on these tensors are those on the shelf. Gives the names by which the other process knows them."""
        for name, view in self.shelves[kind].place(tensors).items():
            tensors[name].data = view
        return {
            id(tensor): (kind, name, tensor.requires_grad if isinstance(tensor, nn.Parameter) else None)
            for name, tensor in tensors.items()
        }

    def _take_back(self, slots: dict[str, TensorSlot]) -> None:
        """Weights have changed where they lie. Moments may have come into being."""
        self.shelves[MOMENTS].slots = slots
        views, weights = self.shelves[MOMENTS].tensors(), dict(self.policy.named_parameters())
        for key, view in views.items():
            name, _, kind = key.partition("|")
            self.optimizer.state[weights[name]][kind] = view


class TrainingProcess(ChildProcess):
    """A fresh interpreter that runs `assay.train.learner.update_worker`, with some of our files open."""

    def __init__(self, files: Sequence[int]) -> None:
        super().__init__("assay.train.learner.update_worker", pass_fds=files)

    def ask(self, what: str, *details: Any) -> Any:
        """What it answers. What it warns of is warned of here, and what it raises is raised here."""
        try:
            self.send((what, details))
            answer, error, warned = self.receive()
        except (EOFError, BrokenPipeError):
            raise died(self.process.wait()) from None
        for category, text in warned:
            warnings.warn(text, category, stacklevel=2)
        if error is not None:
            raise error
        return answer


def close_all(processes: list[TrainingProcess]) -> None:
    while processes:
        processes.pop().close()


def died(code: int) -> UserError:
    why = "see its error output"
    if code in (-signal.SIGKILL, -signal.SIGBUS):
        why = "main memory may have run out, which has to hold weights, moments and a reference: use less of it"
    return UserError(
        f"the training process is gone ({exit_reason(code)}): {why}, or set train.process = 'same', and resume the run"
    )


def settings(updater: Updater) -> dict[str, Any]:
    """What any updater has, by name."""
    return {one.name: getattr(updater, one.name) for one in fields(Updater)}


def moments(policy: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors, named as they are in a checkpoint."""
    return {
        f"{name}|{kind}": value
        for name, parameter in policy.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def named(thing: Any, names: dict[int, tuple[Any, ...]]) -> bytes:
    """A pickle in which whatever has a name is represented by that."""

    class NamePickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> tuple[Any, ...] | None:
            return names.get(id(part))

    buffer = io.BytesIO()
    try:
        NamePickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"this model or loss cannot be sent to a training process ({error}): leave out train.process = 'separate'"
        ) from error
    return buffer.getvalue()
