"""Our own engine: continuous batching over a slot cache, prompts computed once for all their samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from assay.engine.base import OnToken, Request
from assay.engine.cache import SlotCache
from assay.engine.network import FusedDecoder
from assay.engine.runner import Runner
from assay.engine.scheduler import Scheduler
from assay.engine.sequence import jobs_for
from assay.engine.session import Session
from assay.engine.stopping import Decode
from assay.engine.weights import copy_weights
from assay.models.fingerprint import fingerprint
from assay.models.spec import ModelSpec
from assay.types import Completion, UserError

PREFILL_TOKENS = 4096  # of prompts computed in one pass


class NativeEngine:
    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        max_batch: int = 256,
        max_length: int | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`decode` turns token ids into text; only stop strings need it."""
        if max_batch < 1:
            raise UserError(f"max_batch must be at least 1, not {max_batch}")
        self.version = -1  # no weights yet
        self.max_length = min(spec.max_length, max_length or spec.max_length)
        self.max_batch, self.decode = max_batch, decode
        self.device = torch.device(device)
        self.dtype = dtype
        self.network = FusedDecoder(spec, self.device, dtype)
        self.runner = Runner(self.network, SlotCache(spec, self.device, dtype, self.max_length))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.runner.drop()
        copy_weights(self.network.canonical(), weights)
        self.version = version

    def fingerprint(self) -> str:
        return fingerprint(self.network.canonical().items())

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], on_token: OnToken | None = None) -> list[list[Completion]]:
        jobs = jobs_for(requests, self.max_length, self.network.spec.vocab_size, self.decode is not None)
        if not jobs:
            return []
        if self.version < 0:
            raise UserError("the engine has no weights yet: call load_weights first")
        scheduler = Scheduler(jobs, self.max_batch, PREFILL_TOKENS)
        session = Session(requests, scheduler, self.device, self.version, self.decode, on_token)
        try:
            while scheduler.unfinished:
                self._admit(scheduler, session)
                if scheduler.running:
                    self._step(scheduler, session)
        except BaseException:
            self.runner.drop()  # what is half done may hold anything, numbers that are none included
            raise
        return session.completions()

    def _admit(self, scheduler: Scheduler, session: Session) -> None:
        start = len(scheduler.running)
        if admissions := scheduler.admit():
            session.enter(admissions, start, self.runner.enter(admissions, start))
            self._collect(scheduler, session)

    def _step(self, scheduler: Scheduler, session: Session) -> None:
        size = len(scheduler.running)
        batch = session.batch
        session.advance(self.runner.decode(batch.token[:size], batch.length[:size], scheduler.longest()))
        self._collect(scheduler, session)

    def _collect(self, scheduler: Scheduler, session: Session) -> None:
        longest = scheduler.longest()
        if moves := session.collect():
            self.runner.cache.move(moves, longest)
