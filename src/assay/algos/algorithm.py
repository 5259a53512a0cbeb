"""An algorithm: what to keep, how to give credit, which loss. Plain settings; the trainer only calls the methods."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from assay.algos import filters, reward_kl
from assay.algos.advantages import ADVANTAGES, GROUP_BASELINES, Advantage, group_size_error
from assay.algos.aggregate import AGGREGATES, token_weights
from assay.algos.kl import KL, k3
from assay.algos.losses import LOSSES, ON_POLICY, PolicyLoss, importance_ratio
from assay.algos.sums import Sums
from assay.types import Group, UserError

T = TypeVar("T")
SOFT_OVERLONG = ("soft_overlong_weight", "soft_overlong_buffer")
UNSCALED = ("group_mean", "leave_one_out", "batch_mean", "none")  # advantages that are a reward less a baseline


@dataclass(frozen=True)
class LossBatch:
    """Packed 1-D tensors of equal length: the trained tokens of a micro-batch, and only those."""

    logprobs: Tensor  # of the policy being trained, with gradient
    behaviour_logprobs: Tensor  # of the policy that sampled
    advantages: Tensor
    weights: Tensor  # from token_weights, over the whole global batch
    entropy: Tensor | None = None  # with gradient where there is an entropy bonus
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None  # given where behaviour_logprobs are the trainer's, to measure the mismatch


@dataclass(frozen=True)
class LossOut:
    total: Tensor  # call backward on it; micro-batches accumulate by plain addition
    sums: Sums


@dataclass(frozen=True)
class Algorithm:
    """A recipe's settings. Optional ones default to "off", so that a recipe states only what makes it itself."""

    advantage: str | Advantage  # a name of ADVANTAGES, or a function of one's own
    policy_loss: str | PolicyLoss  # a name of LOSSES, or a function of one's own
    aggregate: str  # token, sequence or constant: see token_weights
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    kl: str | None = None  # k1, k2, k3: estimator of KL(policy || reference) in the loss
    kl_coef: float = 0.0
    reward_kl_coef: float = 0.0  # weight of the divergence from the reference within the reward: see reward_kl
    reward_kl_per: str = "sequence"  # or token: each token answers for what comes after it only
    entropy_coef: float = 0.0
    drop_zero_variance: bool = False  # leave out groups whose samples all got the same reward
    resample: int = 0  # at most so many extra rounds of sampling to refill dropped groups
    mask_overlong: bool = False  # leave rollouts that hit the length limit out of the loss
    soft_overlong_buffer: float = 0.0  # the last part of max_new_tokens where length is punished, as a fraction of it
    soft_overlong_weight: float = 1.0  # the punishment at the limit
    updates: int = 1  # optimizer steps a rollout batch; 1 is strictly on-policy
    max_new_tokens: int = 0  # the run's length limit: needed by constant aggregation and the soft punishment

    def __post_init__(self) -> None:
        _check(self)

    @property
    def needs_reference(self) -> bool:
        """Whether there has to be a reference model."""
        return self.kl_in_loss or self.kl_in_reward

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether `credit` has to be told what the reference says of each token."""
        return self.reward_kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy's gradient (as a metric it is welcome in any case)."""
        return self.entropy_coef != 0

    @property
    def on_policy(self) -> bool:
        """Whether samples of an earlier policy would be taken for the current one's."""
        return self.policy_loss in ON_POLICY

    def check_samples(self, samples: int) -> None:
        """Fail before a run starts, not at its first step, when a group baseline gets one sample a prompt."""
        if samples < 2 and _function(self.advantage, ADVANTAGES) in GROUP_BASELINES:
            raise group_size_error(str(self.advantage))

    def keep(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """(kept, dropped) of freshly judged groups. Rewards are shaped for all, so that dropped ones log theirs too."""
        self._shape_rewards(groups)
        if self.mask_overlong:
            filters.mask_overlong(groups)
        return filters.drop_zero_variance(groups) if self.drop_zero_variance else (list(groups), [])

    def credit(self, groups: list[Group], ref_logprobs: Sequence[Sequence[float]] | None = None) -> None:
        """Set every rollout's reward (its verdict's, shaped) and advantage, compared over all these groups.

        `ref_logprobs`: for each rollout in order, the reference's of each token it wrote, where `kl_in_reward`.
        """
        assert ref_logprobs is not None or not self.kl_in_reward, "reward_kl_coef > 0 needs ref_logprobs"
        ratios = reward_kl.log_ratios(groups, ref_logprobs) if self.kl_in_reward and ref_logprobs is not None else []
        self._shape_rewards(groups)
        if self.kl_in_reward:
            reward_kl.charge(groups, ratios, self.reward_kl_coef)
        self._give_advantages(groups)
        if self.kl_in_reward and self.reward_kl_per == "token":
            reward_kl.give_back_the_past(groups, ratios, self.reward_kl_coef)

    def _give_advantages(self, groups: list[Group]) -> None:
        rewards = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
        advantages = _function(self.advantage, ADVANTAGES)(rewards)
        if len(advantages) != len(rewards):
            raise UserError(
                f"the advantage function gave {len(advantages)} groups for {len(rewards)}: give one for each."
            )
        for group, rewards_G, advantages_G in zip(groups, rewards, advantages, strict=True):
            if advantages_G.shape != rewards_G.shape or not advantages_G.isfinite().all():
                raise UserError(
                    f"the advantage function gave {advantages_G.tolist()} for the rewards {rewards_G.tolist()} of "
                    f"{group.prompt.id}: give one finite number for each."
                )
            for rollout, advantage in zip(group.rollouts, advantages_G.tolist(), strict=True):
                rollout.advantage = advantage

    def token_weights(self, lengths: Tensor) -> Tensor:
        """The weight of each token of each sequence of a global batch (see aggregate.token_weights)."""
        if self.aggregate == "constant" and self.max_new_tokens < 1:
            raise UserError('aggregate="constant" divides by max_new_tokens: set it.')
        return token_weights(lengths, self.aggregate, self.max_new_tokens)

    def loss(self, batch: LossBatch) -> LossOut:
        """Sum over tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy), and what to log."""
        losses_N, stats = _function(self.policy_loss, LOSSES)(
            batch.logprobs, batch.behaviour_logprobs, batch.advantages, self.clip_low, self.clip_high
        )
        if losses_N.shape != batch.logprobs.shape:
            raise UserError(f"the loss function gave shape {tuple(losses_N.shape)} for {len(batch.logprobs)} tokens.")
        terms = {"loss/policy": (batch.weights * losses_N).sum()}
        per_token = {f"policy/{name}": values for name, values in stats.items()}
        if self.kl is not None and batch.ref_logprobs is not None:
            kl_N = KL[self.kl](batch.logprobs, batch.ref_logprobs)
            terms["loss/kl"] = self.kl_coef * (batch.weights * kl_N).sum()
            per_token["policy/kl"] = kl_N
        assert batch.ref_logprobs is not None or not self.kl_in_loss, "kl_coef > 0 needs ref_logprobs"
        if batch.entropy is not None:
            terms["loss/entropy"] = -self.entropy_coef * (batch.weights * batch.entropy).sum()
            per_token["policy/entropy"] = batch.entropy
        assert batch.entropy is not None or not self.needs_entropy, "entropy_coef needs the entropy"
        total = torch.stack(list(terms.values())).sum()
        return LossOut(total, _sums(batch, total, terms, per_token))

    def _shape_rewards(self, groups: list[Group]) -> None:
        for group in groups:
            for rollout in group.rollouts:
                rollout.reward = filters.verdict_reward(rollout)
                if not math.isfinite(rollout.reward):
                    raise UserError(
                        f"the reward of {rollout.prompt.id} (sample {rollout.sample}) is {rollout.reward}: "
                        "a reward function must return a finite number."
                    )
        if self.soft_overlong_buffer > 0:
            if self.max_new_tokens < 1:
                raise UserError("the soft overlong punishment counts back from max_new_tokens: set it.")
            buffer = max(round(self.soft_overlong_buffer * self.max_new_tokens), 1)
            filters.soft_overlong(groups, self.max_new_tokens, buffer, self.soft_overlong_weight)


def _sums(batch: LossBatch, total: Tensor, terms: dict[str, Tensor], per_token: dict[str, Tensor]) -> Sums:
    """What can be added over micro-batches and ranks. The keys depend on the settings only, so empty batches fit too.

    `mismatch/*` compares trainer and engine on the same tokens. Where the behaviour log-probs are the engine's own, the
    trainer's side is the policy as it is now, so it is pure mismatch at the first update after a rollout only.
    """
    with torch.no_grad():
        ratio = importance_ratio(batch.logprobs, batch.behaviour_logprobs)
        if batch.engine_logprobs is None:
            trainer, engine = batch.logprobs, batch.behaviour_logprobs
        else:
            trainer, engine = batch.behaviour_logprobs, batch.engine_logprobs
        difference = (trainer - engine).abs()
        per_token = per_token | {
            "policy/ratio_mean": ratio,
            "mismatch/logprob_abs_diff": difference,
            "mismatch/kl": k3(engine, trainer),  # KL(engine || trainer): the engine is who sampled
        }
        largest = {"policy/ratio_max": ratio, "mismatch/logprob_abs_diff_max": difference}
        return Sums(
            tokens=_precise(torch.ones_like(ratio)).sum(),
            losses={key: _precise(value) for key, value in ({"loss/total": total} | terms).items()},
            per_token={key: _precise(values).sum() for key, values in per_token.items()},
            largest={key: torch.cat([_precise(values), values.new_zeros(1)]).max() for key, values in largest.items()},
        )


def _precise(values: Tensor) -> Tensor:
    """Float64 where the device has it (mps has not), so that counts and long sums stay exact."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


def _function(choice: str | T, named: Mapping[str, T]) -> T:
    return named[choice] if isinstance(choice, str) else choice


def pick(kind: str, name: str, names: Iterable[str]) -> None:
    """A UserError with the nearest valid name, unless `name` is one of them."""
    valid = list(names)
    if name in valid:
        return
    nearest = difflib.get_close_matches(str(name), valid, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise UserError(f"unknown {kind} {name!r}: {hint}There are {', '.join(valid)}.")


def _check(algorithm: Algorithm) -> None:
    for kind, named in (("advantage", ADVANTAGES), ("policy_loss", LOSSES)):
        choice = getattr(algorithm, kind)
        if not callable(choice):
            pick(kind, choice, named)
    pick("aggregate", algorithm.aggregate, AGGREGATES)
    if algorithm.kl is not None:
        pick("kl", algorithm.kl, KL)
    for name in ("clip_low", "clip_high", "kl_coef", "reward_kl_coef", "entropy_coef", *SOFT_OVERLONG):
        value = getattr(algorithm, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise UserError(f"{name} = {value!r} must be a number.")
        if value < 0 and name != "entropy_coef":  # a negative bonus is unusual, but some do push entropy down
            raise UserError(f"{name} = {value} must not be negative.")
    for name, least in (("updates", 1), ("resample", 0), ("max_new_tokens", 0)):
        value = getattr(algorithm, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} = {value!r} must be a whole number of at least {least}.")
    if algorithm.soft_overlong_buffer > 1:
        raise UserError(
            f"soft_overlong_buffer = {algorithm.soft_overlong_buffer} must be a fraction of max_new_tokens, "
            "from 0 to 1."
        )
    if algorithm.kl_coef > 0 and algorithm.kl is None:
        raise UserError(f'kl_coef = {algorithm.kl_coef} needs an estimator: set kl = "k3" or "k2".')
    pick("reward_kl_per", algorithm.reward_kl_per, reward_kl.PER)
    if algorithm.kl_in_reward and algorithm.reward_kl_per == "token" and algorithm.advantage not in UNSCALED:
        raise UserError(
            'reward_kl_per = "token" needs an advantage in the reward\'s own units: '
            f'take {", ".join(UNSCALED)}, or reward_kl_per = "sequence".'
        )
    if algorithm.resample > 0 and not algorithm.drop_zero_variance:
        raise UserError(f"resample = {algorithm.resample} refills dropped groups: set drop_zero_variance = true.")
