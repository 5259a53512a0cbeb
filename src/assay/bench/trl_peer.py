"""The same step done by TRL's GRPO trainer, to compare with."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from assay.bench.chance import chance
from assay.bench.engine import synchronise
from assay.bench.results import version_of
from assay.bench.trainer import BenchedRun, random_prompts
from assay.bench.transformers_peer import transformers_model
from assay.types import UserError

SEQUENCES_AT_ONCE = 32  # in TRL's forward and backward pass, which holds logits of all their tokens


def trl_version() -> str:
    version = version_of("trl")
    if version is None or version_of("datasets") is None:
        raise UserError("--peer trl needs the package trl, which is not installed: pip install trl")
    return version


def trl_steps(run: BenchedRun, steps: int, our_turn: Callable[[], None]) -> list[float]:
    """Seconds of 1 + `steps` steps of TRL on our prompts, from our weights as they are now.

    Before each but the first it is our turn, so that whatever slows the machine slows both.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if seconds:
                our_turn()
            synchronise(run.device)
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronise(run.device)
            seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == run.work.new for ids in completion_ids), "TRL stopped early"
        return [chance(text) for text in completions]

    policy = run.learner.policy
    prompts = [prompt.question for prompt in random_prompts(run.work, policy.vocab_size, 1 + steps)]
    with tempfile.TemporaryDirectory(prefix="assay-trl-") as folder:
        trainer = GRPOTrainer(
            model=transformers_model(policy, run.device, torch.float32),
            reward_funcs=reward,
            args=trl_config(run, steps, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=run.collector.renderer.tokenizer.hf,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert len(seconds) == 1 + steps
    return seconds


def trl_config(run: BenchedRun, steps: int, folder: str) -> Any:
    """Our settings in TRL's words; the rest as it stands there. All prompts of a step in one update."""
    from trl import GRPOConfig

    work, cfg = run.work, run.cfg
    at_once = min(work.sequences, SEQUENCES_AT_ONCE)
    if work.sequences % at_once:
        raise UserError(f"TRL takes {at_once} sequences at once: {work.sequences} of them cannot be split evenly")
    return GRPOConfig(
        output_dir=folder,
        use_cpu=run.device.type == "cpu",
        bf16=cfg.dtype == "bfloat16",
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=work.sequences // at_once,
        num_generations=work.samples,
        max_completion_length=work.new,
        generation_kwargs={"min_new_tokens": work.new},  # no end token: every answer reaches its length
        temperature=work.temperature,
        learning_rate=cfg.optim.lr,
        beta=cfg.algo.kl_coef or 0.0,
        max_steps=1 + steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=work.seed,
    )
