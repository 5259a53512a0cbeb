"""How far an engine's log-probabilities are from those that the trainer computes for the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from assay.engine import Request
from assay.models.base import PolicyModel
from assay.models.logprobs import token_logprobs
from assay.types import Completion

SEQUENCES = 64  # looked at, evenly spread over all
TOKENS_AT_ONCE = 16384

Pair = tuple[Sequence[int], Completion]  # prompt ids and what followed


def mismatch(
    model: PolicyModel,
    requests: Sequence[Request],
    completions: Sequence[Sequence[Completion]],
    dtype: torch.dtype,
) -> dict[str, float]:
    """`model` in float32; with bfloat16 it computes under autocast, as the trainer does."""
    pairs = [(request.prompt_ids, c) for request, group in zip(requests, completions, strict=True) for c in group]
    temperature = requests[0].params.temperature or 1.0  # greedy tokens are scored at 1
    differences = torch.cat(
        [
            engine_logprobs(part) - trainer_logprobs(model, part, temperature, dtype).double().cpu()
            for part in parts_of(spread(pairs, SEQUENCES))
        ]
    ).abs()
    return {
        "mismatch_mean_abs": differences.mean().item(),
        "mismatch_max_ratio": math.exp(differences.max().item()),
        "mismatch_tokens": differences.numel(),
    }


def spread(pairs: Sequence[Pair], count: int) -> list[Pair]:
    count = min(count, len(pairs))
    return [pairs[index * len(pairs) // count] for index in range(count)]


def parts_of(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Consecutive ones, few enough tokens together; one that is longer comes alone."""
    part: list[Pair] = []
    size = 0
    for pair in pairs:
        own = len(pair[0]) + len(pair[1].token_ids)
        if part and size + own > TOKENS_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(pair)
        size += own
    if part:
        yield part


def engine_logprobs(part: Sequence[Pair]) -> Tensor:
    return torch.tensor([value for _, completion in part for value in completion.engine_logprobs], dtype=torch.float64)


@torch.no_grad()
def trainer_logprobs(model: PolicyModel, part: Sequence[Pair], temperature: float, dtype: torch.dtype) -> Tensor:
    """Of all completions' tokens, one after the other."""
    device = model.device
    ids = torch.tensor([token for prompt, c in part for token in (*prompt, *c.token_ids)], device=device)
    drawn = [mark for prompt, c in part for mark in ([False] * len(prompt) + [True] * len(c.token_ids))]
    lengths = [len(prompt) + len(c.token_ids) for prompt, c in part]
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        return token_logprobs(model, ids, lengths, torch.tensor(drawn, device=device), temperature)[0]
