"""Before the weights are loaded: what a run costs, and checks that need no weights.

Costs are seconds, tokens, bytes of memory and of disk, as formulas on numbers. `Speeds` describe a machine with a model
(`dry_run.measure`), `Work` a run; `predict` combines them. Times are lines: a constant per decoded position or update,
and a slope per sequence or token.

The checks are of the size of the model, the folder of runs, and the user's own code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch

from assay.algos import Algorithm, LossBatch, Scorers, metrics
from assay.build.models import PRESET_LENGTH, activation_bytes, custom_backend, is_custom_backend, model_source
from assay.build.problems import build_algorithm
from assay.checks.settings import PRESET, check_sizes
from assay.config import TrainConfig
from assay.engine.base import BaseEngine
from assay.models import Decoder, PolicyModel
from assay.models.load import preset
from assay.models.quantize import BLOCK
from assay.models.spec import ModelSpec, spec_from_hf
from assay.runs.metrics import non_finite_terms
from assay.runs.resolve import resolve_model
from assay.text import load_tokenizer
from assay.training.learner.learner import Learner
from assay.training.learner.pack import TRAINER_LOGPROBS, pack, rows_of, with_step_inputs
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, UserError, Verdict

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
        compiled = policy.compiled_bridge is not None
        sizes["activations"] = float(tokens * activation_bytes(policy.spec, updater.dtype, policy.recompute, compiled))
    return sizes | {"logits": 4.0 * 3 * min(tokens * policy.vocab_size, 1 << 25)}


TYPICAL_VOCABULARY = 1_000  # of presets, whose vocabulary comes from the task
GIB = 2**30
PROMPTS, SAMPLES, TOKENS = 2, 8, 4  # of the trial of the user's own code, at most


def model_spec(cfg: TrainConfig) -> ModelSpec | None:
    """The shape of the model, without its weights; None if it is not known here, as of a model on the hub."""
    source = model_source(cfg.model, cfg.runs_dir)
    if source.startswith(PRESET):
        length = cfg.model.max_length or PRESET_LENGTH
        return preset(source.removeprefix(PRESET), TYPICAL_VOCABULARY, length)
    config = Path(source).expanduser() / "config.json"
    try:
        return spec_from_hf(json.loads(config.read_text())) if config.is_file() else None
    except (OSError, ValueError, AttributeError):
        return None


def check_before_loading(cfg: TrainConfig, algo: Algorithm, prompts: Sequence[Prompt], verdict: Verdict) -> None:
    """Raise what would otherwise fail after the weights are loaded. `verdict`: of the judge, on an empty answer."""
    if spec := model_spec(cfg):
        check_sizes(cfg, spec.max_length, spec.hidden)
    if is_custom_backend(cfg.engine):
        custom_backend(cfg.engine.name)
    if has_own_code(cfg):
        try_algorithm(cfg, prompts[:PROMPTS], verdict)


def disk_warning(cfg: TrainConfig, size: float) -> str:
    """What to say if the checkpoints that exist at a time, of `size` bytes each, need more than the free disk space.

    A checkpoint is written before an older one is deleted.
    """
    folder = Path(cfg.runs_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    kept = {"the first": 1, "the best": int(cfg.save.best), "the latest": cfg.save.keep or 1, "the next": 1}
    needed = sum(kept.values()) * size
    if needed <= free:
        return ""
    listed = ", ".join(f"{count} {name}" if count > 1 else name for name, count in kept.items() if count)
    return (
        f"checkpoints need up to {needed / GIB:.1f} GiB ({size / GIB:.1f} each: {listed}), and {free / GIB:.1f} GiB "
        f"are free in {cfg.runs_dir}: lower save.keep, set save.best = false, or choose another runs_dir"
    )


def check_reference(cfg: TrainConfig, algo: Algorithm) -> None:
    """Raise if there is no model at `algo.reference`. Loads its tokenizer only."""
    name = cfg.algo.reference
    if algo.needs.reference and name and not name.startswith(PRESET) and not cfg.reference.url:
        load_tokenizer(resolve_model(name, Path(cfg.runs_dir)))


def has_own_code(cfg: TrainConfig) -> bool:
    """Whether the algorithm contains functions or loss terms of the user."""
    functions = (cfg.algo.advantage, cfg.algo.policy_loss, cfg.algo.filter)
    return bool(cfg.algo.terms) or any(not isinstance(name, str) or ":" in name for name in functions)


def try_algorithm(cfg: TrainConfig, prompts: Sequence[Prompt], verdict: Verdict) -> None:
    """Compute advantages, loss and gradient of invented answers, with an algorithm that has its own state."""
    algo = build_algorithm(cfg)
    groups = [invented_group(prompt, verdict, min(cfg.train.samples, SAMPLES)) for prompt in prompts]
    algo.keep(groups)
    scorers = Scorers(
        ref_logprobs=lambda groups: [[-0.7] * rollout.trained for group in groups for rollout in group.rollouts],
        values=lambda rollouts: [[0.0] * rollout.trained for rollout in rollouts],
    )
    algo.credit(groups, scorers)
    rows = rows_of(groups, algo)
    if algo.needs.trainer_logprobs:
        rows = [row.with_input(TRAINER_LOGPROBS, row.sampled_logprobs) for row in rows]
    if not rows:
        return
    part = pack(with_step_inputs(rows, algo), "cpu")
    logprobs = (part.behaviour_logprobs - 0.1).requires_grad_()
    batch = LossBatch(
        logprobs=logprobs,
        behaviour_logprobs=part.behaviour_logprobs,
        advantages=part.advantages,
        weights=part.weights,
        entropy=logprobs.abs() if algo.needs.entropy_gradient else logprobs.detach().abs(),
        ref_logprobs=part.behaviour_logprobs - 0.2 if algo.needs.ref_logprobs_in_loss else None,
        engine_logprobs=part.behaviour_logprobs if algo.needs.trainer_logprobs else None,
        lengths=part.trained_lengths if algo.needs.whole_sequences else None,
        inputs=part.inputs,
    )
    out = algo.loss(batch)
    if faulty := non_finite_terms(metrics(out.sums)):
        raise UserError(f"{faulty} is not finite for invented answers: fix algo.terms or algo.policy_loss")
    out.total.backward()
    if logprobs.grad is None or not logprobs.grad.isfinite().all():
        raise UserError("the loss has a gradient that is not finite: fix algo.terms or algo.policy_loss")


def invented_group(prompt: Prompt, verdict: Verdict, samples: int) -> Group:
    """Answers of different lengths with rewards of 0 and 1 in turn. `verdict`: for the other entries of verdicts."""
    rollouts = []
    for sample in range(samples):
        count = 1 + sample % TOKENS
        logprobs = [-0.5 * (position + 1) for position in range(count)]
        completion = Completion([1] * count, logprobs, logprobs, Finish.STOP, kept_mass=1.0, entropy=1.0)
        rewarded = replace(verdict, reward=float(sample % 2), status=Status.OK if sample % 2 else Status.WRONG)
        rollouts.append(Rollout(prompt, sample, [Turn([0, 0], completion, prompt.answer)], rewarded))
    return Group(prompt, rollouts)
