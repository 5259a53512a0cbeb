"""Log-probabilities of given tokens, without ever holding logits for more than a slice of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from assay.models.base import PolicyModel
from assay.models.vocab_parallel import VocabularyHead

LOGITS_AT_ONCE = 1 << 25  # numbers; 128 MiB in float32


def token_logprobs(
    model: PolicyModel,
    ids: Tensor,
    lengths: Sequence[int],
    chosen: Tensor,
    temperature: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [M] of the M tokens marked in `chosen` [N], given those before each in its sequence.

    `ids` [N] are packed sequences. The first token of a sequence has nothing before it and must not be chosen.
    """
    hidden = model.hidden(ids, lengths)
    places = chosen.nonzero().squeeze(1)
    before, targets = hidden.index_select(0, places - 1), ids.index_select(0, places)
    head = getattr(model, "lm_head", None)
    if isinstance(head, VocabularyHead):
        return head.scores(before, targets, temperature, logits_at_once)
    size = max(logits_at_once // model.vocab_size, 1)

    def score(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.unembed(part)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        every = torch.log_softmax(logits, dim=-1)
        return every.gather(-1, target[:, None]).squeeze(-1), -(every.exp() * every).sum(-1)

    if len(places) <= size:
        return score(before, targets)
    # Several slices: each is recomputed in the backward pass, so only one slice of logits is alive at a time.
    parts = [
        checkpoint(score, part, target, use_reentrant=False)
        for part, target in zip(before.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
