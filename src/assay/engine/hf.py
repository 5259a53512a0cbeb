"""Generation for any causal language model of transformers, with our own loop, sampler and stopping around its cache.

Prompts that run together are padded on the left, so that everyone's next token is in the last column; a mask and
explicit positions keep the padding out of the result. Where a model takes no positions, only prompts of one length run
together.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import More, OnFinish, OnToken, Request
from assay.engine.columns import Column
from assay.engine.rows import Rows
from assay.engine.scheduler import close_gaps, seat
from assay.engine.sequence import Job, Sample, job_for, nothing_kept
from assay.engine.session import Session
from assay.engine.stopping import Decode, StopStrings
from assay.engine.weights import copy_weights
from assay.models.base import PolicyModel
from assay.models.fingerprint import fingerprint
from assay.models.lora import drop_lora
from assay.types import Completion, UserError

PREFILL_TOKENS = 8192  # of prompts that start together


class HFEngine:
    def __init__(
        self,
        model: PolicyModel,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_batch: int = 256,
        max_length: int | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`model.hf` is the transformers model; device and dtype are the model's own unless given."""
        if max_batch < 1:
            raise UserError(f"max_batch must be at least 1, not {max_batch}")
        self.device = torch.device(device) if device is not None else model.device
        self.model = own_copy(model, self.device, dtype)
        self.hf: Any = self.model.hf
        self.dtype = dtype or next(model.parameters()).dtype
        self.version = 0
        self.max_length = min(model.max_length, max_length or model.max_length)
        self.max_batch, self.stopping = max_batch, StopStrings(decode) if decode else None
        accepted = inspect.signature(self.hf.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.kept: dict[int, list[int]] = {}
        self.next_handle = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        copy_weights(dict(self.model.weights()), weights)
        self.version = version

    def forget(self) -> None:
        """Nothing is remembered between calls but the tokens of what is kept."""

    def rest(self) -> None:
        """There is nothing but the weights."""

    def fingerprint(self) -> str:
        return fingerprint(self.model.weights())

    def release(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.kept.pop(handle, None)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        more: More | None = None,
    ) -> list[list[Completion]]:
        """`more` is asked between waves, which run until their last sample has finished."""
        session = Session(self.max_batch, self.version, self.stopping, self._keep, on_token, on_finish)
        before = dict(self.kept)
        try:
            waiting = deque(self._samples(requests, session))
            while True:
                if more is not None:
                    with torch.inference_mode(False):
                        waiting += self._samples(more(not waiting), session)
                if not waiting:
                    break
                Wave(self, session, self._next(waiting)).run()
        except BaseException:
            self.kept = before
            raise
        return session.completions()

    def _samples(self, requests: Sequence[Request], session: Session) -> list[Sample]:
        jobs = []
        for index, request in session.numbered(requests):
            try:
                job = self._job(request, index)
            except UserError as error:
                session.errors[index] = str(error)
                continue
            session.expect(job)
            jobs.append(job)
            if request.continues is not None:
                del self.kept[request.continues]
        if not self.takes_positions:
            jobs.sort(key=lambda job: len(job.tokens))
        return [Sample(job, index) for job in jobs for index in range(job.request.params.n)]

    def _job(self, request: Request, index: int) -> Job:
        before: list[int] = []
        if request.continues is not None:
            if request.continues not in self.kept:
                raise nothing_kept(request, index)
            before = self.kept[request.continues]
        return job_for(
            request,
            index,
            before,
            max_length=self.max_length,
            vocabulary=self.model.vocab_size,
            can_decode=self.stopping is not None,
        )

    def _keep(self, sample: Sample, tokens: list[int]) -> int:
        """Only the tokens: a continuation computes them again."""
        self.next_handle += 1
        self.kept[self.next_handle] = tokens
        return self.next_handle

    def _next(self, waiting: deque[Sample]) -> list[Sample]:
        """Who runs together: as many as there are rows and prompt tokens allowed, one at least."""
        samples: list[Sample] = []
        tokens = 0
        while waiting and len(samples) < self.max_batch:
            job = waiting[0].job
            if samples and samples[-1].job is not job:
                tokens += len(samples[-1].job.tokens)
                uneven = not self.takes_positions and len(job.tokens) != len(samples[0].job.tokens)
                if uneven or tokens + len(job.tokens) > PREFILL_TOKENS:
                    break
            samples.append(waiting.popleft())
        return samples

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        extra = {**self.extra, "position_ids": positions} if self.takes_positions else self.extra
        return self.hf(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True, **extra
        )


def own_copy(model: PolicyModel, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A copy that shares nothing with the model. Only weights are cast: buffers (rotary frequencies...) stay exact."""
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = None  # not to be copied along
    copied = copy.deepcopy(model).to(device).eval()
    drop_lora(copied)  # the weights that come are merged
    for name, weight in model.named_parameters():
        weight.grad = gradients[name]
    for weight in copied.parameters():
        weight.requires_grad_(False)
        if dtype is not None and weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return copied


class Wave:
    """Samples that start together and run until the last has finished."""

    def __init__(self, engine: HFEngine, session: Session, samples: list[Sample]) -> None:
        self.engine, self.session = engine, session
        self.step = session.history.first = 0
        self.running: list[Sample] = []
        for sample in samples:
            seat(sample, self.running, self.step)
        self.rows = Rows(len(samples), 0, engine.device)
        self.rows.enter(samples)
        self.mask = torch.empty(0)  # [rows, tokens]: which are no padding
        self.cache: Any = None

    def run(self) -> None:
        logits = self._prefill()
        while True:
            self._draw(logits)
            if not self.running:
                return
            size = len(self.running)
            self.mask = torch.cat((self.mask, self.mask.new_ones(size, 1)), dim=1)
            token, position = (self.rows.column(column, size)[:, None] for column in (Column.TOKEN, Column.POSITION))
            logits = self.engine._forward(token, self.mask, position, self.cache).logits[:, -1]

    def _prefill(self) -> Tensor:
        """Logits with one row for each sample, from one pass over the prompts."""
        device = self.engine.device
        jobs = list({id(sample.job): sample.job for sample in self.running}.values())
        prompts = [list(job.tokens) for job in jobs]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        output = self.engine._forward(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        self.cache = output.get("past_key_values")
        if not hasattr(self.cache, "reorder_cache"):
            kind = type(self.engine.hf).__name__
            raise UserError(f"{kind} keeps no key/value cache to rearrange: choose another model")
        places = {id(job): place for place, job in enumerate(jobs)}
        owners = torch.tensor([places[id(sample.job)] for sample in self.running], device=device)
        self.cache.reorder_cache(owners)
        self.mask = mask[owners]
        return output.logits[:, -1][owners]

    def _draw(self, logits: Tensor) -> None:
        """Everyone draws a token; who has finished leaves, and mask and cache keep the rows of those who remain."""
        rows = self.rows
        rows.note_modes(self.running)
        rows.draw(logits)
        look = rows.look(list(self.running), self.step, 1)
        self.step += 1
        ended = [sample for sample, _ in self.session.take(look, self.running)]
        if not ended:
            return
        before = len(self.running)
        moves = close_gaps(self.running, ended, self.step)
        rows.move(moves, len(self.running), before)
        order = list(range(before))
        for source, destination in moves:
            order[destination] = source
        if self.running:
            kept = torch.tensor(order[: len(self.running)], device=self.mask.device)
            self.cache.reorder_cache(kept)
            self.mask = self.mask[kept]
