"""How much each token counts.

Weights are computed once for a whole global batch, before it is split into micro-batches or over ranks, and losses are
then only ever summed: so the loss cannot depend on the split.
"""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATES = ("token", "sequence", "constant")


def token_weights(lengths: Tensor, mode: str, constant_length: int = 0) -> Tensor:
    """The weight of each token of sequence i, so that the batch's loss is sum_i w_i * sum_t loss_it. Float64 [B].

    `lengths` are the numbers of trained tokens, 0 for a masked sequence.

    - "token": every token counts the same, 1 / (all tokens).
    - "sequence": the mean over sequences of their token means. Masked sequences are not counted: masking one acts as if
      it had not been sampled, as it does in "token".
    - "constant": 1 / (B * constant_length), whatever the lengths. Here masked sequences are counted: the divisor is
      fixed by design, so masking one must not make the others louder.
    """
    lengths_B = lengths.to(torch.float64)
    if mode == "token":
        # A batch without tokens has no loss: the clamp avoids 0/0, and no weight is ever used.
        return torch.full_like(lengths_B, 1.0) / lengths_B.sum().clamp(min=1)
    if mode == "sequence":
        trained = lengths_B > 0
        return torch.where(trained, 1.0 / (trained.sum().clamp(min=1) * lengths_B.clamp(min=1)), 0.0)
    if mode == "constant":
        assert constant_length > 0, "constant aggregation needs the length to divide by"
        return torch.full_like(lengths_B, 1.0 / (max(len(lengths_B), 1) * constant_length))
    raise ValueError(f"unknown aggregation {mode!r}: choose one of {', '.join(AGGREGATES)}")
