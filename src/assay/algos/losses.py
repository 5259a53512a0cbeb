"""Whose probabilities are compared, and over what: ratios of whole sequences, and engine against trainer.

Sequences lie one after the other in the packed tensors [N]; `lengths` are the trained tokens of each. All of them have
to be there in whole, so whatever uses these functions is never asked about a slice of a micro-batch.

Policy losses, one value a token, on packed 1-D tensors [N] that hold trained tokens only.

`behaviour_logprobs` belong to the policy that sampled: the engine's own, or the trainer's recomputation before its
first update. Each function returns the losses and a dict of per-token statistics; their mean over tokens is logged as
`policy/<name>`. With `ratio = "sequence"` they are handed log-probabilities whose ratio is that of whole sequences.

Tokens whose log-probability and advantage covary most, which reduce the entropy most (arXiv 2505.22617).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from assay.algos.batch import LossBatch, k3
from assay.algos.component import Component, Needs, RunFacts, TokenInput, TokenRow, check_order
from assay.config.algorithm import CovarianceConfig, ImportanceConfig

MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range, and float32 overflows at 88


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """pi(token) / mu(token), the log-ratio held within +-20 so that one absurd token cannot make the loss infinite."""
    return (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def over_sequences(values: Tensor, lengths: Sequence[int], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """One value a sequence, at each of its tokens. In a fixed order, so that it is the same in every run."""
    assert sum(lengths) == len(values), "sequences must be whole"
    parts = [reduce(part).expand(len(part)) for part in values.split(list(lengths)) if len(part)]
    return torch.cat(parts) if parts else values


def sequence_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, lengths: Sequence[int]) -> Tensor:
    """Log-probabilities whose ratio to `behaviour_logprobs` is the geometric mean over the token's sequence (GSPO).

    Each has the gradient of its own token's (GSPO-token). Summed over a sequence with one advantage and one weight,
    that is the gradient of GSPO itself, and with an advantage of its own for each turn it still makes sense.
    """
    log_ratio = over_sequences((logprobs - behaviour_logprobs).detach(), lengths, torch.mean)
    return behaviour_logprobs + log_ratio + (logprobs - logprobs.detach())


def correction(
    mode: str, trainer_logprobs: Tensor, engine_logprobs: Tensor, low: float, high: float, lengths: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """(weight, whether it was held back) of each token: how likely the trainer found it when the engine sampled it.

    - "token_*": the ratio of each token; "sequence_*": of the whole sequence, the product of its tokens'.
    - "*_truncate": held within [low, high], min(ratio, high) with low = 0; "*_mask": 0 outside of it.
    """
    log_ratio = (trainer_logprobs - engine_logprobs).detach()
    if mode.startswith("sequence"):
        assert lengths is not None, "a correction by sequences has to know them"
        log_ratio = over_sequences(log_ratio, lengths, torch.sum)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio < low) | (ratio > high)
    held = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
    return held, outside


class ImportanceCorrection(Component):
    """Weights tokens by how much likelier the trainer finds them than the engine that sampled them."""

    def __init__(self, settings: ImportanceConfig) -> None:
        self.settings = settings

    @property
    def needs(self) -> Needs:
        mode = self.settings.correction
        return Needs(
            trainer_logprobs=self.settings.recompute_logprobs or mode is not None,
            whole_sequences=mode is not None and mode.startswith("sequence"),
        )

    def check(self) -> None:
        check_order("correction_low", self.settings.correction_low, "correction_high", self.settings.correction_high)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.correction is None:
            yield "algo.correction is not set", ["algo.correction_low", "algo.correction_high"]

    def apply(self, losses_N: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mode = self.settings.correction
        if mode is None:
            return losses_N, {}
        assert batch.engine_logprobs is not None, "needs.trainer_logprobs"
        bounds = self.settings.correction_low, self.settings.correction_high
        weight, held = correction(mode, batch.behaviour_logprobs, batch.engine_logprobs, *bounds, batch.lengths)
        return weight * losses_N, {"mismatch/weight": weight, "mismatch/held_fraction": held}


PolicyLoss = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, dict[str, Tensor]]]


def reinforce(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-advantage * log pi: the textbook gradient. It assumes samples of the current policy: no ratio, no clip."""
    return -advantages * logprobs, {}


def ppo_clip(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A). Infinite bounds leave a plain importance ratio.

    A token counts as clipped when the clipped branch is the smaller one, i.e. when it gets no gradient.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    stats = {"clip_fraction": too_low | too_high, "clip_low_fraction": too_low, "clip_high_fraction": too_high}
    return loss, stats


def dual_clip(losses: Tensor, advantages: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Losses of `ppo_clip` with the ratio limited where the advantage is negative, and which tokens that concerns.

    There the clip bounds the ratio from below only, and one token that has become far more likely outweighs all others
    (Ye et al. 2020, arXiv 1912.09729). A limited token has no gradient.
    """
    largest = -limit * advantages
    limited = (advantages < 0) & (losses > largest)
    return torch.where(limited, largest, losses), limited


def cispo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-weight * A * log pi, the weight being the clipped ratio without its gradient: every token keeps a gradient.

    A token counts as clipped when its weight is not its ratio, whatever the sign of its advantage.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    too_low, too_high = ratio < 1 - clip_low, ratio > 1 + clip_high
    stats = {"clip_fraction": too_low | too_high, "clip_low_fraction": too_low, "clip_high_fraction": too_high}
    return -weight * advantages * logprobs, stats


LOSSES: dict[str, PolicyLoss] = {"reinforce": reinforce, "ppo_clip": ppo_clip, "cispo": cispo}
ON_POLICY = ("reinforce",)  # without a ratio: they take every sample for one of the current policy


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
