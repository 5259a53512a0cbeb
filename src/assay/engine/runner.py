"""Runs the network: prompts into cache slots, then one token after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.engine.attention import DecodeAttention, PrefillAttention
from assay.engine.cache import SlotCache
from assay.engine.network import FusedDecoder
from assay.engine.scheduler import Admission


@dataclass(slots=True)
class Prefixes:
    """Computed prompts: what their samples start from."""

    kv: Tensor  # [layers, 2, prompts, kv_heads, longest, head_dim]
    logits: Tensor  # [prompts, vocabulary], of the first new token

    def only(self, index: int, length: int) -> Prefixes:
        """A copy of one of them, so that the others' memory can go."""
        part = slice(index, index + 1)
        return Prefixes(self.kv[:, :, part, :, :length].clone(), self.logits[part].clone())


class Runner:
    def __init__(self, network: FusedDecoder, cache: SlotCache) -> None:
        self.network, self.cache = network, cache
        self.held: Prefixes | None = None  # the prompt whose samples have entered in part

    def drop(self) -> None:
        """Forget everything that was computed."""
        self.held = None
        self.cache.clear()

    def enter(self, admissions: Sequence[Admission], start: int) -> Tensor:
        """Fill the slots from `start` on for newcomers; returns the logits of their first tokens."""
        logits = []
        for prefixes, counts in self._sources(admissions):
            owners = torch.repeat_interleave(torch.tensor(counts, device=self.cache.device))
            self.cache.reserve(start + len(owners), prefixes.kv.shape[4] + 1)
            self.cache.fill(start, prefixes.kv.index_select(2, owners))
            logits.append(prefixes.logits[owners])
            start += len(owners)
        return torch.cat(logits)

    def decode(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Feed the last token of each running sequence; returns the logits of the next."""
        self.cache.reserve(len(tokens), longest + 1)
        attend = DecodeAttention(self.cache, lengths, longest)
        return self.network.unembed(self.network.forward(tokens, lengths, attend))

    def _sources(self, admissions: Sequence[Admission]) -> Iterator[tuple[Prefixes, list[int]]]:
        """Prefixes with the number of samples for each: first the one held, then those computed now."""
        waiting, held, self.held = list(admissions), self.held, None
        if not waiting[0].first:
            assert held is not None
            resumed = waiting.pop(0)
            yield held, [len(resumed.samples)]
            self.held = None if resumed.last else held
        if waiting:
            fresh = self._prefill([admission.job.request.prompt_ids for admission in waiting])
            yield fresh, [len(admission.samples) for admission in waiting]
            if not waiting[-1].last:
                self.held = fresh.only(len(waiting) - 1, waiting[-1].job.length)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> Prefixes:
        device = self.cache.device
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        attend = PrefillAttention(lengths, device)
        hidden = self.network.forward(ids, attend.packed.positions, attend)
        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        return Prefixes(attend.prefixes(), self.network.unembed(hidden[ends]))
