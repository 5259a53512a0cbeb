"""Log-probabilities of transformers, in any precision: the reference for engines that round differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

Scores = Callable[[Sequence[int], float], Tensor]


def hf_scores(folder: Path, dtype: torch.dtype) -> Scores:
    """A function of token ids and a temperature: log-probabilities of all tokens but the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def scores(ids: Sequence[int], temperature: float) -> Tensor:
        tokens = torch.tensor([list(ids)])
        rows = (model(tokens).logits[0, :-1].double() / temperature).log_softmax(-1)
        return rows.gather(1, tokens[0, 1:, None])[:, 0]

    return scores
