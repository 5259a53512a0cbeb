"""What trainer and engine expect of a policy network, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class PolicyModel(nn.Module):
    """A causal language model over packed sequences: tokens of all sequences one after the other, no padding."""

    vocab_size: int
    max_length: int

    def hidden(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states [N, D] for packed token ids [N]; `lengths` says where sequences end and sums to N."""
        raise NotImplementedError

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] for hidden states [..., D]."""
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, under its Hugging Face name: what weight sync, fingerprint and export see.

        Where weights are split over ranks they are gathered one by one, so all ranks must go through this together.
        """
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
