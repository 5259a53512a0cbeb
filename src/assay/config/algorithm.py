"""Settings of the algorithm: one section per component, joined in `AlgoConfig` to the flat keys of `[algo]`.

Each component of `assay.algos` holds an instance of its section and declares no setting of its own. The recipe
overrides the defaults here, and the keys that the user sets override the recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, SerializerFunctionWrapHandler, model_serializer

from assay.config.settings import Below1, Count, Data, Finite, Fraction, NonNegative, Positive, Resource, Section, Table

Bound = Annotated[float, Field(ge=0)]  # infinity means no bound


def name_or_function(value: Any) -> Any:
    if isinstance(value, str) or callable(value):
        return value
    raise ValueError("input should be a name, or the path of a function such as file.py:name")


Function = Annotated[str | Callable[..., Any], PlainValidator(name_or_function), Resource.CODE]


class RecipeConfig(Section):
    recipe: str = "grpo"
    """named set of algorithm settings: see docs/reference/algorithms.md"""


class CreditConfig(Section):
    advantage: Function = "group_norm"
    """how rewards become advantages, or your own as file.py:function: see docs/reference/algorithms.md"""
    greedy_baseline: bool = False
    """sample one more answer per prompt greedily and subtract its reward from the others'; it is not trained on"""
    critic: bool = False
    """estimate advantages per token with a critic instead of algo.advantage (PPO): see the critic section"""
    discount: Fraction = 1.0
    """discount factor per step of an episode; 1: no discount"""
    step_credit: bool = False
    """give each step of an episode its own advantage, from the rewards that follow it"""


class RewardKLConfig(Section):
    reward_kl_coef: NonNegative = 0.0
    """weight of log(policy / reference) that is subtracted from the reward; above 0 a reference model is kept"""
    reward_kl_per: Literal["sequence", "token"] = "sequence"
    """sequence: one penalty per answer, the sum over its tokens; token: one per token, from it onwards"""


class PolicyGradientConfig(Section):
    policy_loss: Function = "ppo_clip"
    """policy-gradient loss of a token, or your own as file.py:function: see docs/reference/algorithms.md"""
    ratio: Literal["token", "sequence"] = "token"
    """policy / sampler probability ratio: of each token, or of the whole answer (geometric mean of its tokens)"""
    clip_low: Bound = 0.2
    """clip range below 1"""
    clip_high: Bound = 0.2
    """clip range above 1"""
    dual_clip: NonNegative = 0.0
    """largest ratio where the advantage is negative, e.g. 3 or 10 (ppo_clip); 0: none"""


class ImportanceConfig(Section):
    recompute_logprobs: bool = False
    """importance ratios use log-probabilities that the trainer computes before the first update, not the engine's"""
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    """weight tokens or answers by trainer / engine probability, truncated to or masked outside of the bounds below"""
    correction_low: NonNegative = 0.0
    """lower bound of that weight"""
    correction_high: Bound = 2.0
    """upper bound of that weight"""


class CovarianceConfig(Section):
    cov: Literal["kl_cov", "clip_cov"] | None = None
    """tokens with the highest covariance of log-probability and advantage: kl_cov penalises, clip_cov masks them"""
    cov_fraction: Fraction = 2e-4
    """fraction of tokens that kl_cov or clip_cov selects"""
    cov_coef: NonNegative = 1.0
    """kl_cov: weight of the penalty"""
    cov_low: Finite = 1.0
    """clip_cov: smallest covariance of the tokens it selects from"""
    cov_high: Finite = 5.0
    """clip_cov: largest covariance of the tokens it selects from"""


class AggregateConfig(Section):
    aggregate: str = "sequence"
    """loss aggregation: mean over tokens, mean over the means of sequences, or sum divided by a constant length"""


class ReferenceKLConfig(Section):
    kl: Literal["k1", "k2", "k3"] | None = None
    """estimator of the divergence from the reference"""
    kl_coef: NonNegative = 0.0
    """weight of that divergence in the loss; above 0 a reference model is kept"""


class ReferenceConfig(Section):
    reference: Data = ""
    """reference model of any size with the same tokenizer; empty: the policy at the start of reinforcement learning"""
    refresh_reference: Count = 0
    """replace the reference by the current policy every N steps; 0: never"""
    reference_ema: Below1 = 0.0
    """decay of a reference that is a moving average of the policy, updated after each step, e.g. 0.99; 0: fixed"""


class EntropyConfig(Section):
    entropy_coef: Finite = 0.0
    """weight of an entropy bonus; with entropy_target, the initial one"""
    entropy_target: NonNegative | None = None
    """adaptive weight: grows while the entropy per token is below this target; above it shrinks and is not applied"""
    entropy_delta: NonNegative = 0.005
    """change of the weight per step"""


class ZeroVarianceConfig(Section):
    drop_zero_variance: bool = False
    """leave out groups in which all rewards are equal"""
    filter: Function = ""
    """your own filter as file.py:function: f(group) -> whether the group is trained on"""
    resample: Count = 0
    """rounds of new prompts sampled to replace groups that are left out"""


class PassRateConfig(Section):
    pass_rate_low: Fraction = 0.0
    """skip prompts whose running pass rate is below this"""
    pass_rate_high: Fraction = 1.0
    """skip prompts whose running pass rate is above this"""
    pass_rate_retry: Count = 0
    """steps after which a skipped prompt is tried again; 0: never"""


class OverlongConfig(Section):
    mask_overlong: bool = False
    """leave truncated answers out of the loss"""
    soft_overlong_buffer: Fraction = 0.0
    """last part of the length limit over which a penalty grows, as a fraction of the limit; 0: none"""
    soft_overlong_weight: NonNegative = 1.0
    """largest length penalty"""


class MinibatchConfig(Section):
    updates: Positive = 1
    """optimizer steps that each batch of rollouts is split into; 1 is on-policy"""
    minibatch_size: Count = 0
    """groups (prompts with all their answers) per optimizer step, in place of algo.updates; 0: algo.updates decides"""


class TermsConfig(Section):
    terms: Annotated[list[str], Resource.CODE] = Field(default_factory=list)
    """your own loss terms, by path, e.g. ["my_terms.py:MyTerm"]: see docs/guides/own-algorithm.md"""
    term_args: Annotated[dict[str, Table], Resource.CODE] = Field(default_factory=dict)
    """settings of your own loss terms, by class name, e.g. algo.term_args.MyTerm.coef = 0.1"""


# Pydantic collects fields from the last base to the first.
class AlgoConfig(
    TermsConfig,
    MinibatchConfig,
    OverlongConfig,
    PassRateConfig,
    ZeroVarianceConfig,
    EntropyConfig,
    ReferenceConfig,
    ReferenceKLConfig,
    RewardKLConfig,
    AggregateConfig,
    CovarianceConfig,
    ImportanceConfig,
    PolicyGradientConfig,
    CreditConfig,
    RecipeConfig,
):
    """The algorithm: a recipe and changes to it. `algo = "NAME"` is short for `algo.recipe`. Defaults depend on it."""

    short_form: ClassVar = "recipe"

    @property
    def dynamic_reference(self) -> bool:
        """Whether the reference model changes during a run."""
        return self.refresh_reference > 0 or self.reference_ema > 0

    @model_serializer(mode="wrap")
    def only_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the fields that are left to the recipe: written out and read back, they would override it."""
        always = RecipeConfig.model_fields.keys() | ReferenceConfig.model_fields.keys()  # no recipe sets these
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set | always}
