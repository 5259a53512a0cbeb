"""Checks of a run that need no weights: the size of its model, the folder of runs, and the user's own code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.algos import Algorithm, LossBatch, Scorers, metrics
from assay.build.models import PRESET_LENGTH, custom_backend, is_custom_backend, model_source
from assay.build.problems import build_algorithm
from assay.checks.settings import PRESET, check_sizes
from assay.config import TrainConfig
from assay.models.load import preset
from assay.models.spec import ModelSpec, spec_from_hf
from assay.runs.metrics import non_finite_terms
from assay.runs.resolve import resolve_model
from assay.text import load_tokenizer
from assay.training.learner.pack import TRAINER_LOGPROBS, pack, rows_of, with_step_inputs
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, UserError, Verdict

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
