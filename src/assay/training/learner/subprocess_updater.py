"""Updates in another process, a new one for each update: when it ends, all its GPU memory is free.

Between updates, weights, optimizer state and the reference model are in main memory that both processes map. The worker
(`UpdateWorker`), which lives for one update or a whole warm start, copies them to the device, makes its steps as any
`Updater` does, and writes weights and optimizer state back, so the result is the same as in this process.
Engine and everything else stay in the main process. With several ranks, each has a worker, and the workers form a mesh
of their own.
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
import pickle
import signal
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.algos import Algorithm, Sums
from assay.config import TrainConfig
from assay.mesh import Mesh, join_children
from assay.models import PolicyModel
from assay.models.device import deterministic, is_deterministic
from assay.system.spawn import RemoteWorker, WorkerDied, exit_reason, serve
from assay.training.learner.optim import optimizer_tensors
from assay.training.learner.pack import Row, out_of_memory
from assay.training.learner.update import Fault, RowScores, Scorer, ScoreRecord, Updater
from assay.types import UserError

ALIGNMENT = 64  # bytes, as in torch's allocator
WORKER = "assay.training.learner.subprocess_updater"
NUMBERS = itertools.count()  # of the meshes of workers, which all ranks start in the same order
WEIGHTS, MOMENTS, REFERENCE = "weights", "moments", "reference"  # the shared files


@dataclass(frozen=True)
class TensorSlot:
    """Position of a tensor in a shared file."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


class SharedTensors:
    """Named tensors in an anonymous file that two processes map. It grows as tensors are added.

    The file is freed when the last process that has it open ends, in whatever way. `descriptor` and `slots`: the
    values in the process that created it.
    """

    def __init__(self, descriptor: int | None = None, slots: Mapping[str, TensorSlot] | None = None) -> None:
        self.file = os.fdopen(new_file() if descriptor is None else descriptor, "r+b", buffering=0)
        self.slots = dict(slots or {})
        self._views: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        return max((slot.end for slot in self.slots.values()), default=0)

    @torch.no_grad()
    def store(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy each tensor to its slot, which is created if needed; returns the shared tensors."""
        for name, tensor in tensors.items():
            if name not in self.slots:
                start = -(-self.size // ALIGNMENT) * ALIGNMENT
                self.slots[name] = TensorSlot(start, tuple(tensor.shape), tensor.dtype)
        if self.file.seek(0, os.SEEK_END) < self.size:
            self.file.truncate(self.size)
        views = self.tensors()
        for name, tensor in tensors.items():
            if tensor.data_ptr() != views[name].data_ptr():  # else it is the shared tensor itself
                views[name].copy_(tensor)
        return {name: views[name] for name in tensors}

    def tensors(self) -> dict[str, Tensor]:
        """All shared tensors. What one process writes to them, the other one reads."""
        if self._views.keys() != self.slots.keys():
            memory = mmap.mmap(self.file.fileno(), self.size)  # stays mapped while a tensor refers to it
            self._views = {
                name: torch.frombuffer(memory, dtype=slot.dtype, count=math.prod(slot.shape), offset=slot.offset).view(
                    slot.shape
                )
                for name, slot in self.slots.items()
            }
        return self._views


def new_file() -> int:
    """In memory if the system supports it: unlike /dev/shm, which is small in containers, memfd has no size limit."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("assay")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def policy_device(cfg: TrainConfig, mesh: Mesh) -> torch.device:
    """Where the policy's weights are between updates. Refuses settings that exclude a separate training process."""
    if cfg.train.process == "same":
        return mesh.device
    wanted = "train.process = 'separate'"
    if mesh.tp_size > 1 or (mesh.world > 1 and cfg.parallel.mode == "fsdp"):
        raise UserError(
            f"{wanted} cannot shard a model: set parallel.tp = 1 and parallel.mode = 'ddp', or leave it out"
        )
    if mesh.device.type == "mps":
        raise UserError(f"{wanted} is for CUDA: this device shares its memory with the CPU, so leave it out")
    if cfg.train.compile == "on":
        raise UserError(f"{wanted} would compile again in every step: remove it, or train.compile = 'on'")
    return torch.device("cpu")


@dataclass
class SubprocessUpdater(Updater):
    """An `Updater` whose steps run in a worker process on the device of `mesh`; its own tensors are on the CPU."""

    shared: dict[str, SharedTensors] = field(init=False)
    worker: RemoteWorker | None = field(init=False, default=None)
    spares: list[RemoteWorker] = field(init=False, default_factory=list)  # the next worker, if started ahead

    def __post_init__(self) -> None:
        self.shared = {name: SharedTensors() for name in (WEIGHTS, MOMENTS, REFERENCE)}
        weakref.finalize(self, close_all, self.spares)

    @classmethod
    def of(cls, updater: Updater) -> SubprocessUpdater:
        return cls(**updater_fields(updater))

    @contextmanager
    def working(self, reference: bool = False) -> Iterator[None]:
        """The first step within this context starts a worker; it ends with the context.

        If another update is expected, the next worker is started at the end: its imports take longest, and happen while
        the engine has the device.
        """
        try:
            yield
            if self.worker is not None:
                self._read_back(self._call("end"))
                if self.expects_more:
                    with suppress(OSError):  # if memory is short now, it is started when it is needed
                        self.spares.append(self._new_worker())
        finally:
            if self.worker is not None:
                self.worker.close()
                self.worker = None

    def step(
        self, rows: Sequence[Row], algo: Algorithm, lr: float, record: ScoreRecord | None = None
    ) -> tuple[Sums, float, bool]:
        self._start(algo, algo.needs.ref_logprobs_in_loss)
        result, self.faults, self.token_budget, scores = self._call("step", rows, lr, record is not None)
        if record is not None:
            record.put(rows, scores)
        return result

    def scores(self, rows: Sequence[Row], algo: Algorithm, by: Scorer) -> list[list[float]]:
        if not rows or (by == "reference" and self.served is not None):
            return super().scores(rows, algo, by) if rows else []
        self._start(algo, by == "reference" or algo.needs.ref_logprobs_in_loss)
        return self._call("scores", rows, by)

    def _call(self, method: str, *arguments: Any) -> Any:
        assert self.worker is not None
        try:
            return self.worker.call(method, *arguments)
        except WorkerDied as death:
            raise worker_died(death.exit_code) from None

    def _start(self, algo: Algorithm, with_reference: bool) -> None:
        """Start a worker and give it this updater, unless there is one."""
        if self.worker is not None:
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()  # the worker cannot use memory that torch caches in this process
        content = self._pickled(algo, self.reference if with_reference else None)
        files = {name: (shared.file.fileno(), shared.slots) for name, shared in self.shared.items()}
        self.worker = self._next_worker()
        group = f"update-{next(NUMBERS)}" if self.mesh.world > 1 else None
        self._call("begin", content, files, self.mesh.device, torch.get_num_threads(), group, is_deterministic())

    def _next_worker(self) -> RemoteWorker:
        """The one that was started ahead, if it is still alive."""
        if self.spares and self.spares[-1].running:
            return self.spares.pop()
        close_all(self.spares)
        try:
            return self._new_worker()
        except OSError as error:
            raise UserError(
                f"no training process can be started ({error.strerror or error}): check the limits on processes and "
                "memory (ulimit -u, free), or set train.process = 'same', and resume the run"
            ) from error

    def _new_worker(self) -> RemoteWorker:
        return RemoteWorker(WORKER, pass_fds=[shared.file.fileno() for shared in self.shared.values()])

    def _pickled(self, algo: Algorithm, reference: PolicyModel | None) -> bytes:
        """A plain updater and the algorithm, with the names of shared tensors in place of tensors."""
        names = self._share(WEIGHTS, dict(self.policy.named_parameters()))
        names |= self._share(MOMENTS, optimizer_tensors(self.policy.named_parameters(), self.optimizer))
        if reference is not None and reference is not self.policy:
            names |= self._share(REFERENCE, dict(reference.named_parameters()))
        plain = Updater(
            **updater_fields(self) | {"reference": reference, "served": None, "progress": None, "mesh": Mesh()}
        )
        return pickled_with_names((plain, algo), names)

    def _share(self, kind: str, tensors: dict[str, Tensor]) -> dict[int, tuple[Any, ...]]:
        """Move the tensors to shared memory; returns, by id, the names under which the worker finds them."""
        for name, view in self.shared[kind].store(tensors).items():
            tensors[name].data = view
        return {
            id(tensor): (kind, name, tensor.requires_grad if isinstance(tensor, nn.Parameter) else None)
            for name, tensor in tensors.items()
        }

    def _read_back(self, slots: dict[str, TensorSlot]) -> None:
        """Weights were changed in place; optimizer state may have been created."""
        self.shared[MOMENTS].slots = slots
        weights = dict(self.policy.named_parameters())
        for key, view in self.shared[MOMENTS].tensors().items():
            name, _, kind = key.partition("|")
            self.optimizer.state[weights[name]][kind] = view


def close_all(workers: list[RemoteWorker]) -> None:
    while workers:
        workers.pop().close()


def worker_died(code: int) -> UserError:
    why = "see its error output"
    if code in (-signal.SIGKILL, -signal.SIGBUS):
        why = "main memory, which holds weights, optimizer state and the reference, may have run out: use less of it"
    return UserError(
        f"the training process ended ({exit_reason(code)}): {why}, or set train.process = 'same', and resume the run"
    )


def updater_fields(updater: Updater) -> dict[str, Any]:
    """The fields that every updater has."""
    return {updater_field.name: getattr(updater, updater_field.name) for updater_field in fields(Updater)}


def pickled_with_names(content: Any, names: dict[int, tuple[Any, ...]]) -> bytes:
    """A pickle in which every object that has a name is represented by it."""

    class NamePickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> tuple[Any, ...] | None:
            return names.get(id(part))

    buffer = io.BytesIO()
    try:
        NamePickler(buffer, pickle.HIGHEST_PROTOCOL).dump(content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"this model or loss cannot be sent to a training process ({error}): leave out train.process = 'separate'"
        ) from error
    return buffer.getvalue()


Result = tuple[tuple[Sums, float, bool], Sequence[Fault], int, Sequence[RowScores]]


def main() -> None:
    serve(UpdateWorker())


class UpdateWorker:
    """Methods are called in this order: begin, any number of scores and steps, end."""

    def __init__(self) -> None:
        self.context = ExitStack()  # held until the process ends

    def begin(
        self,
        content: bytes,
        files: dict[str, tuple[int, dict[str, TensorSlot]]],
        device: torch.device,
        threads: int,
        group: str | None,
        repeatable: bool,
    ) -> None:
        """Load the updater and the algorithm, with all tensors on the device. `group`: name of the mesh of the workers
        of all ranks; None: there is one. `repeatable`: see `deterministic`.
        """
        self.context.enter_context(deterministic(repeatable, device))
        torch.set_num_threads(threads)  # the order of summation depends on it, and so do the results
        self.shared = {name: SharedTensors(*arguments) for name, arguments in files.items()}
        try:
            self.updater, self.algo = NameUnpickler(content, self.shared, device).load()
            self.updater.mesh = Mesh(device) if group is None else join_children(group, device)
            self.updater.policy.to(device)  # buffers
            if self.updater.reference is not None:
                self.updater.reference.to(device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                "weights and optimizer state do not fit on the device beside the engine: set "
                "engine.sleep_while_training = true, or lower engine.kv_cache_gib"
            ) from error

    def step(self, rows: Sequence[Row], lr: float, records: bool) -> Result:
        """`records`: return the log-probabilities and entropies of the rows."""
        record = ScoreRecord() if records else None
        sums, norm, skipped = self.updater.step(rows, self.algo, lr, record)
        scores = record.by_row(rows, self.updater.mesh) if record else []
        return (on_cpu(sums), norm, skipped), self.updater.faults, self.updater.token_budget, scores

    def scores(self, rows: Sequence[Row], by: Scorer) -> list[list[float]]:
        return self.updater.scores(rows, self.algo, by)

    def end(self) -> dict[str, TensorSlot]:
        """Write weights and optimizer state back; returns where the latter is."""
        policy = self.updater.policy
        self.shared[WEIGHTS].store({name: p for name, p in policy.named_parameters() if p.requires_grad})
        self.shared[MOMENTS].store(optimizer_tensors(policy.named_parameters(), self.updater.optimizer))
        if self.updater.mesh.world > 1:
            dist.destroy_process_group()
        return self.shared[MOMENTS].slots


class NameUnpickler(pickle.Unpickler):
    """Reads what `pickled_with_names` wrote; shared tensors are copied to the device."""

    def __init__(self, content: bytes, shared: dict[str, SharedTensors], device: torch.device) -> None:
        super().__init__(io.BytesIO(content))
        self.shared, self.device = shared, device
        self.loaded: dict[tuple[Any, ...], Tensor] = {}

    def persistent_load(self, key: tuple[Any, ...]) -> Tensor:
        if key not in self.loaded:  # tied weights stay tied
            kind, name, trained = key  # `trained` is None unless it is a parameter
            tensor = self.shared[kind].tensors()[name].to(self.device, copy=True)
            self.loaded[key] = tensor if trained is None else nn.Parameter(tensor, requires_grad=trained)
        return self.loaded[key]


def on_cpu(sums: Sums) -> Sums:
    parts = (sums.losses, sums.per_token, sums.largest)
    return Sums(sums.tokens.cpu(), *({key: value.cpu() for key, value in part.items()} for part in parts))
