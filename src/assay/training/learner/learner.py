"""The learner: advantages, updates, learning rate; the supervised warm start; and the reference model of a KL term.

The reference is a model that the settings name, or the policy as it was after the warm start. It stays fixed unless the
settings make it dynamic: a copy of the policy every N steps, or an exponential moving average of the policies
(`Updater.update_reference`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from assay.algos import Algorithm, Scorers
from assay.checks.settings import PRESET
from assay.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig
from assay.engine.remote.scoring import ScoringClient
from assay.mesh import Mesh, reshard
from assay.models import PolicyModel, load_model, save_model
from assay.models.base import LoadReport
from assay.models.lora import weight_shapes
from assay.runs import checkpoints
from assay.runs.console import Console
from assay.runs.resolve import resolve_model
from assay.text import Renderer, Tokenizer, load_tokenizer
from assay.training.checkpoint import FILE_BYTES, REFERENCE
from assay.training.learner.critic import Critic
from assay.training.learner.optim import lr_factor, make_optimizer
from assay.training.learner.pack import Row
from assay.training.learner.update import Updater, check_faults
from assay.training.parallel import check_weights, parallelise
from assay.training.progress import RunState, Schedule
from assay.training.sources import PromptStream
from assay.types import Group, Prompt, UserError


@dataclass
class Learner:
    """Computes advantages and updates the policy. `updater` holds the policy, its optimizer and the reference."""

    cfg: TrainConfig
    algo: Algorithm
    updater: Updater
    schedule: Schedule
    critic: Critic | None = None

    @property
    def policy(self) -> PolicyModel:
        return self.updater.policy

    @property
    def mesh(self) -> Mesh:
        return self.updater.mesh

    def credit(self, groups: list[Group]) -> dict[str, float]:
        """Set the advantages of the groups; the algorithm uses the reference and the critic if it needs them."""
        ref_logprobs = partial(self.updater.ref_logprobs, algo=self.algo)
        return self.algo.credit(groups, Scorers(ref_logprobs, self.critic.values if self.critic else None))

    def update(self, batch: list[Group], state: RunState) -> dict[str, float]:
        """Train one step on groups with advantages. Increments `state.step` and updates a dynamic reference."""
        started = time.perf_counter()
        self.updater.expects_more = not self.schedule.done(state, ahead=1)
        lr = self.learning_rate(state)
        metrics = self.updater.update(batch, self.algo, lr, self.cfg.train.passes)
        if self.critic:
            metrics |= self.critic.learn(batch)
        state.step += 1
        self._update_reference(state.step)
        return metrics | {"time/train": time.perf_counter() - started}

    def _update_reference(self, step: int) -> None:
        """After `step` steps: a moving average of the policies, or a copy of the policy every N steps."""
        cfg = self.cfg.algo
        if cfg.reference_ema:
            self.updater.update_reference(cfg.reference_ema)
        elif cfg.refresh_reference and step % cfg.refresh_reference == 0:
            self.updater.update_reference(0.0)

    def learning_rate(self, state: RunState) -> float:
        cfg = self.cfg.optim
        progress, steps = self.schedule.progress(state), self.schedule.total_steps
        return cfg.lr * cfg.lr_scale * lr_factor(cfg.schedule, progress, steps, cfg.warmup, cfg.min_lr_ratio)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the policy; weights and optimizer state of the critic."""
        reshard(self.policy)
        return chain(self.policy.named_parameters(), self.critic.tensors().items() if self.critic else ())


# Minus the mean log-probability of the solution's tokens is REINFORCE with an advantage of 1.
SFT = Algorithm(AlgoConfig(advantage="none", policy_loss="reinforce", aggregate="token"))


class WarmStart:
    """Supervised fine-tuning on worked solutions. A checkpoint stores `step` and the state of `optimizer`."""

    def __init__(
        self,
        updater: Updater,
        renderer: Renderer,
        prompts: Sequence[Prompt],
        cfg: SftConfig,
        seed: int,
        max_skipped: int = 0,
        step: int = 0,
    ) -> None:
        """`max_skipped`: number of consecutive skipped steps that ends the run, as in the training loop; 0: no limit.

        `step`: completed steps of a resumed warm start.
        """
        optim = OptimConfig(name=cfg.optimizer, lr=cfg.lr, matrix_lr=cfg.matrix_lr, weight_decay=cfg.weight_decay)
        optim.offload = getattr(updater.optimizer, "offload", False)  # moments are where those of RL are
        self.optimizer = make_optimizer(updater.policy, optim, section="sft")
        self.cfg, self.renderer, self.step, self.max_skipped = cfg, renderer, step, max_skipped
        self.updater = replace(updater, optimizer=self.optimizer, temperature=1.0, expects_more=False)
        self.stream = PromptStream(prompts, seed)
        self.stream.cursor = step * cfg.batch
        self.skipped = 0  # consecutive
        self.paused = False

    @property
    def done(self) -> bool:
        return self.step >= self.cfg.steps

    def run(self) -> Iterator[dict[str, float]]:
        """Train, and yield the metrics of each step, until the warm start is done or `paused` is set.

        Weights and optimizer may be saved only after the iteration: until then they can be in another process.
        """
        self.paused = False
        with self.updater.working():
            while not (self.done or self.paused):
                yield self._train_step()
                if self.skipped:
                    check_faults(self.updater.faults, self.skipped, self.max_skipped)

    def _train_step(self) -> dict[str, float]:
        cfg = self.cfg
        rows = solution_rows(self.stream.next(cfg.batch), self.renderer, self.updater.policy.max_length)
        lr = cfg.lr * lr_factor("linear", self.step, cfg.steps, cfg.warmup)
        sums, norm, skipped = self.updater.step(rows, SFT, lr)
        self.step += 1
        self.skipped = self.skipped + 1 if skipped else 0
        return {
            "sft/loss": float(sums.losses["loss/policy"]),
            "sft/grad_norm": norm,
            "sft/lr": lr,
            "sft/skipped": float(skipped),
        }


def solution_rows(prompts: Sequence[Prompt], renderer: Renderer, max_length: int) -> list[Row]:
    """One row per prompt, whose trained tokens are the solution."""
    rows = []
    for prompt in prompts:
        if prompt.worked_text is None:
            raise UserError(
                f"prompt {prompt.id} has no worked solution to train on: set sft.steps = 0, or add solutions"
            )
        ids, mask = renderer.worked_example(prompt)
        if not any(mask[:max_length]):
            raise UserError(
                f"prompt {prompt.id} fills the context of {max_length} tokens, without its solution: remove or shorten "
                "it (fewer few-shot examples?), or raise model.max_length"
            )
        rows.append(Row(ids[:max_length], mask[:max_length], [0.0] * min(len(ids), max_length), 1.0, 0.0))
    weights = SFT.token_weights(torch.tensor([sum(row.trained) for row in rows])).tolist()
    return [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_reference(
    updater: Updater,
    cfg: TrainConfig,
    tokenizer: Tokenizer,
    console: Console,
    run_path: Path | None = None,
    step: int = 0,
) -> None:
    """Load the model that the settings name, or the reference of a resumed run as of its checkpoint of `step`.

    `run_path`: None for a run without a checkpoint; unless the settings name a model, `freeze_reference` sets its
    reference later. For adapters without a warm start, the reference is the policy's own base.
    """
    if cfg.reference.url:
        if cfg.algo.reference or cfg.algo.dynamic_reference:
            raise UserError(
                "reference.url names the reference, which does not change: remove it, or algo.reference, "
                "algo.refresh_reference and algo.reference_ema"
            )
        updater.served = ScoringClient(cfg.reference, updater.temperature)
        return
    saved = None if run_path is None else checkpoints.folder(run_path, step) / REFERENCE
    if saved is not None and cfg.algo.dynamic_reference:
        set_reference(updater, cfg, str(saved))
    elif cfg.algo.reference.startswith(PRESET):
        raise UserError(f"algo.reference = {cfg.algo.reference!r} is untrained: name a folder, or run:NAME@last")
    elif cfg.algo.reference:
        source = updater.mesh.on_main(lambda: resolve_model(cfg.algo.reference, Path(cfg.runs_dir)))
        with console.loading(f"the reference {cfg.algo.reference}") as report:
            same_tokenizer = has_same_tokenizer(source, tokenizer, cfg.algo.reference)
            set_reference(updater, cfg, source, same_tokenizer, report)
    elif run_path is not None and (run_path / REFERENCE).exists():
        if problems := updater.mesh.on_main(lambda: checkpoints.problems(run_path / REFERENCE)):
            raise UserError(f"{problems[0]}: resume with --algo.reference run:{run_path}@0, which is the same model")
        set_reference(updater, cfg, str(run_path / REFERENCE))
    elif run_path is not None and updater.policy.lora is not None and not cfg.sft.steps:
        updater.reference = updater.policy
    elif run_path is not None:
        raise UserError(
            f"{run_path} has no reference model, because it started without a KL term: name one as algo.reference"
        )


def freeze_reference(updater: Updater, cfg: TrainConfig, run_path: Path) -> None:
    """Make a copy of the policy the reference, unless there is one.

    The copy is saved and loaded again, so that it is bitwise equal to the one a resumed run loads. Untrained adapters
    need no copy: the policy equals its base model, which does not change.
    """
    if updater.reference is not None or updater.served is not None:
        return
    if updater.policy.adapters_are_zero() and not cfg.algo.dynamic_reference:
        updater.reference = updater.policy
        return
    target, is_main = run_path / REFERENCE, updater.mesh.is_main
    with checkpoints.atomic_folder(target) if is_main else nullcontext(target) as folder:
        save_model(updater.policy, folder, shard_bytes=FILE_BYTES, writes=is_main)
    updater.mesh.barrier()
    set_reference(updater, cfg, str(target))


def has_same_tokenizer(source: str, tokenizer: Tokenizer, name: str) -> bool:
    """Whether the model's tokenizer maps all tokens of the policy's to the same ids; False if it has none."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return False
    if not tokenizer.is_part_of(load_tokenizer(source)):
        raise UserError(
            f"algo.reference = {name!r} has another tokenizer than the policy, so token ids differ: "
            "choose a model with the same tokenizer, of any size"
        )
    return True


def set_reference(
    updater: Updater, cfg: TrainConfig, folder: str, same_tokenizer: bool = False, report: LoadReport | None = None
) -> None:
    """Load the reference, freeze it, and shard it like the policy. `report`: see `load_model`.

    Models with the same tokenizer may have vocabularies of different padded sizes; otherwise sizes must be equal.
    """
    device = "cpu" if updater.offload_reference else updater.policy.device
    dtype = updater.dtype
    if cfg.algo.reference_ema:  # 16 bits would round away the small steps of a moving average
        dtype = torch.promote_types(dtype, torch.float32)
    if report is None and updater.progress is not None:
        report = partial(updater.progress, "loading the reference")
    reference = load_model(folder, device=device, dtype=dtype, report=report)
    wanted = updater.policy.vocab_size
    if reference.vocab_size < wanted or (reference.vocab_size > wanted and not same_tokenizer):
        raise UserError(
            f"the reference has {reference.vocab_size} tokens and the policy {wanted}: "
            "choose a reference with the same tokenizer"
        )
    longest = min(cfg.model.max_length or updater.policy.max_length, updater.policy.max_length)
    if reference.max_length < longest:
        raise UserError(
            f"the reference reads at most {reference.max_length} tokens, the policy {longest}: "
            f"set model.max_length = {reference.max_length}, or choose another reference"
        )
    check_weights(updater.mesh, "reference", reference)
    reference = parallelise(reference.requires_grad_(False), updater.mesh, cfg.parallel.mode, updater.dtype)
    if cfg.algo.dynamic_reference and weight_shapes(reference.network) != weight_shapes(updater.policy.network):
        raise UserError("a dynamic reference must have the shape of the policy: choose another algo.reference")
    updater.reference = reference.eval()
