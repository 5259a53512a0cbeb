"""What a run costs: seconds, tokens, bytes of memory and of disk, as formulas on numbers.

`Speeds` describe a machine with a model (`speeds.measure`), `Work` a run; `predict` combines them. Times are lines: a
constant per decoded position or update, and a slope per sequence or token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import torch

from assay.algos import Algorithm
from assay.build.models import activation_bytes
from assay.config import TrainConfig
from assay.engine.base import BaseEngine
from assay.models import Decoder, PolicyModel
from assay.models.quantize import BLOCK
from assay.models.spec import ModelSpec
from assay.training.learner.learner import Learner

# Measured on two CPU cores: rollout files, metrics and advantages of a step, per answer.
RECORD_S = 1e-4
CHECKPOINT_BYTES_S = 5e8  # a checkpoint is copied, hashed and written by one thread
CURVES_S = 2.0  # to draw the curves at the end
ROLLOUT_TOKEN_BYTES = 36  # of a sampled token in the files of rollouts: id, log-probabilities, text
MOMENT_BYTES = {"float32": 8.0, "8bit": 2.03, "bfloat16": 2.03}  # of AdamW per trained parameter, by optim.precision
GRADIENT_BYTES = {"float32": 4.0, "8bit": 2.0, "bfloat16": 2.0}
REMAINDER_BYTES = {"float32": 0.0, "8bit": 2.0, "bfloat16": 0.0}
FEWEST_PROMPTS = 4  # per step, in advice
LONG_S = 2 * 3600.0  # a run that takes longer gets advice


@dataclass(frozen=True)
class Line:
    """Seconds as a function of a count."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, low: tuple[float, float], high: tuple[float, float]) -> Line:
        """The line through two measurements (count, seconds). Noise makes neither part negative."""
        (few, few_s), (many, many_s) = low, high
        slope = (many_s - few_s) / (many - few) if many > few else many_s / many
        slope = min(max(slope, 0.0), many_s / many)
        return cls(max(many_s - slope * many, 0.0), slope)

    def at(self, count: float) -> float:
        return self.fixed + self.slope * count


@dataclass(frozen=True)
class Speeds:
    """Seconds that parts of a run take on a machine."""

    position: Line  # to decode one position of all running sequences, by their number
    prompt_token: float
    judge: Line  # by number of answers
    update: Line  # by number of tokens
    sync: float
    start: float = 0.0  # imports and loading


@dataclass(frozen=True)
class Answers:
    """Lengths of answers in tokens."""

    mean: float
    longest: float  # of `count` answers
    count: int
    limit: int

    @classmethod
    def of(cls, lengths: list[int], unfinished: int, limit: int) -> Answers:
        """From a sample, of which the last `unfinished` answers were cut off before `limit`: as if answers ended at a
        constant rate.
        """
        finished = len(lengths) - unfinished
        if not finished:
            return cls(limit, limit, len(lengths), limit)
        mean = min(sum(lengths) / finished, limit)
        longest = limit if unfinished else max(lengths)
        return cls(mean, max(longest, mean), len(lengths), limit)

    def longest_of(self, count: int) -> float:
        """The longest of `count` answers, if the lengths have an exponential tail."""
        growth = log(max(count, 2)) / log(max(self.count, 2))
        return min(self.mean + (self.longest - self.mean) * max(growth, 1.0), self.limit)

    def limited(self, limit: int) -> Answers:
        if limit >= self.limit:  # nothing is known about longer answers
            return replace(self, limit=limit)
        return replace(self, mean=min(self.mean, limit), longest=min(self.longest, limit), limit=limit)


@dataclass(frozen=True)
class EvaluationWork:
    problems: int
    samples: int
    times: int
    answers: Answers


@dataclass(frozen=True)
class Work:
    """The amounts of a run."""

    steps: int
    prompts: int
    samples: int
    prompt_tokens: float
    answers: Answers
    max_batch: int
    observed: float = 0.0  # tokens of an environment per sampled token
    evaluations: tuple[EvaluationWork, ...] = ()
    passes: int = 1
    learning_share: float = 1.0  # of answers that are part of the update
    processes: int = 1  # that share the prompts and the rows of a step
    overlaps: bool = False  # whether sampling and updates run at the same time
    warm_steps: int = 0
    warm_tokens: float = 0.0  # per step
    checkpoint_bytes: float = 0.0
    saves: int = 0
    kept: int = 0  # checkpoints on the disk at the end
    rollout_steps: int = 0  # whose files are kept


@dataclass(frozen=True)
class Prediction:
    sampling: float  # seconds per step, as the next three
    judging: float
    update: float
    rest: float
    step: float
    warm_start: float  # seconds of the run, as the next three
    evaluations: float
    saving: float
    start: float
    total: float
    tokens: float  # sampled
    disk: float  # bytes


def predict(work: Work, speeds: Speeds) -> Prediction:
    answers_per_step = work.prompts * work.samples
    sampling = sampling_seconds(speeds, work, work.prompts, work.samples, work.answers)
    judging = speeds.judge.at(answers_per_step / work.processes)
    tokens = work.prompt_tokens + work.samples * work.answers.mean * (1 + work.observed)
    tokens *= work.learning_share * work.prompts
    update = speeds.update.at(tokens / work.processes) * work.passes
    rest = speeds.sync + RECORD_S * answers_per_step
    step = rest + (max(sampling + judging, update) if work.overlaps else sampling + judging + update)
    warm = work.warm_steps * speeds.update.at(work.warm_tokens / work.processes)
    measured = sum(
        part.times
        * (
            sampling_seconds(speeds, work, part.problems, part.samples, part.answers)
            + speeds.judge.at(part.problems * part.samples / work.processes)
        )
        for part in work.evaluations
    )
    saving = work.saves * work.checkpoint_bytes / CHECKPOINT_BYTES_S
    total = speeds.start + warm + measured + saving + work.steps * step + CURVES_S
    sampled = work.steps * answers_per_step * work.answers.mean
    disk = work.kept * work.checkpoint_bytes
    disk += work.rollout_steps * answers_per_step * work.answers.mean * ROLLOUT_TOKEN_BYTES
    return Prediction(sampling, judging, update, rest, step, warm, measured, saving, speeds.start, total, sampled, disk)


def sampling_seconds(speeds: Speeds, work: Work, prompts: int, samples: int, answers: Answers) -> float:
    """Prefill of all prompts, and decoding: as many positions as the longest answer has, or as the batch needs."""
    prompts = -(-prompts // work.processes)
    count = prompts * samples
    tokens = count * answers.mean
    positions = max(answers.longest_of(count), tokens / work.max_batch)
    prefill = (prompts * work.prompt_tokens + tokens * work.observed) * speeds.prompt_token
    return prefill + positions * speeds.position.fixed + tokens * speeds.position.slope


def fewer_prompts(work: Work, speeds: Speeds, limit_s: float = LONG_S) -> tuple[int, float] | None:
    """The largest smaller number of prompts per step (halved repeatedly) with which the run takes at most `limit_s`
    seconds, or the fewest that still learn, and the seconds. None if that saves little.
    """
    prompts = work.prompts
    while prompts > FEWEST_PROMPTS and predict(replace(work, prompts=prompts), speeds).total > limit_s:
        prompts = max(prompts // 2, FEWEST_PROMPTS)
    seconds = predict(replace(work, prompts=prompts), speeds).total
    return (prompts, seconds) if seconds < 0.75 * predict(work, speeds).total else None


def quantized_bytes(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Bytes of a model in NF4: 4 bits and a share of a scale per weight of a layer; embedding and head are not
    quantized.
    """
    embeddings = spec.vocab_size * spec.hidden * (1 if spec.tied else 2)
    return embeddings * dtype.itemsize + (spec.parameters - embeddings) * (0.5 + dtype.itemsize / BLOCK)


def update_bytes(cfg: TrainConfig) -> float:
    """Bytes on the device per trained parameter, besides its weight: gradient, moments, remainder."""
    precision = "float32" if cfg.lora.rank else cfg.optim.precision
    moments = 0.0 if cfg.optim.offload and precision != "float32" else MOMENT_BYTES[precision]
    return GRADIENT_BYTES[precision] + REMAINDER_BYTES[precision] + moments


def checkpoint_bytes(cfg: TrainConfig, policy: PolicyModel) -> float:
    """Of the model, merged with its adapters, and of what an exact resume needs besides."""
    precision = "float32" if cfg.lora.rank else cfg.optim.precision
    model = policy.parameter_count * next(policy.parameters()).dtype.itemsize
    adapters = 4.0 * policy.trained_count if cfg.lora.rank else 0.0
    return model + adapters + (MOMENT_BYTES[precision] + REMAINDER_BYTES[precision]) * policy.trained_count


def model_memory(
    cfg: TrainConfig,
    algo: Algorithm | None,
    dtype: torch.dtype,
    engine_dtype: torch.dtype,
    count: int,
    trained: int,
    weight_bytes: float,
    reference_count: int | None = None,
) -> dict[str, float]:
    """Bytes by purpose that do not depend on batches. `count`, `trained`: parameters. `dtype`: of the computation."""
    lora_base = cfg.lora.rank and not (cfg.algo.reference or cfg.sft.steps or cfg.algo.dynamic_reference)
    has_reference = algo is not None and algo.needs.reference and not cfg.reference.url and not lora_base
    has_critic = algo is not None and algo.settings.critic and cfg.critic.trunk == "separate"
    reference_bytes = 4 if cfg.algo.reference_ema else dtype.itemsize
    sizes = {
        "weights, gradients, AdamW": weight_bytes + update_bytes(cfg) * trained,
        "engine's copy of the weights": float(engine_dtype.itemsize * count),
        "reference": float(reference_bytes * (reference_count or count) * has_reference),
        "critic, gradients, AdamW": 16.0 * count * bool(has_critic),
    }
    return {name: size for name, size in sizes.items() if size}


def kv_bytes(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Bytes of the keys and values of a token."""
    return 2.0 * spec.layers * spec.kv_heads * spec.head_dim * dtype.itemsize


def memory_by_purpose(cfg: TrainConfig, learner: Learner, engine: BaseEngine, prompt_tokens: int) -> dict[str, float]:
    """Estimated bytes at the peak of a step, without kernels, fragmentation and the interpreter."""
    policy, updater, reference = learner.policy, learner.updater, learner.updater.reference
    reference_count = None if reference is None else sum(p.numel() for p in reference.parameters())
    parameters = policy.parameter_count, policy.trained_count, policy.weight_bytes, reference_count
    sizes = model_memory(cfg, learner.algo, updater.dtype, engine.info.dtype, *parameters)
    length = min(prompt_tokens + cfg.sampling.max_new_tokens, engine.info.max_length)
    sequences = cfg.train.prompts * cfg.train.samples
    tokens = min(updater.token_budget, sequences * length)
    if isinstance(policy, Decoder):
        sizes["KV cache"] = kv_bytes(policy.spec, engine.info.dtype) * length * min(engine.info.max_batch, sequences)
        sizes["activations"] = float(tokens * activation_bytes(policy.spec, updater.dtype, policy.recompute))
    return sizes | {"logits": 4.0 * 3 * min(tokens * policy.vocab_size, 1 << 25)}
