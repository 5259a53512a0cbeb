"""The worker process of `SubprocessUpdater`: it lives for one update, or for a whole warm start."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from assay.algos import Sums
from assay.process.spawn import serve
from assay.train.faults import Fault
from assay.train.learner.optim import optimizer_tensors
from assay.train.learner.pack import Row, out_of_memory
from assay.train.learner.subprocess_updater import MOMENTS, WEIGHTS, SharedTensors, TensorSlot
from assay.train.learner.update import LogprobRecord, RowLogprobs, Scorer
from assay.types import UserError

Result = tuple[tuple[Sums, float, bool], Sequence[Fault], int, Sequence[RowLogprobs]]


def main() -> None:
    serve(UpdateWorker())


class UpdateWorker:
    """Methods are called in this order: begin, any number of scores and steps, end."""

    def begin(
        self,
        content: bytes,
        files: dict[str, tuple[int, dict[str, TensorSlot]]],
        device: torch.device,
        threads: int,
    ) -> None:
        """Load the updater and the algorithm, with all tensors on the device."""
        torch.set_num_threads(threads)  # the order of summation depends on it, and so do the results
        self.shared = {name: SharedTensors(*one) for name, one in files.items()}
        try:
            self.updater, self.algo = NameUnpickler(content, self.shared, device).load()
            self.updater.policy.to(device)  # buffers
            if self.updater.reference is not None:
                self.updater.reference.to(device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                "weights and optimizer state do not fit on the device beside the engine: set "
                "engine.sleep_while_training = true, or lower engine.memory"
            ) from error

    def step(self, rows: Sequence[Row], lr: float, records: bool) -> Result:
        """`records`: return the log-probabilities of the rows."""
        record = LogprobRecord() if records else None
        sums, norm, skipped = self.updater.step(rows, self.algo, lr, record)
        logprobs = record.by_row(rows, self.updater.mesh) if record else []
        return (on_cpu(sums), norm, skipped), self.updater.faults, self.updater.token_budget, logprobs

    def scores(self, rows: Sequence[Row], by: Scorer) -> list[list[float]]:
        return self.updater.scores(rows, self.algo, by)

    def end(self) -> dict[str, TensorSlot]:
        """Write weights and optimizer state back; returns where the latter is."""
        policy = self.updater.policy
        self.shared[WEIGHTS].store({name: p for name, p in policy.named_parameters() if p.requires_grad})
        self.shared[MOMENTS].store(optimizer_tensors(policy.named_parameters(), self.updater.optimizer))
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
    def moved(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.cpu() for key, value in values.items()}

    return replace(
        sums,
        tokens=sums.tokens.cpu(),
        losses=moved(sums.losses),
        per_token=moved(sums.per_token),
        largest=moved(sums.largest),
    )
