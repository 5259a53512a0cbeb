"""The same numbers as TRL, loss by loss, on random batches. Its trainer's methods are asked on a stand-in for it."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.algos import Algorithm, LossBatch, make_algorithm

pytestmark = pytest.mark.peer
LENGTHS, LIMIT = [4, 7, 1, 5, 2, 6], 9


class Tokens:
    """Padded for TRL, packed for us; in double precision."""

    def __init__(self, seed: int, spread: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        shape = len(LENGTHS), max(LENGTHS)
        self.mask = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).double()
        self.behaviour = -2 + 0.7 * normal(*shape)
        self.logprobs = self.behaviour + spread * normal(*shape)
        self.reference = self.behaviour + spread * normal(*shape)
        self.engine = self.behaviour + 0.5 * normal(*shape)
        self.entropy = normal(*shape).abs()
        self.advantages = normal(len(LENGTHS))

    def packed(self, algo: Algorithm, logprobs: Tensor) -> LossBatch:
        counts, at = torch.tensor(LENGTHS), self.mask.bool()
        return LossBatch(
            logprobs=logprobs[at],
            behaviour_logprobs=self.behaviour[at],
            advantages=self.advantages.repeat_interleave(counts),
            weights=algo.token_weights(counts).repeat_interleave(counts),
            entropy=self.entropy[at],
            ref_logprobs=self.reference[at],
            engine_logprobs=self.engine[at],
            lengths=LENGTHS,
        )

    def padded(self) -> dict[str, Tensor]:
        ids = torch.zeros(self.mask.shape, dtype=torch.long)
        return {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.behaviour,
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
        }


def trainer(tokens: Tokens, logprobs: Tensor, **settings: Any) -> SimpleNamespace:
    """As much of a GRPOTrainer as its loss looks at: one process, no accumulation."""
    alone = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x, device="cpu"
    )
    known: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, tokens.entropy, None),
        "accelerator": alone,
        "args": SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            entropy_target=0.2,
            entropy_coef_delta=0.005,
        ),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": LIMIT,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
    }
    return SimpleNamespace(**known | settings)


def theirs(tokens: Tokens, inputs: dict[str, Tensor] | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """Loss and its slope at each token."""
    grpo = pytest.importorskip("trl").GRPOTrainer
    logprobs = tokens.logprobs.clone().requires_grad_()
    loss = grpo._compute_loss(trainer(tokens, logprobs, **settings), None, tokens.padded() | (inputs or {}))
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


def ours(tokens: Tokens, algo: Algorithm) -> tuple[Tensor, Tensor]:
    logprobs = tokens.logprobs.clone().requires_grad_()
    total = algo.loss(tokens.packed(algo, logprobs)).total
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad


# Our recipe with what is changed of it, and TRL's settings for the same.
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "grpo with a KL term": ("grpo", {"kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo's aggregation": ("grpo", {"aggregate": "token"}, {"loss_type": "bnpo"}),
    "gspo": (
        "gspo",
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo, wider": (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, tighter": ("cispo", {"clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SAME)
def test_losses_and_gradients(name: str, seed: int) -> None:
    recipe, changes, settings = SAME[name]
    tokens = Tokens(seed)
    algo = make_algorithm(recipe, max_new_tokens=LIMIT, **changes)
    (loss, slope), (their_loss, their_slope) = ours(tokens, algo), theirs(tokens, **settings)
    assert float(loss) == pytest.approx(float(their_loss), abs=1e-5)
    torch.testing.assert_close(slope, their_slope, atol=1e-5, rtol=0)
    assert slope.abs().max() > 1e-3


def test_rloo_gradient_on_policy() -> None:
    """Their ratio is of a whole answer; with one update a batch it is 1, and its gradient that of the sum. Ours has
    the same up to the constant that we divide by."""
    tokens = Tokens(5, spread=0.0)
    logprobs = tokens.logprobs.clone().requires_grad_()
    old = {"old_logps": (tokens.behaviour * tokens.mask).sum(1)}
    rloo = pytest.importorskip("trl").RLOOTrainer
    rloo._compute_loss(trainer(tokens, logprobs), None, tokens.padded() | old).backward()
    assert logprobs.grad is not None
    _, slope = ours(tokens, make_algorithm("rloo", max_new_tokens=LIMIT))
    torch.testing.assert_close(slope * LIMIT, logprobs.grad, atol=1e-5, rtol=0)
    assert slope.abs().max() > 1e-3
