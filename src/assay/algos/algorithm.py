"""An algorithm: what to keep, how to give credit, which loss. Plain settings; the trainer only calls the methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor

from assay.algos import filters, reward_kl
from assay.algos.advantages import ADVANTAGES, BY_TOKEN, GROUP_BASELINES, POOLED, Advantage, group_size_error
from assay.algos.aggregate import token_weights
from assay.algos.batch import LossBatch, LossOut, sums_of
from assay.algos.checks import check
from assay.algos.entropy import MARKS
from assay.algos.importance import correction, importance_ratio, sequence_logprobs
from assay.algos.kl import KL, k3
from assay.algos.losses import LOSSES, ON_POLICY, PolicyLoss, dual_clip
from assay.algos.returns import any_masked, credited_returns, credited_tokens, give_advantages
from assay.types import Group, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Algorithm:
    """A recipe's settings. Optional ones default to "off", so that a recipe states only what makes it itself."""

    advantage: str | Advantage  # a name of ADVANTAGES, or a function of one's own
    policy_loss: str | PolicyLoss  # a name of LOSSES, or a function of one's own
    aggregate: str  # token, sequence or constant: see token_weights
    ratio: str = "token"  # of each token, or of its whole sequence (the geometric mean)
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 0.0  # limit of the ratio where the advantage is negative (ppo_clip); 0: none
    rescore: bool = False  # ratios start from the trainer's own log-probabilities, not from the engine's
    correction: str | None = None  # a name of CORRECTIONS: weights for what the engine samples otherwise
    correction_low: float = 0.0
    correction_high: float = 2.0
    kl: str | None = None  # k1, k2, k3: estimator of KL(policy || reference) in the loss
    kl_coef: float = 0.0
    reward_kl_coef: float = 0.0  # weight of the divergence from the reference within the reward: see reward_kl
    reward_kl_per: str = "sequence"  # or token: each token answers for itself and what comes after it only
    greedy_baseline: bool = False  # take the reward of one greedy answer off the others'
    entropy_coef: float = 0.0
    entropy_target: float | None = None  # below it the coefficient grows by entropy_delta a step, above it it shrinks
    entropy_delta: float = 0.005
    cov: str | None = None  # a name of MARKS: which tokens to hold back, by covariance
    cov_fraction: float = 2e-4  # of all tokens
    cov_coef: float = 1.0  # kl_cov: weight of KL(sampler || policy) on those tokens
    cov_low: float = 1.0  # clip_cov: bounds of the covariance
    cov_high: float = 5.0
    drop_zero_variance: bool = False  # leave out groups whose samples all got the same reward
    resample: int = 0  # at most so many extra rounds of sampling to refill dropped groups
    pass_rate_low: float = 0.0  # prompts with a running pass rate outside of [low, high] are passed over
    pass_rate_high: float = 1.0
    pass_rate_retry: int = 0  # steps after which they get another try
    mask_overlong: bool = False  # leave rollouts that hit the length limit out of the loss
    soft_overlong_buffer: float = 0.0  # the last part of the length limit where length is punished, as a fraction
    soft_overlong_weight: float = 1.0  # the punishment at the limit
    discount: float = 1.0  # of rewards that come later in an episode, a step
    step_credit: bool = False  # each step of an episode has an advantage of its own, from the rewards that follow
    critic: bool = False  # advantages are given to tokens, by a critic, in place of `advantage`
    updates: int = 1  # optimizer steps per batch of rollouts; 1 is strictly on-policy
    minibatch_size: int = 0  # groups per optimizer step; above 0 it replaces `updates`
    max_new_tokens: int = 0  # the run's length limit: needed by constant aggregation and the soft punishment
    max_length: int = 0  # tokens of a whole sequence, which may end an answer earlier; 0: no limit

    def __post_init__(self) -> None:
        check(self)

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
    def kl_by_token(self) -> bool:
        return self.kl_in_reward and self.reward_kl_per == "token"

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy's gradient (as a metric it is welcome in any case)."""
        return self.entropy_coef != 0

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss looks at whole sequences, and so cannot be asked about a slice of them."""
        return self.ratio == "sequence" or (self.correction or "").startswith("sequence")

    @property
    def rescores(self) -> bool:
        """Whether the trainer's log-probabilities take the place of the engine's in the ratio."""
        return self.rescore or self.correction is not None

    @property
    def replays(self) -> bool:
        """Whether samples of an earlier policy are weighed as such: by a correction, or by the loss's own ratio.

        Rescored, that ratio starts from the policy as it is, and knows nothing of who sampled.
        """
        return self.correction is not None or not (self.rescore or self.policy_loss in ON_POLICY)

    @property
    def needs_every_answer(self) -> bool:
        """Whether answers with advantage 0 have a gradient, or a say in what is measured, too."""
        by_entropy = self.needs_entropy or self.entropy_target is not None  # whose control follows what is measured
        return self.kl_in_loss or by_entropy or self.critic or self.cov is not None or callable(self.policy_loss)

    def update_count(self, groups: int) -> int:
        """Number of optimizer steps in one pass over a batch of `groups`; a filter may have dropped all of them."""
        wanted = -(-groups // self.minibatch_size) if self.minibatch_size else self.updates
        return max(min(wanted, groups), 1)

    @property
    def chooses_prompts(self) -> bool:
        return self.pass_rate_low > 0 or self.pass_rate_high < 1

    def check_samples(self, samples: int) -> None:
        """Fail before a run starts, not at its first step, when a group baseline gets one sample a prompt."""
        if samples < 2 and not self.critic and _function(self.advantage, ADVANTAGES) in GROUP_BASELINES:
            raise group_size_error(str(self.advantage))

    def keep(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """(kept, dropped) of freshly judged groups. Rewards are shaped for all, so that dropped ones log theirs too."""
        self._shape_rewards(groups)
        if self.mask_overlong:
            filters.mask_overlong(groups)
        if not self.drop_zero_variance:
            return list(groups), []
        return filters.drop_zero_variance(groups, self.discount, self.step_credit)

    def has_zero_variance(self, group: Group) -> bool:
        """Whether all samples were judged alike: see `filters.has_zero_variance`."""
        return filters.has_zero_variance(group, self.discount, self.step_credit)

    def take_baselines(self, groups: Sequence[Group], greedy: list[Group]) -> None:
        """`greedy` holds one greedy answer to the prompt of each group: its reward is that group's baseline."""
        self._shape_rewards(greedy)
        for group, alone in zip(groups, greedy, strict=True):
            group.baseline = alone.rewards[0]

    def credit(self, groups: list[Group], ref_logprobs: Sequence[Sequence[float]] | None = None) -> None:
        """Set every rollout's reward (its verdict's, shaped) and advantage, compared over all these groups.

        `ref_logprobs`: for each rollout in order, the reference's of its tokens in the loss, where `kl_in_reward`.
        With a critic, rewards are all: see `train.critic` for what it makes of them.
        """
        self._shape_rewards(groups)
        ratios: list[list[float]] = []
        if self.kl_in_reward:
            assert ref_logprobs is not None, "reward_kl_coef > 0 needs ref_logprobs"
            ratios = reward_kl.log_ratios(groups, ref_logprobs)
            reward_kl.charge(groups, ratios, self.reward_kl_coef)
        if self.critic:
            return  # what remains is its part
        if self.kl_by_token and _function(self.advantage, ADVANTAGES) in POOLED:
            self._credit_tokens(groups, ratios)
        else:
            self._credit_answers(groups)
            if self.kl_by_token:
                reward_kl.give_back_the_past(groups, ratios, self.reward_kl_coef)

    def _credit_answers(self, groups: list[Group]) -> None:
        """Whole answers, or steps of episodes, are compared."""
        credited = [credited_returns(group, self.discount, self.step_credit) for group in groups]
        rewards = [
            torch.tensor(values, dtype=torch.float64) - (group.baseline or 0.0)
            for group, values in zip(groups, credited, strict=True)
        ]
        for group, rewards_G, advantages_G in zip(groups, rewards, self._compared(groups, rewards), strict=True):
            if advantages_G.shape != rewards_G.shape or not advantages_G.isfinite().all():
                raise UserError(
                    f"the advantage function gave {advantages_G.tolist()} for the rewards {rewards_G.tolist()} of "
                    f"{group.prompt.id}: give one finite number for each."
                )
            give_advantages(group, advantages_G.tolist(), self.step_credit)

    def _compared(self, groups: list[Group], rewards: list[Tensor]) -> list[Tensor]:
        """Advantages of each group: 0 where masked steps have left nothing to be compared with."""
        function = _function(self.advantage, ADVANTAGES)
        least = 2 if function in GROUP_BASELINES else 1
        masked = [self.step_credit and any_masked(group) for group in groups]
        told = [len(values) >= least or not left_out for values, left_out in zip(rewards, masked, strict=True)]
        given = list(compress(rewards, told))
        if isinstance(self.advantage, str) and self.advantage in BY_TOKEN:
            counts = [torch.tensor(credited_tokens(group, self.step_credit), dtype=torch.float64) for group in groups]
            found = BY_TOKEN[self.advantage](given, list(compress(counts, told)))
        else:
            found = function(given) if given or not groups else []
        if len(found) != len(given):
            raise UserError(f"the advantage function gave {len(found)} groups for {len(given)}: give one for each.")
        coming = iter(found)
        return [next(coming) if known else values * 0 for values, known in zip(rewards, told, strict=True)]

    def _credit_tokens(self, groups: list[Group], ratios: Sequence[Sequence[float]]) -> None:
        """Tokens of all answers are compared, each by what comes to it: the reward, less the price from it on."""
        each = [(rollout, group.baseline or 0.0) for group in groups for rollout in group.rollouts]
        returns = [
            torch.tensor(reward_kl.to_go(rollout.reward - baseline, ratios_T, self.reward_kl_coef), dtype=torch.float64)
            for (rollout, baseline), ratios_T in zip(each, ratios, strict=True)
        ]
        for (rollout, _), advantages_T in zip(each, _function(self.advantage, ADVANTAGES)(returns), strict=True):
            rollout.token_advantages = advantages_T.tolist()
            rollout.advantage = (rollout.token_advantages or [0.0])[0]

    def marks(self, logprobs: Sequence[float], advantages: Sequence[float]) -> list[bool]:
        """Which of an optimizer step's tokens the loss holds back; chosen among all of them, before any split."""
        assert self.cov is not None
        every = torch.tensor(logprobs, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
        return MARKS[self.cov](*every, self.cov_fraction, self.cov_low, self.cov_high).tolist()

    def token_weights(self, lengths: Tensor) -> Tensor:
        """The weight of each token of each sequence of a global batch (see aggregate.token_weights)."""
        if self.aggregate == "constant" and self.max_new_tokens < 1:
            raise UserError('aggregate="constant" divides by max_new_tokens: set it.')
        return token_weights(lengths, self.aggregate, self.max_new_tokens)

    def loss(self, batch: LossBatch) -> LossOut:
        """Sum over tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy), and what to log."""
        losses_N, per_token, ratio = self._policy_losses(batch)
        terms = {"loss/policy": (batch.weights * losses_N).sum()}
        if self.kl is not None and batch.ref_logprobs is not None:
            kl_N = KL[self.kl](batch.logprobs, batch.ref_logprobs)
            terms["loss/kl"] = self.kl_coef * (batch.weights * kl_N).sum()
            per_token["policy/kl"] = kl_N
        assert batch.ref_logprobs is not None or not self.kl_in_loss, "kl_coef > 0 needs ref_logprobs"
        if batch.entropy is not None:
            bonus = (batch.weights * batch.entropy).sum() if self.needs_entropy else batch.weights.new_zeros(())
            terms["loss/entropy"] = -self.entropy_coef * bonus
            per_token["policy/entropy"] = batch.entropy
        assert batch.entropy is not None or not self.needs_entropy, "entropy_coef needs the entropy"
        total = torch.stack(list(terms.values())).sum()
        return LossOut(total, sums_of(batch, ratio, total, terms, per_token))

    def _policy_losses(self, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The policy loss of each token, what to log of it, and the ratio that it saw."""
        logprobs, behaviour = batch.logprobs, batch.behaviour_logprobs
        if self.ratio == "sequence":
            assert batch.lengths is not None, "ratios of sequences have to know them"
            logprobs = sequence_logprobs(logprobs, behaviour, batch.lengths)
        found = _function(self.policy_loss, LOSSES)(
            logprobs, behaviour, batch.advantages, self.clip_low, self.clip_high
        )
        losses_N, stats = _by_token(found, len(batch.logprobs))
        per_token = {f"policy/{name}": values for name, values in stats.items()}
        if self.dual_clip and self.policy_loss == "ppo_clip":
            losses_N, per_token["policy/dual_clip_fraction"] = dual_clip(losses_N, batch.advantages, self.dual_clip)
        if self.correction is not None:
            assert batch.engine_logprobs is not None, "a correction needs the engine's log-probabilities"
            bounds = self.correction_low, self.correction_high
            weight, held = correction(self.correction, behaviour, batch.engine_logprobs, *bounds, batch.lengths)
            losses_N = weight * losses_N
            per_token |= {"mismatch/weight": weight, "mismatch/held_fraction": held}
        if self.cov is not None:
            assert batch.marked is not None, "marked tokens have to be given"
            if self.cov == "kl_cov":
                moved = k3(behaviour, batch.logprobs)  # KL(sampler || policy): smooth where nothing has moved yet
                losses_N = losses_N + self.cov_coef * moved.masked_fill(~batch.marked, 0.0)
            else:
                losses_N = losses_N.masked_fill(batch.marked, 0.0)
            per_token["policy/marked_fraction"] = batch.marked
        return losses_N, per_token, importance_ratio(logprobs.detach(), behaviour)

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
            punishment = self.soft_overlong_buffer, self.soft_overlong_weight
            filters.soft_overlong(groups, self.max_new_tokens, *punishment, self.max_length)


def _by_token(found: Any, tokens: int) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Losses and statistics as a loss function gave them, which may be the user's."""
    if not (isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise UserError(f"the loss function gave {type(found).__name__}: give losses and statistics ({{}} for none).")
    losses, stats = found
    for name, values in {"": losses, **stats}.items():
        shape = tuple(getattr(values, "shape", ()))
        if shape != (tokens,):
            what = f"for its statistic {name!r}, " if name else ""
            raise UserError(
                f"the loss function gave shape {shape} for {tokens} tokens: {what}give one number for each."
            )
    return losses, stats


def _function(choice: str | T, named: Mapping[str, T]) -> T:
    return named[choice] if isinstance(choice, str) else choice
