"""What trainer and engine expect of a policy network, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from assay.models.lora import Lora, merged_weights


class PolicyModel(nn.Module):
    """A causal language model over packed sequences: tokens of all sequences one after the other, no padding."""

    vocab_size: int
    max_length: int
    supports_prefix_sharing = False
    lora: Lora | None = None  # adapters, which are then all that is trained

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        """Hidden states [N, D] for packed token ids [N]; `lengths` says where sequences end and sums to N.

        `shared`: with how many tokens of the nearest sequence before it that has 0 here a sequence begins. A model that
        `supports_prefix_sharing` computes these once.
        """
        raise NotImplementedError

    def head(self) -> Tensor | None:
        """The weight [vocabulary, D] that gives logits, where that is all there is to it."""
        return None

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] for hidden states [..., D]."""
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, under its Hugging Face name: what weight sync, fingerprint and export see.

        A tied head is listed once, as the embedding. Adapters are merged into what they adapt. Where weights are split
        over ranks they are gathered one by one, so all ranks must go through this together.
        """
        yield from merged_weights(self.network)

    @property
    def network(self) -> nn.Module:
        """The module in which parameters have their Hugging Face names."""
        return self

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
