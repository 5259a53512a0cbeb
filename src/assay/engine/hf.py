"""Generation with any causal language model of transformers: its forward pass and cache, our sampler and stopping.

Prompts of one batch are padded on the left, so that the last column holds the next token of every sequence; a mask and
explicit positions exclude the padding. For models without `position_ids`, a batch has prompts of one length only.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import ALL_CAPABILITIES, EngineInfo, EngineOptions, TokenScores, WeightSource, copy_weights
from assay.engine.completions import OutputProcessor
from assay.engine.in_process import LocalEngine
from assay.engine.sampler import Rows, StepOutput, joined_scores, score_type, target_logprobs, token_scores
from assay.engine.sequence import Column, Sample, assign_slot, close_gaps
from assay.models.base import PolicyModel
from assay.types import UserError

PREFILL_TOKENS = 8192  # maximum number of prompt tokens per batch
SCORE_LOGITS = 1 << 28  # maximum number of logits at once in `score`


class HFEngine(LocalEngine):
    """Serves requests in static batches: samples start together, and the batch ends when its last sample finishes."""

    def __init__(self, model: PolicyModel, **options: Any) -> None:
        """`model.hf`: the transformers model. `options`: fields of `EngineOptions`."""
        super().__init__()
        opts = EngineOptions(**options)
        self.device = torch.device(opts.device)
        self.model = own_copy(model, self.device, opts.dtype)
        self.hf: Any = self.model.hf
        max_length = min(model.max_length, opts.max_length or model.max_length)
        able = replace(ALL_CAPABILITIES, inflight_updates=False)
        self.info = EngineInfo(0, max_length, opts.max_batch, opts.dtype, able, model.vocab_size, self.device)
        accepted = inspect.signature(self.hf.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.kept: dict[int, list[int]] = {}
        self.next_handle = count(1)
        self.outputs = OutputProcessor(opts.max_batch, opts.decode, self._keep, score_type(opts.dtype))
        self.waiting: deque[Sample] = deque()
        self.batch: StaticBatch | None = None

    @property
    def unfinished(self) -> bool:
        return self.batch is not None or bool(self.waiting)

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.weights()

    def _update_weights(self, source: WeightSource, version: int) -> None:
        if self.unfinished or self.incoming:
            raise UserError("the hf engine cannot update weights while requests are running: finish or abort them")
        copy_weights(dict(self.model.weights()), source.weights())
        self.info = replace(self.info, version=version)
        self.outputs.versions.current = version

    def _logits(self, sequence: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits for all tokens but the first, and these tokens; parts of a long sequence in several passes."""
        ids = torch.tensor([list(sequence)], device=self.device)
        size = max(SCORE_LOGITS // self.info.vocab_size, 1)
        cache: dict[str, Any] = {"use_cache": True} if len(sequence) - 1 > size else {}
        for start in range(0, len(sequence) - 1, size):
            output = self.hf(input_ids=ids[:, start : start + size], return_dict=True, **cache)
            targets = ids[0, start + 1 : start + size + 1]
            yield output.logits[0, : len(targets)], targets
            if cache:
                cache["past_key_values"] = output.past_key_values

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return [
            [value for part in self._logits(ids) for value in target_logprobs(*part, temperature).tolist()]
            for ids in sequences
        ]

    def _top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float
    ) -> list[TokenScores]:
        scores = [
            joined_scores(token_scores(*part, count, temperature) for part in self._logits(ids)) for ids in sequences
        ]
        return [score.part(start - 1) for score, start in zip(scores, starts, strict=True)]

    def _abort(self, ids: Sequence[int | tuple[int, int]]) -> None:
        self._accept()
        super()._abort(ids)

    def _release(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.kept.pop(handle, None)

    def _remove(self, samples: Sequence[Sample]) -> None:
        self.waiting = deque(sample for sample in self.waiting if not sample.done)
        if self.batch is not None and (running := [sample for sample in samples if sample.row >= 0]):
            self._shrink(running)

    def drop_requests(self) -> None:
        self._release_unreported()
        self.kept.update(self._continued())
        self.incoming.clear()
        self.waiting.clear()
        self.batch = None
        self.outputs.clear(0)

    def _close(self) -> None:
        self.drop_requests()
        self.kept.clear()

    def _admit(self) -> bool:
        self._accept()
        return self.unfinished

    def _accept(self) -> None:
        jobs = []
        while self.incoming:
            request_id, request = self.incoming.popleft()
            if (job := self._new_job(request_id, request)) is not None:
                jobs.append(job)
                if request.continues is not None:
                    del self.kept[request.continues]
        if not self.takes_positions:
            jobs.sort(key=lambda job: len(job.tokens))
        self.waiting.extend(sample for job in jobs for sample in job.samples)

    def _kept_tokens(self, handle: int) -> Sequence[int] | None:
        return self.kept.get(handle)

    def _keep(self, sample: Sample, tokens: list[int]) -> int:
        """Keep the tokens only: a continuation computes them again."""
        handle = next(self.next_handle)
        self.kept[handle] = tokens
        return handle

    def _iterate(self) -> None:
        """Sample one token for every sample of the batch; start the next batch if there is none."""
        if self.batch is None:
            self.outputs.start(0)
            self.batch = StaticBatch(self, self._next())
        output = self.batch.step()
        ended = self.outputs.process(output, self.batch.running)
        self._shrink([sample for sample, _ in ended])
        self._drop_failed(ended)

    def _shrink(self, samples: Sequence[Sample]) -> None:
        assert self.batch is not None
        self.batch.remove(samples)
        if not self.batch.running:
            self.batch = None

    def _next(self) -> list[Sample]:
        """The samples of the next batch: at least one, up to the limits of rows and prompt tokens."""
        samples: list[Sample] = []
        tokens = 0
        while self.waiting and len(samples) < self.info.max_batch:
            job = self.waiting[0].job
            if samples and samples[-1].job is not job:
                tokens += len(samples[-1].job.tokens)
                uneven = not self.takes_positions and len(job.tokens) != len(samples[0].job.tokens)
                if uneven or tokens + len(job.tokens) > PREFILL_TOKENS:
                    break
            samples.append(self.waiting.popleft())
        return samples

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        extra = {**self.last_only, **({"position_ids": positions} if self.takes_positions else {})}
        return self.hf(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True, **extra
        )


def own_copy(model: PolicyModel, device: torch.device, dtype: torch.dtype) -> Any:
    """Return an independent copy. Only weights are cast: buffers such as rotary frequencies keep their dtype."""
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = None  # gradients are not copied
    copied = copy.deepcopy(model).to(device).eval()
    copied.drop_lora()  # weight updates contain merged weights
    copied.dequantize()
    for name, weight in model.named_parameters():
        weight.grad = gradients[name]
    for weight in copied.parameters():
        weight.requires_grad_(False)
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return copied


class StaticBatch:
    """A static batch: samples that start together, and its KV cache."""

    def __init__(self, engine: HFEngine, samples: list[Sample]) -> None:
        self.engine = engine
        self.steps = 0
        self.running: list[Sample] = []
        for sample in samples:
            assign_slot(sample, self.running, self.steps)
        self.rows = Rows(len(samples), 0, engine.device, engine.info.dtype)
        self.rows.enter(samples)
        self.mask = torch.empty(0)  # [rows, tokens]: 0 for padding
        self.cache: Any = None

    def step(self) -> StepOutput:
        """Sample a token for each row."""
        logits = self._prefill() if self.cache is None else self._forward()
        self.rows.update_modes(self.running)
        self.rows.draw(logits)
        output = self.rows.read(list(self.running), self.steps, 1)
        self.steps += 1
        return output

    def _forward(self) -> Tensor:
        size = len(self.running)
        self.mask = torch.cat((self.mask, self.mask.new_ones(size, 1)), dim=1)
        token, position = (self.rows.column(column, size)[:, None] for column in (Column.TOKEN, Column.POSITION))
        return self.engine._forward(token, self.mask, position, self.cache).logits[:, -1]

    def _prefill(self) -> Tensor:
        """Logits [samples, vocabulary] after one pass over the prompts."""
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
            raise UserError(f"{kind} has no key/value cache that can be reordered: choose another model")
        indices = {id(job): index for index, job in enumerate(jobs)}
        row_jobs = torch.tensor([indices[id(sample.job)] for sample in self.running], device=device)
        self.cache.reorder_cache(row_jobs)
        self.mask = mask[row_jobs]
        return output.logits[:, -1][row_jobs]

    def remove(self, samples: Sequence[Sample]) -> None:
        """Remove samples, and their rows of the mask and the cache."""
        before = len(self.running)
        moves = close_gaps(self.running, samples, self.steps)
        self.rows.move(moves, len(self.running), before)
        order = list(range(before))
        for source, destination in moves:
            order[destination] = source
        if self.running and samples and self.cache is not None:
            kept = torch.tensor(order[: len(self.running)], device=self.mask.device)
            self.cache.reorder_cache(kept)
            self.mask = self.mask[kept]
