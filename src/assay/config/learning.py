"""What is done with the answers: the algorithm, its critic and replay, the optimizer, the loop, the warm start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from assay.config.kinds import Above0, Below1, Count, Finite, Fraction, NonNegative, Positive, Section


class AlgoConfig(Section):
    """The algorithm: a recipe, and what you change about it. Empty values mean the recipe's own."""

    recipe: str = "grpo"
    """reinforce, grpo, ppo, dr_grpo, dapo, rloo, simple, reinforce_pp, remax, gspo, cispo, gpg or bnpo"""
    advantage: str | None = None
    """group_mean, group_norm, leave_one_out, batch_mean, token_norm, beta_norm, none, ...: see docs/algorithms.md"""
    policy_loss: str | None = None
    """reinforce, ppo_clip or cispo"""
    ratio: Literal["token", "sequence"] | None = None
    """policy against sampler: of each token, or of the whole answer (the geometric mean of its tokens)"""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """how far below 1 the ratio may go"""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """how far above 1 the ratio may go"""
    dual_clip: NonNegative | None = None
    """largest ratio where the advantage is negative, e.g. 3 or 10 (ppo_clip); 0: none"""
    rescore: bool | None = None
    """ratios start from log-probabilities that the trainer computes before its first update, not from the engine's"""
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    """weigh tokens or answers by trainer / engine: held within bounds, or left out outside of them; rescores"""
    correction_low: NonNegative | None = None
    """lower bound of that weight"""
    correction_high: Annotated[float, Field(ge=0)] | None = None
    """upper bound of that weight"""
    aggregate: str | None = None
    """what the loss averages over: token, sequence or constant (length)"""
    kl: Literal["k1", "k2", "k3"] | None = None
    """estimator of the divergence from the reference"""
    kl_coef: NonNegative | None = None
    """weight of that divergence in the loss; above 0 a reference model is kept"""
    reward_kl_coef: NonNegative | None = None
    """weight of log(policy / reference) that is taken off the reward; above 0 a reference model is kept"""
    reward_kl_per: Literal["sequence", "token"] | None = None
    """sequence: an answer pays for all of its tokens; token: each of them for itself and those after it"""
    reference: str = ""
    """model to stay close to, of any size, with the same tokenizer; empty: the policy when reinforcement began"""
    refresh_reference: Count = 0
    """make the policy as it is the reference every so many steps; 0: never"""
    reference_ema: Below1 = 0.0
    """after each step the reference is this part of itself and, for the rest, the policy, e.g. 0.99; 0: it stays"""
    entropy_coef: Finite | None = None
    """weight of an entropy bonus; with entropy_target, what it starts from"""
    entropy_target: NonNegative | None = None
    """entropy of a token below which that weight grows from step to step; above it the weight shrinks and rests"""
    entropy_delta: NonNegative | None = None
    """what the weight grows or shrinks by"""
    cov: Literal["kl_cov", "clip_cov"] | None = None
    """hold tokens back whose log-probability and advantage covary most: by a penalty, or out of the loss"""
    cov_fraction: Fraction | None = None
    """share of tokens that is held back"""
    cov_coef: NonNegative | None = None
    """kl_cov: weight of the penalty"""
    cov_low: Finite | None = None
    """clip_cov: least covariance of those it draws from"""
    cov_high: Finite | None = None
    """clip_cov: largest covariance of those it draws from"""
    greedy_baseline: bool | None = None
    """sample one greedy answer more a prompt and take its reward off the others'; it is not trained on"""
    drop_zero_variance: bool | None = None
    """leave out groups in which all rewards are equal"""
    resample: Count | None = None
    """rounds of new prompts drawn to replace such groups"""
    pass_rate_low: Fraction | None = None
    """prompts with a running pass rate below are passed over"""
    pass_rate_high: Fraction | None = None
    """prompts with a running pass rate above are passed over"""
    pass_rate_retry: Count | None = None
    """steps after which a prompt that was passed over gets another try; 0: none"""
    mask_overlong: bool | None = None
    """leave answers that were cut off out of the loss"""
    soft_overlong_buffer: Fraction | None = None
    """last part of the length limit over which a punishment grows, as a fraction of it; 0: none"""
    soft_overlong_weight: NonNegative | None = None
    """largest length punishment"""
    critic: bool | None = None
    """a critic gives tokens their advantages, in place of algo.advantage (PPO): see the critic section"""
    discount: Fraction | None = None
    """of rewards that come later in an episode, a step; 1: none"""
    step_credit: bool | None = None
    """each step of an episode has an advantage of its own, from the rewards that follow it"""
    updates: Positive | None = None
    """optimizer steps that each batch of rollouts is split into; 1 is on-policy"""
    minibatch_size: Count | None = None
    """groups (prompts with all their answers) per optimizer step, in place of algo.updates; 0: algo.updates decides"""


class ReplayConfig(Section):
    """Learning again from groups of earlier steps. Needs a loss with an importance ratio, or algo.correction."""

    groups: Count = 0
    """of earlier steps that are added to each step's own; 0: none"""
    capacity: Positive = 256
    """groups kept, the latest ones"""
    max_staleness: Count = 0
    """drop groups that a policy of more than so many steps ago has sampled; 0: never"""
    with_replacement: bool = False
    """a group may be drawn several times in one step"""
    load: str = ""
    """folder of a saved buffer that a new run begins with: ReplayBuffer.save, or replay/ of a run's checkpoint"""


class CriticConfig(Section):
    """With algo.critic: it learns what states are worth, and gives tokens their advantages (PPO)."""

    trunk: Literal["separate", "shared"] = "separate"
    """separate: a network as large as the policy; shared: a head on the policy's own, which learns for both"""
    coef: NonNegative = 0.5
    """shared: weight of its loss beside the policy's"""
    lr: Above0 = 1e-5
    """its learning rate, constant; shared: of the head"""
    gamma: Fraction = 1.0
    """discount of a token's distance from the reward"""
    gae_lambda: Fraction = 1.0
    """1: returns less values, unbiased; 0: one step ahead, as good as the values are"""
    clip: NonNegative = 0.5
    """how far a value may go from the one that gave credit before it stops paying; 0: any distance"""
    passes: Positive = 4
    """separate: optimizer steps on each batch; shared: as many as the policy makes"""
    bootstrap: bool = False
    """episodes that a limit cut off count as worth what it expects of them; false: as over, with what they have got"""
    normalise: bool = True
    """advantages of a batch get mean 0 and standard deviation 1"""
    max_grad_norm: Above0 = 1.0
    """its gradients are scaled down to this norm"""


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum for the matrices of the layers, AdamW for everything else"""
    lr: Above0 = 1e-6
    """learning rate of whatever has none of its own below; a schedule scales them all"""
    matrix_lr: Above0 | None = None
    """learning rate of the matrices in the layers; muon needs one, e.g. 0.001; empty: lr"""
    embedding_lr: Above0 | None = None
    """learning rate of the embedding, and of a head that shares its weights; empty: lr"""
    head_lr: Above0 | None = None
    """learning rate of a head with weights of its own; empty: lr"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup: Count = 0
    """steps of linear warm-up"""
    final: Fraction = 0.0
    """fraction of the learning rate that linear and cosine schedules end with"""
    initial: Annotated[float, Field(gt=0, le=1)] = 1.0
    """fraction of the learning rate to start from, for all steps"""
    weight_decay: NonNegative = 0.0
    """decoupled; not applied to vectors (norms and biases)"""
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    """AdamW's moments"""
    momentum: Below1 = 0.95
    """Muon's momentum"""
    eps: Above0 = 1e-8
    """AdamW's epsilon"""
    max_grad_norm: NonNegative = 1.0
    """gradients are scaled down to this norm; 0: never"""


class LoopConfig(Section):
    """The loop."""

    steps: Count = 100
    """batches of rollouts to train on"""
    epochs: NonNegative = 0.0
    """length in passes over the train split instead of steps; 0: use steps"""
    budget: Count = 0
    """end, and schedule the learning rate, by answers sampled, those of dropped groups included; 0: by steps"""
    prompts: Positive = 16
    """prompts a step"""
    samples: Positive = 8
    """answers a prompt"""
    passes: Positive = 1
    """times the trainer goes over each batch of rollouts"""
    token_budget: Positive = 16384
    """most tokens in one forward and backward pass; memory goes with it, the result does not"""
    recompute: bool = False
    """keep only the inputs of layers for the backward pass: a fraction of the memory, a third more time"""
    compile: Literal["auto", "on", "off"] = "auto"
    """compile the layers with torch.compile; auto: on one GPU, for models of 100 million parameters or more"""
    offload_reference: bool = False
    """keep the reference model of a KL term in main memory, and on the GPU only while it is asked"""
    process: Literal["same", "separate"] = "same"
    """separate: each update in a process of its own, which leaves nothing on the GPU; takes seconds to start"""
    max_train_prompts: Count = 0
    """use only the first so many prompts of the train split; 0: all"""
    max_skipped: Count = 5
    """stop after so many steps in a row whose loss or gradient was not finite; 0: never"""


class SftConfig(Section):
    """A supervised warm start on worked solutions, before reinforcement."""

    steps: Count = 0
    """optimizer steps; 0: no warm start"""
    batch: Positive = 64
    """solutions a step"""
    lr: Above0 = 1e-5
    """learning rate, linear to 0"""
    warmup: Count = 10
    """steps of linear warm-up"""
    weight_decay: NonNegative = 0.0
    """as in optim"""
    args: dict[str, Any] = Field(default_factory=dict)
    """task knobs that differ for the demonstrations, e.g. sft.args.noise = 0.3"""
