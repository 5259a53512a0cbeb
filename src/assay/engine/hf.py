"""Generation for any causal language model of transformers, with our own loop, sampler and stopping around its cache.

Prompts that run together are padded on the left, so that everyone's next token is in the last column; a mask and
explicit positions keep the padding out of the result. Where a model takes no positions, only prompts of one length run
together.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import OnToken, Request
from assay.engine.scheduler import Admission, Scheduler
from assay.engine.sequence import jobs_for
from assay.engine.session import Session
from assay.engine.stopping import Decode
from assay.engine.weights import copy_weights
from assay.models.base import PolicyModel
from assay.models.fingerprint import fingerprint
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
        self.max_batch, self.decode = max_batch, decode
        accepted = inspect.signature(self.hf.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        copy_weights(dict(self.model.weights()), weights)
        self.version = version

    def fingerprint(self) -> str:
        return fingerprint(self.model.weights())

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], on_token: OnToken | None = None) -> list[list[Completion]]:
        jobs = jobs_for(requests, self.max_length, self.model.vocab_size, self.decode is not None)
        if not jobs:
            return []
        even = not self.takes_positions
        if even:
            jobs.sort(key=lambda job: job.length)
        scheduler = Scheduler(jobs, self.max_batch, PREFILL_TOKENS, waves=True, even=even)
        session = Session(requests, scheduler, self.device, self.version, self.decode, on_token)
        while scheduler.unfinished:
            self._wave(scheduler, session)
        return session.completions()

    def _wave(self, scheduler: Scheduler, session: Session) -> None:
        """Start as many as there is room for, and go on until the last has finished."""
        admissions = scheduler.admit()
        mask, cache, logits = self._prefill(admissions)
        session.enter(admissions, 0, logits)
        mask = follow(session, mask, cache)
        while size := len(scheduler.running):
            mask = torch.cat((mask, mask.new_ones(size, 1)), dim=1)
            batch = session.batch
            output = self._forward(batch.token[:size, None], mask, batch.length[:size, None], cache)
            session.advance(output.logits[:, -1])
            mask = follow(session, mask, cache)

    def _prefill(self, admissions: Sequence[Admission]) -> tuple[Tensor, Any, Tensor]:
        """Mask, cache and logits with one row for each sample, from one pass over the prompts."""
        prompts = [list(admission.job.request.prompt_ids) for admission in admissions]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        output = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        cache = output.get("past_key_values")
        if not hasattr(cache, "reorder_cache"):
            raise UserError(f"{type(self.hf).__name__} keeps no key/value cache to rearrange: choose another model")
        counts = torch.tensor([len(admission.samples) for admission in admissions], device=self.device)
        owners = torch.repeat_interleave(counts)
        cache.reorder_cache(owners)
        return mask[owners], cache, output.logits[:, -1][owners]

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
    for name, weight in model.named_parameters():
        weight.grad = gradients[name]
    for weight in copied.parameters():
        weight.requires_grad_(False)
        if dtype is not None and weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return copied


def follow(session: Session, mask: Tensor, cache: Any) -> Tensor:
    """Hand over what has finished; mask and cache keep the rows of those who remain, in the scheduler's order."""
    before = mask.shape[0]
    order = list(range(before))
    for source, destination in session.collect():
        order[destination] = source
    size = len(session.scheduler.running)
    if size in (0, before):
        return mask
    rows = torch.tensor(order[:size], device=mask.device)
    cache.reorder_cache(rows)
    return mask[rows]
