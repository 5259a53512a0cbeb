"""The reference model of a KL term: a model that the settings name, or the policy as it was after the warm start.

It stays fixed unless the settings make it dynamic: a copy of the policy every N steps, or an exponential moving average
of the policies (`Updater.update_reference`).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from assay.checks.settings import PRESET
from assay.config import TrainConfig
from assay.engine.remote.scoring import ScoringClient
from assay.models import load_model, save_model
from assay.models.base import LoadReport
from assay.models.lora import weight_shapes
from assay.runs import checkpoints
from assay.runs.console import Console
from assay.runs.resolve import resolve_model
from assay.text import Tokenizer, load_tokenizer
from assay.training.checkpoint import FILE_BYTES
from assay.training.checkpoint import REFERENCE as FOLDER
from assay.training.learner.update import Updater
from assay.training.parallel import check_weights, parallelise
from assay.types import UserError

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
        return serve_reference(updater, cfg)
    saved = None if run_path is None else checkpoints.folder(run_path, step) / FOLDER
    if saved is not None and cfg.algo.dynamic_reference:
        set_reference(updater, cfg, str(saved))
    elif cfg.algo.reference.startswith(PRESET):
        raise UserError(f"algo.reference = {cfg.algo.reference!r} is untrained: name a folder, or run:NAME@last")
    elif cfg.algo.reference:
        source = updater.mesh.on_main(lambda: resolve_model(cfg.algo.reference, Path(cfg.runs_dir)))
        with console.loading(f"the reference {cfg.algo.reference}") as report:
            same_tokenizer = has_same_tokenizer(source, tokenizer, cfg.algo.reference)
            set_reference(updater, cfg, source, same_tokenizer, report)
    elif run_path is not None and (run_path / FOLDER).exists():
        if problems := updater.mesh.on_main(lambda: checkpoints.problems(run_path / FOLDER)):
            raise UserError(f"{problems[0]}: resume with --algo.reference run:{run_path}@0, which is the same model")
        set_reference(updater, cfg, str(run_path / FOLDER))
    elif run_path is not None and updater.policy.lora is not None and not cfg.sft.steps:
        updater.reference = updater.policy
    elif run_path is not None:
        raise UserError(
            f"{run_path} has no reference model, because it started without a KL term: name one as algo.reference"
        )


def serve_reference(updater: Updater, cfg: TrainConfig) -> None:
    """Use the model at `reference.url`."""
    if cfg.algo.reference or cfg.algo.dynamic_reference:
        raise UserError(
            "reference.url names the reference, which does not change: remove it, or algo.reference, "
            "algo.refresh_reference and algo.reference_ema"
        )
    updater.served = ScoringClient(cfg.reference, updater.temperature)


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
    target, is_main = run_path / FOLDER, updater.mesh.is_main
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
