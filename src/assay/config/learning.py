"""How the policy learns from answers: critic, replay, optimizer, loop, warm start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from assay.config.kinds import Above0, Below1, Count, Fraction, NonNegative, Positive, Section


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
