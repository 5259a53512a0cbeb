"""One call of `generate`: what any engine does between two passes of its network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from assay.engine.base import OnToken, Request
from assay.engine.batch import Batch, State
from assay.engine.scheduler import Admission, Scheduler
from assay.engine.sequence import Sample
from assay.engine.stopping import Decode, completes_stop
from assay.types import Completion, Finish, UserError


def steps_between_looks(device: torch.device) -> int:
    """How often to ask what has finished: always where that is free, seldom where a device would wait for the host."""
    return 1 if device.type == "cpu" else 8


class Session:
    def __init__(
        self,
        requests: Sequence[Request],
        scheduler: Scheduler,
        device: torch.device,
        version: int,
        decode: Decode | None,
        on_token: OnToken | None,
    ) -> None:
        self.scheduler, self.version = scheduler, version
        self.decode, self.on_token = decode, on_token
        self.watching = on_token is not None or any(request.params.stop for request in requests)
        self.look_every = 1 if self.watching else steps_between_looks(device)
        rows = min(scheduler.max_batch, scheduler.pending)
        stop_width = max(len(request.params.stop_token_ids) for request in requests)
        self.batch = Batch(rows, stop_width, max(job.limit for job in scheduler.waiting), device)
        self.results: list[dict[int, Completion]] = [{} for _ in requests]

    def completions(self) -> list[list[Completion]]:
        return [[done[index] for index in range(len(done))] for done in self.results]

    def enter(self, admissions: Sequence[Admission], start: int, logits: Tensor) -> None:
        """Newcomers draw their first token."""
        samples = [sample for admission in admissions for sample in admission.samples]
        self.batch.add(start, samples)
        self.batch.modes(self.scheduler.running)
        self._draw(slice(start, start + len(samples)), logits)

    def advance(self, logits: Tensor) -> None:
        """Everyone draws the next token."""
        running, step = self.scheduler.running, self.scheduler.step
        self.batch.reserve(max(step - sample.entered for sample in running) + 1)
        self.batch.stored(len(running))
        self._draw(slice(0, len(running)), logits)
        self.scheduler.step += 1

    def collect(self) -> list[tuple[int, int]]:
        """Hand over what has finished and close the gaps; returns the moves (from, to) for other state kept by slot."""
        running = self.scheduler.running
        ended = self.batch.ended(len(running)) if self.scheduler.step % self.look_every == 0 else []
        if not ended:
            return []
        written = self.batch.written([row for row, _ in ended])
        for (row, state), (tokens, (engine, sampling, mass)) in zip(ended, written, strict=True):
            sample = running[row]
            if state == State.BROKEN:
                raise broken(sample, len(tokens) - 1)
            finish = Finish.STOP if state == State.STOP else Finish.LENGTH
            completion = Completion(tokens, engine, sampling, finish, self.version, sum(mass) / len(mass))
            self.results[sample.job.index][sample.index] = completion
        moves = self.scheduler.release(row for row, _ in ended)
        if moves:
            self.batch.move(moves)
        self.batch.modes(self.scheduler.running)
        return moves

    def _draw(self, rows: slice, logits: Tensor) -> None:
        self.batch.draw(rows, logits)
        if self.watching:
            self._watch(rows)

    def _watch(self, rows: slice) -> None:
        """Stream tokens and look for stop strings: the only Python work for each token, and only if asked for."""
        tokens, states = self.batch.token[rows].tolist(), self.batch.state[rows].tolist()
        for row, (token, state) in enumerate(zip(tokens, states, strict=True), start=rows.start):
            sample = self.scheduler.running[row]
            if state == State.BROKEN:
                raise broken(sample, self.scheduler.step - sample.entered)
            if self.on_token is not None:
                self.on_token(sample.job.index, sample.index, token)
            if stops := sample.job.request.params.stop:
                sample.watched.append(token)
                assert self.decode is not None
                if state != State.STOP and completes_stop(sample.watched, stops, self.decode):
                    self.batch.state[row] = State.STOP


def broken(sample: Sample, position: int) -> UserError:
    return UserError(
        f"{sample.job.name}: the model's output for token {position} of sample {sample.index} is not a number (NaN): "
        "its weights are broken, perhaps by a diverged training run; go back to an earlier checkpoint"
    )
