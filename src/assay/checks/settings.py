"""Rules on the settings alone: before a run, nothing has been measured yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from assay.checks.causes import Diagnosis, now, setting

LARGE = 50_000_000  # parameters; smaller models need and bear learning rates that destroy larger ones
SMALL_BATCH = 128  # answers per step
# Learning rates that runs of this project and published runs have trained with, widened by a factor of 3 to 10 on
# both sides. Configs of this repository: 1e-6 to 3e-5 for 135M to 1.5B parameters (1e-5 is already too high for
# 1.5B), 4e-4 to 1e-2 for presets. Published RL with AdamW: 1e-7 (70B) to 1e-5; LoRA: 10 to 100 times as high.
# (optimizer or kind, large model): lowest, highest
REASONABLE: dict[tuple[str, bool], tuple[float, float]] = {
    ("full", True): (1e-8, 1e-4),
    ("full", False): (1e-6, 3e-2),
    ("lora", True): (1e-7, 3e-3),
    ("lora", False): (1e-6, 1e-1),
    ("muon", True): (1e-6, 1e-1),
    ("muon", False): (1e-5, 3e-1),
    ("sft", True): (1e-7, 1e-3),
    ("sft", False): (1e-6, 1e-1),
}


def diagnose_settings(config: Mapping[str, Any], parameters: int | None = None) -> Iterator[Diagnosis]:
    """`config`: complete settings, with those of the recipe. `parameters`: of the model, if known."""
    if equal := always_equal_reward(config):
        yield Diagnosis("zero_loss", f"every answer gets the same reward, because {equal[0]}", equal[1])
    if setting(config, "train.samples") == 1 and setting(config, "algo.drop_zero_variance"):
        yield Diagnosis(
            "zero_loss",
            "algo.drop_zero_variance removes every group, because a group of one answer has no variance",
            f"raise {now(config, 'train.samples')}, or set algo.drop_zero_variance = false",
        )
    if cause := small_batch(config, parameters):
        yield cause
    if parameters is not None:
        yield from far_off_learning_rates(config, parameters)
    steps, warmup = setting(config, "train.steps"), setting(config, "optim.warmup") or 0
    fixed = not setting(config, "train.epochs") and not setting(config, "train.budget")
    if steps and fixed and warmup >= steps:
        yield Diagnosis(
            "learning_rate_low",
            f"the warm-up of {warmup} steps is not shorter than the run, so {now(config, 'optim.lr')} is not reached",
            f"lower {now(config, 'optim.warmup')}, or raise {now(config, 'train.steps')}",
        )


def small_batch(config: Mapping[str, Any], parameters: int | None) -> Diagnosis | None:
    """Few answers per step: noise determines the direction of an update. Presets on CPUs learn with fewer."""
    samples = setting(config, "train.samples") or 0
    answers = samples * ((setting(config, "train.prompts") or 0) + (setting(config, "replay.groups") or 0))
    if answers >= SMALL_BATCH or not answers or (parameters is not None and parameters < LARGE):
        return None
    return Diagnosis(
        "small_batch",
        f"each step has only {answers} answers, so its gradient is noisy (published runs use hundreds to thousands)",
        f"raise {now(config, 'train.prompts')} or {now(config, 'train.samples')}",
    )


def always_equal_reward(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the settings give every answer the same reward, and what to change; None if they do not."""
    reward = setting(config, "reward") or {}
    if reward.get("functions"):
        weights = reward.get("weights") or [1.0]
        return None if any(weights) else ("all reward.weights are 0", "set reward.weights")
    if reward.get("function") or setting(config, "env.name"):
        return None  # an environment may compute its own rewards
    values = {reward.get(name) for name in ("correct", "wrong", "unparsable")}
    accuracy = reward.get("accuracy") and len(values) > 1
    if accuracy or reward.get("format") or reward.get("length"):
        return None
    if not reward.get("accuracy"):
        return "reward.accuracy, reward.format and reward.length are 0", "set reward.accuracy = 1"
    return f"reward.correct, reward.wrong and reward.unparsable are all {values.pop():g}", "set reward.correct = 1"


def far_off_learning_rates(config: Mapping[str, Any], parameters: int) -> Iterator[Diagnosis]:
    large = parameters >= LARGE
    kind = "lora" if setting(config, "lora.rank") else "full"
    trains = any(setting(config, f"train.{key}") for key in ("steps", "epochs", "budget"))
    rates = []
    if trains:
        rates.append(("optim.lr", kind))
        rates += [("optim.matrix_lr", "muon")] if setting(config, "optim.name") == "muon" else []
    if setting(config, "sft.steps"):
        rates.append(("sft.lr", "sft"))
        rates += [("sft.matrix_lr", "muon")] if setting(config, "sft.optimizer") == "muon" else []
    size = f"{parameters / 1e6:,.{1 if parameters < 1e7 else 0}f}M parameters"
    what = {"lora": "LoRA", "muon": "Muon", "sft": "supervised fine-tuning", "full": "training of all weights"}
    for key, kind in rates:
        value = setting(config, key)
        low, high = REASONABLE[kind, large]
        if value is None or low <= value <= high:
            continue
        name, change = ("learning_rate_low", "raise") if value < low else ("learning_rate_high", "lower")
        yield Diagnosis(
            name,
            f"{key} = {value:g} is {'below' if value < low else 'above'} the range of learning rates that work for "
            f"{what[kind]} of a model with {size} ({low:g} to {high:g})",
            f"{change} {key}",
        )
