"""Tokens whose log-probability and advantage covary most, which reduce the entropy most (arXiv 2505.22617)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from assay.algos.batch import LossBatch
from assay.algos.component import Component, Needs, RunFacts, TokenInput, TokenRow, check_order
from assay.algos.kl import k3
from assay.config.algorithm import CovarianceConfig

MASK = "cov_mask"


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """What each token adds to the covariance of log-probability and advantage."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def kl_cov(logprobs: Tensor, advantages: Tensor, fraction: float, low: float, high: float) -> Tensor:
    """The `fraction` of tokens (at least one) with the largest covariance, as a mask. The bounds are Clip-Cov's."""
    mask = torch.zeros(len(logprobs), dtype=torch.bool)
    if len(logprobs):
        count = max(int(fraction * len(logprobs)), 1)
        mask[covariances(logprobs, advantages).topk(count).indices] = True
    return mask


def clip_cov(logprobs: Tensor, advantages: Tensor, fraction: float, low: float, high: float) -> Tensor:
    """A `fraction` of all tokens (at least one), drawn from those with a covariance within [low, high], as a mask.

    The draw depends on the number of tokens, not on their order: a resumed run repeats it.
    """
    mask = torch.zeros(len(logprobs), dtype=torch.bool)
    found = covariances(logprobs, advantages) if len(logprobs) else logprobs
    within = ((found >= low) & (found <= high)).nonzero().squeeze(1)
    within = within[found[within].argsort()]
    order = torch.randperm(len(within), generator=torch.Generator().manual_seed(len(logprobs)))
    mask[within[order[: max(int(fraction * len(logprobs)), 1)]]] = True
    return mask


SELECTIONS = {"kl_cov": kl_cov, "clip_cov": clip_cov}


class CovarianceControl(Component):
    """Restrains the selected tokens of an optimizer step: by a KL penalty, or by masking their loss."""

    def __init__(self, settings: CovarianceConfig) -> None:
        self.settings = settings

    @property
    def needs(self) -> Needs:
        return Needs(every_rollout=self.settings.cov is not None)

    @property
    def inputs(self) -> Sequence[TokenInput]:
        return [] if self.settings.cov is None else [TokenInput(MASK, from_rows=self.select)]

    def check(self) -> None:
        check_order("cov_low", self.settings.cov_low, "cov_high", self.settings.cov_high)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.cov is None:
            yield "algo.cov is not set", [f"algo.cov_{name}" for name in ("fraction", "coef", "low", "high")]
        if self.settings.cov == "kl_cov" and run.updates == 1 and not run.replay:
            yield (
                "each batch is learnt from in one update, before which the policy has not moved (algo.updates = 4)",
                ["algo.cov"],
            )

    def select(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """1 for each selected token of an optimizer step, else 0."""
        assert self.settings.cov is not None
        logprobs = torch.tensor([*chain.from_iterable(row.sampled_logprobs for row in rows)], dtype=torch.float64)
        advantages = torch.tensor([*chain.from_iterable(row.token_advantages for row in rows)], dtype=torch.float64)
        bounds = self.settings.cov_fraction, self.settings.cov_low, self.settings.cov_high
        mask = SELECTIONS[self.settings.cov](logprobs, advantages, *bounds).double()
        return [part.tolist() for part in mask.split([len(row.token_advantages) for row in rows])]

    def apply(self, losses_N: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if self.settings.cov is None:
            return losses_N, {}
        mask = batch.inputs[MASK].bool()
        if self.settings.cov == "kl_cov":
            moved = k3(batch.behaviour_logprobs, batch.logprobs)  # KL(sampler || policy): smooth where both are equal
            losses_N = losses_N + self.settings.cov_coef * moved.masked_fill(~mask, 0.0)
        else:
            losses_N = losses_N.masked_fill(mask, 0.0)
        return losses_N, {"policy/marked_fraction": mask}
