"""Compare a GRPO step with TRL's GRPOTrainer: the same weights, prompts and sizes, in alternating steps.

    python bench/trl_step.py --shape tiny-llama --prompts 2 --samples 8 --new 64

Takes the options of `assay bench step`. TRL must be installed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers_generate import transformers_model

from assay.bench import hash_reward
from assay.bench.engine import now
from assay.bench.results import summarize, version_of
from assay.bench.step import StepBenchmark, StepOptions, peak_memory, random_prompts, settings_of, step_benchmark
from assay.bench.workload import Workload, command_options
from assay.cli import bench as cli
from assay.cli.main import main, run_command
from assay.types import Progress, UserError

HELP = "Measure GRPO steps of assay and of TRL in turns: seconds per step on the same prompts."
PROGRAM = "python bench/trl_step.py"
SEQUENCES_PER_PASS = 32  # in TRL's forward and backward pass, which holds the logits of all their tokens


def trl_version() -> str:
    version = version_of("trl")
    if version is None or version_of("datasets") is None:
        raise UserError("TRL is not installed: pip install trl")
    return version


def trl_steps(bench: StepBenchmark, our_step: Callable[[], object]) -> list[float]:
    """Seconds of the warm-up step and the timed steps of TRL, from the policy's weights as they are now.

    `our_step` is called before each step but the first, so that other load on the machine affects both.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if seconds:
                our_step()
            self.start = now(bench.device)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(now(bench.device) - self.start)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == bench.work.new for ids in completion_ids), "TRL stopped early"
        return [hash_reward(text) for text in completions]

    policy, steps = bench.learner.policy, 1 + bench.options.steps
    prompts = [prompt.question for prompt in random_prompts(bench.work, policy.vocab_size, steps)]
    with tempfile.TemporaryDirectory(prefix="assay-trl-") as folder:
        trainer = GRPOTrainer(
            model=transformers_model(policy, bench.device, torch.float32),
            reward_funcs=reward,
            args=trl_config(bench, steps, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=bench.collector.renderer.tokenizer.hf,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert len(seconds) == steps
    return seconds


def trl_config(bench: StepBenchmark, steps: int, folder: str) -> Any:
    """The same settings for TRL; all prompts of a step in one update. Other settings keep TRL's defaults."""
    from trl import GRPOConfig

    work, cfg = bench.work, bench.cfg
    per_pass = min(work.sequences, SEQUENCES_PER_PASS)
    if work.sequences % per_pass:
        raise UserError(f"{work.sequences} sequences are not a multiple of {per_pass}, TRL's batch size")
    return GRPOConfig(
        output_dir=folder,
        use_cpu=bench.device.type == "cpu",
        bf16=cfg.dtype == "bfloat16",
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=work.sequences // per_pass,
        num_generations=work.samples,
        max_completion_length=work.new,
        generation_kwargs={"min_new_tokens": work.new},  # no end token: every completion reaches its length
        temperature=work.temperature,
        learning_rate=cfg.optim.lr,
        beta=cfg.algo.kl_coef or 0.0,
        max_steps=steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=work.seed,
    )


def measure_both(
    work: Workload, options: StepOptions, progress: Progress | None = None, steps_of_trl: Any = trl_steps
) -> list[dict[str, Any]]:
    """A row for assay and a row for TRL."""
    command = [*PROGRAM.split(), *command_options(work), *command_options(options)]
    with step_benchmark(work, options, progress) as bench:
        bench.step()
        bench.memory = peak_memory(bench.device)  # before TRL allocates any
        seconds = steps_of_trl(bench, bench.step)
        ours = bench.row(command)
        chosen = work.settings() | settings_of(bench.cfg, options, bench.learner.updater)
    theirs = {
        "id": ours["id"],
        "system": "trl",
        "version": version_of("trl"),
        **summarize("step_s", "first_step_s", seconds, digits=4),
        **chosen,
        "command": shlex.join(command),
    }
    return [ours, theirs]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_step_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.train_only or args.table or args.peer_rows:
        raise UserError("--train-only, --table and --peer-rows are options of assay bench step: leave them out")
    trl_version()
    work, options = cli.step_work(args), cli.step_options(args)
    assert isinstance(work, Workload)
    words = [*PROGRAM.split(), *command_options(work), *cli.step_words(args, options)]
    jobs = [(" ".join((cli.describe_step(work), *how.set)), partial(measure_both, work, how)) for how in options]
    cli.print_step_rows(cli.run_jobs(args, jobs, words, cli.STEP_MEMORY))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(command=partial(run_command, sys.modules[__name__], PROGRAM)))
