"""The built-in loss terms: policy gradient, KL divergence from the reference model, entropy bonus.

Tensors are packed and 1-D [N]: the trained tokens of whole sequences, one sequence after the other. `lengths` holds the
number of trained tokens per sequence.

`behaviour_logprobs` come from the policy that sampled: the engine's, or the trainer's recomputation before the first
update. A policy loss returns one loss per token and a dict of per-token statistics, whose means are logged as
`policy/<name>`. With `ratio = "sequence"` it receives log-probabilities whose ratio is the ratio of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from assay.algos.component import (
    KL,
    Component,
    Loader,
    LossBatch,
    LossTerm,
    Needs,
    RunFacts,
    TermOutput,
    TokenInput,
    TokenRow,
    call_user_code,
    check_order,
    check_per_token,
    find_function,
    k3,
)
from assay.config import AlgoConfig
from assay.config.algorithm import CovarianceConfig, EntropyConfig, ImportanceConfig, ReferenceKLConfig
from assay.types import Group, UserError

MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range, and float32 overflows at 88


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """policy / behaviour probability per token. The log-ratio is limited to +-20, so that the loss stays finite."""
    return (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def over_sequences(values: Tensor, lengths: Sequence[int], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce each sequence to one value and expand it to its tokens. The order is fixed, hence deterministic."""
    assert sum(lengths) == len(values), "sequences must be whole"
    parts = [reduce(part).expand(len(part)) for part in values.split(list(lengths)) if len(part)]
    return torch.cat(parts) if parts else values


def sequence_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, lengths: Sequence[int]) -> Tensor:
    """Log-probabilities whose ratio to `behaviour_logprobs` is the geometric mean over the sequence (GSPO).

    Gradients flow through the token's own log-probability (GSPO-token). For one advantage and one weight per sequence
    their sum is the gradient of GSPO; it is also defined for advantages that differ between turns.
    """
    log_ratio = over_sequences((logprobs - behaviour_logprobs).detach(), lengths, torch.mean)
    return behaviour_logprobs + log_ratio + (logprobs - logprobs.detach())


class ImportanceCorrection(Component[ImportanceConfig]):
    """Weights tokens by the ratio of trainer and engine probability.

    - "token_*": ratio per token; "sequence_*": ratio of the whole sequence, the product over its tokens.
    - "*_truncate" (TIS): clamped to the bounds; "*_mask" (MIS): 0 outside of them.
    """

    @property
    def needs(self) -> Needs:
        mode = self.settings.correction
        return Needs(
            trainer_logprobs=self.settings.recompute_logprobs or mode is not None,
            whole_sequences=mode is not None and mode.startswith("sequence"),
        )

    def check(self) -> None:
        check_order(self.settings, "correction_low", "correction_high")

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.correction is None:
            yield "algo.correction is not set", ["algo.correction_low", "algo.correction_high"]

    def apply(self, losses_N: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mode, low, high = self.settings.correction, self.settings.correction_low, self.settings.correction_high
        if mode is None:
            return losses_N, {}
        assert batch.engine_logprobs is not None, "needs.trainer_logprobs"
        log_ratio = (batch.behaviour_logprobs - batch.engine_logprobs).detach()
        if mode.startswith("sequence"):
            assert batch.lengths is not None, "needs.whole_sequences"
            log_ratio = over_sequences(log_ratio, batch.lengths, torch.sum)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = (ratio < low) | (ratio > high)
        weight = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
        return weight * losses_N, {"mismatch/weight": weight, "mismatch/held_fraction": outside}


PolicyLoss = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, dict[str, Tensor]]]


def reinforce(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-advantage * logprob: the policy gradient for samples of the current policy, without ratio and clipping."""
    return -advantages * logprobs, {}


def clip_fractions(too_low: Tensor, too_high: Tensor) -> dict[str, Tensor]:
    return {"clip_fraction": too_low | too_high, "clip_low_fraction": too_low, "clip_high_fraction": too_high}


def ppo_clip(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A). With infinite bounds the ratio is not clipped.

    A token counts as clipped if it has no gradient, i.e. if the clipped branch is the minimum.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    return loss, clip_fractions(too_low, too_high)


def dual_clip(losses: Tensor, advantages: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Losses of `ppo_clip` with an upper limit of the ratio for negative advantages, and a mask of the limited tokens.

    For negative advantages PPO's clip bounds the ratio from below only, so a token that has become much more likely
    would dominate (Ye et al. 2020, arXiv 1912.09729). A limited token has no gradient.
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
    return -weight * advantages * logprobs, clip_fractions(ratio < 1 - clip_low, ratio > 1 + clip_high)


LOSSES: dict[str, PolicyLoss] = {"reinforce": reinforce, "ppo_clip": ppo_clip, "cispo": cispo}
ON_POLICY = ("reinforce",)  # losses without a ratio, which assume samples of the current policy


MASK = "cov_mask"


class CovarianceControl(Component[CovarianceConfig]):
    """Applies a KL penalty to the selected tokens of an optimizer step (kl_cov), or masks their loss (clip_cov).

    Tokens are selected by their contribution to the covariance of log-probability and advantage (arXiv 2505.22617).
    """

    @property
    def needs(self) -> Needs:
        return Needs(every_rollout=self.settings.cov is not None)

    @property
    def inputs(self) -> Sequence[TokenInput]:
        return [] if self.settings.cov is None else [TokenInput(MASK, from_rows=self.select)]

    def check(self) -> None:
        check_order(self.settings, "cov_low", "cov_high")

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.cov is None:
            yield "algo.cov is not set", [f"algo.cov_{name}" for name in ("fraction", "coef", "low", "high")]
        if self.settings.cov == "kl_cov" and run.updates == 1 and not run.stale_ratios:
            yield "with one update per batch all ratios are 1 (try algo.updates = 4)", ["algo.cov"]

    def select(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """1 for each selected token of an optimizer step, else 0: a fraction of all tokens, at least one.

        "kl_cov" selects those with the largest covariance. "clip_cov" draws from those with a covariance within the
        bounds; the draw depends on the number of tokens, not on their order, so that a resumed run repeats it.
        """
        settings = self.settings
        logprobs = torch.tensor([*chain.from_iterable(row.sampled_logprobs for row in rows)], dtype=torch.float64)
        advantages = torch.tensor([*chain.from_iterable(row.token_advantages for row in rows)], dtype=torch.float64)
        covariances = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
        total, count = len(logprobs), max(int(settings.cov_fraction * len(logprobs)), 1)
        if settings.cov == "kl_cov":
            selected = covariances.topk(min(count, total)).indices
        else:
            within = ((covariances >= settings.cov_low) & (covariances <= settings.cov_high)).nonzero().squeeze(1)
            within = within[covariances[within].argsort()]
            selected = within[torch.randperm(len(within), generator=torch.Generator().manual_seed(total))[:count]]
        mask = torch.zeros_like(covariances)
        mask[selected] = 1.0
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


MAX_COEF = 1.0  # upper limit of an adaptive entropy coefficient


class PolicyGradient(LossTerm[AlgoConfig]):
    name, section = "policy", AlgoConfig

    def __init__(self, settings: AlgoConfig, load: Loader) -> None:
        super().__init__(settings, load)
        self.function = find_function("policy_loss", settings.policy_loss, LOSSES, load)
        self.modifiers = self.parts = ImportanceCorrection(settings), CovarianceControl(settings)

    @property
    def needs(self) -> Needs:
        return Needs(
            whole_sequences=self.settings.ratio == "sequence",
            every_rollout=self.settings.policy_loss not in LOSSES,  # a user-defined loss may not vanish at advantage 0
        )

    def check(self) -> None:
        if 0 < self.settings.dual_clip <= 1:
            raise UserError(f"algo.dual_clip = {self.settings.dual_clip} must be above 1, e.g. 3, or 0 for none.")

    def check_replay(self) -> None:
        self._check_ratio("so groups of earlier steps cannot be replayed: set")

    def check_staleness(self) -> None:
        self._check_ratio("so groups of earlier weights cannot be trained on: set source.max_staleness = 0,")

    def _check_ratio(self, consequence: str) -> None:
        settings = self.settings
        if settings.correction is not None or not (settings.recompute_logprobs or settings.policy_loss in ON_POLICY):
            return
        why = (
            "algo.recompute_logprobs discards the log-probabilities of the policy that sampled"
            if settings.recompute_logprobs
            else f"algo.policy_loss = {settings.policy_loss!r} has no importance ratio"
        )
        raise UserError(
            f"{why}, {consequence} algo.correction = 'token_truncate', or algo.policy_loss = 'ppo_clip' without "
            "algo.recompute_logprobs"
        )

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.policy_loss != "ppo_clip":
            yield "algo.policy_loss is not ppo_clip", ["algo.dual_clip"]

    def warnings(self, run: RunFacts) -> Iterator[str]:
        if run.updates > 1 and self.settings.policy_loss in ON_POLICY:
            yield (
                f"algo.policy_loss = {self.settings.policy_loss!r} has no importance ratio: all but the first of "
                f"{run.updates} updates per step train on answers of an earlier policy without correction. "
                "Set algo.updates = 1, algo.minibatch_size = 0 and train.passes = 1, or algo.policy_loss = 'ppo_clip'"
            )

    def per_token(self, batch: LossBatch) -> TermOutput:
        settings, logprobs, behaviour = self.settings, batch.logprobs, batch.behaviour_logprobs
        if settings.ratio == "sequence":
            assert batch.lengths is not None, "needs.whole_sequences"
            logprobs = sequence_logprobs(logprobs, behaviour, batch.lengths)
        args = logprobs, behaviour, batch.advantages, settings.clip_low, settings.clip_high
        given = call_user_code("the loss function", self.function, *args)
        losses_N, stats = _checked(given, len(batch.logprobs))
        means = {f"policy/{name}": values for name, values in stats.items()}
        if settings.dual_clip and settings.policy_loss == "ppo_clip":
            losses_N, means["policy/dual_clip_fraction"] = dual_clip(losses_N, batch.advantages, settings.dual_clip)
        for modifier in self.modifiers:
            losses_N, more = modifier.apply(losses_N, batch)
            means |= more
        ratio = importance_ratio(logprobs.detach(), behaviour)
        return TermOutput(losses_N, means | {"policy/ratio_mean": ratio}, {"policy/ratio_max": ratio})


def _checked(given: Any, tokens: int) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Losses and statistics of a loss function, possibly user-defined, after checking their form."""
    if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise UserError(
            f"the loss function returned {type(given).__name__}: return losses and statistics ({{}} for none)."
        )
    losses, stats = given
    for name, values in {"": losses, **stats}.items():
        check_per_token("the loss function", name, values, tokens)
    return losses, stats


class ReferenceKL(LossTerm[ReferenceKLConfig]):
    name, section = "kl", ReferenceKLConfig

    @property
    def active(self) -> bool:
        return self.settings.kl_coef > 0

    @property
    def coef(self) -> float:
        return self.settings.kl_coef

    @property
    def needs(self) -> Needs:
        return Needs(ref_logprobs_in_loss=True, every_rollout=True)

    def check(self) -> None:
        if self.settings.kl is None:
            raise UserError(
                f'algo.kl_coef = {self.settings.kl_coef} needs an estimator: set algo.kl = "k3" or "k2" '
                "(or algo.reward_kl_coef instead, for a KL in the reward)."
            )

    def per_token(self, batch: LossBatch) -> TermOutput:
        assert self.settings.kl is not None and batch.ref_logprobs is not None, "needs.ref_logprobs_in_loss"
        kl_N = KL[self.settings.kl](batch.logprobs, batch.ref_logprobs)
        return TermOutput(kl_N, {"policy/kl": kl_N})


class EntropyBonus(LossTerm[EntropyConfig]):
    """Always part of the loss, because the entropy is always logged.

    With a target, the coefficient grows while the entropy is at most the target and shrinks above it, where it is not
    applied.
    """

    name, section = "entropy", EntropyConfig

    def __init__(self, settings: EntropyConfig, load: Loader) -> None:
        super().__init__(settings, load)
        self.adapted = settings.entropy_coef  # the coefficient for a target
        self.measured: float | None = None  # entropy of the last step

    @property
    def applied(self) -> float:
        """Weight of the bonus."""
        target = self.settings.entropy_target
        if target is None:
            return self.settings.entropy_coef
        return self.adapted if self.measured is None or self.measured <= target else 0.0

    @property
    def coef(self) -> float:
        return -self.applied

    @property
    def needs(self) -> Needs:
        used = self.coef != 0
        return Needs(entropy_gradient=used, every_rollout=used or self.settings.entropy_target is not None)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.entropy_target is None:
            yield "algo.entropy_target is not set", ["algo.entropy_delta"]

    def per_token(self, batch: LossBatch) -> TermOutput:
        if batch.entropy is None:
            assert not self.needs.entropy_gradient, "needs.entropy_gradient"
            return TermOutput(torch.zeros_like(batch.weights))
        return TermOutput(batch.entropy, {"policy/entropy": batch.entropy})

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        target = self.settings.entropy_target
        if target is None or "policy/entropy" not in metrics:
            return {}
        used, self.measured = self.applied, metrics["policy/entropy"]
        change = self.settings.entropy_delta if self.measured <= target else -self.settings.entropy_delta
        self.adapted = min(max(self.adapted + change, 0.0), MAX_COEF)
        return {"policy/entropy_coef": used}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.settings.entropy_target is None else {"coef": self.adapted, "entropy": self.measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adapted, self.measured = state["coef"], state["entropy"]


# In the order of the sum, which is fixed because floating-point addition is not associative.
TERMS: tuple[type[LossTerm[Any]], ...] = (
    PolicyGradient,
    ReferenceKL,
    EntropyBonus,
)
