"""Runs the network: prompts into cache slots, then one token after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.engine.attention import DecodeAttention, PrefillAttention
from assay.engine.cache import SlotCache
from assay.engine.network import FusedDecoder
from assay.engine.scheduler import Admission


@dataclass(slots=True)
class Prefix:
    """A computed prompt: what its samples start from."""

    kv: Tensor  # [layers, 2, length, kv_heads, head_dim]
    logits: Tensor  # [vocabulary], of the first new token

    def clone(self) -> Prefix:
        """Both fields are views of all prompts computed together; a copy lets the others' memory go."""
        return Prefix(self.kv.clone(), self.logits.clone())


class Runner:
    def __init__(self, network: FusedDecoder, cache: SlotCache) -> None:
        self.network, self.cache = network, cache
        self.held: Prefix | None = None  # the prompt whose samples have entered in part

    def drop(self) -> None:
        """Forget everything that was computed."""
        self.held = None
        self.cache.clear()

    def enter(self, admissions: Sequence[Admission], start: int) -> Tensor:
        """Fill the slots from `start` on for newcomers; returns the logits of their first tokens."""
        prefixes = self._prefixes(admissions)
        counts = [len(admission.samples) for admission in admissions]
        self.cache.reserve(start + sum(counts), max(prefix.kv.shape[2] for prefix in prefixes) + 1)
        for prefix, count in zip(prefixes, counts, strict=True):
            self.cache.fill(start, count, prefix.kv)
            start += count
        # Only the last to come can have samples still waiting.
        self.held = None if admissions[-1].last else prefixes[-1].clone()
        logits = torch.stack([prefix.logits for prefix in prefixes])
        return logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)

    def decode(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Feed the last token of each running sequence; returns the logits of the next."""
        self.cache.reserve(len(tokens), longest + 1)
        attend = DecodeAttention(self.cache, lengths, longest)
        return self.network.unembed(self.network.forward(tokens, lengths, attend))

    def _prefixes(self, admissions: Sequence[Admission]) -> list[Prefix]:
        """One for each admission: the one held, if its job goes on, and the others computed now."""
        fresh = [admission.job.request.prompt_ids for admission in admissions if admission.first]
        computed = self._prefill(fresh) if fresh else []
        if admissions[0].first:
            return computed
        assert self.held is not None
        return [self.held, *computed]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        device = self.cache.device
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        attend = PrefillAttention(lengths, device)
        hidden = self.network.forward(ids, attend.packed.positions, attend)
        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = self.network.unembed(hidden[ends])
        return [Prefix(kv, row) for kv, row in zip(attend.prefixes(), logits, strict=True)]
