"""The frozen model that a KL term compares the policy with: another model, or the policy as reinforcement found it."""

from __future__ import annotations

import copy
from pathlib import Path

from assay.models import load_model, save_model
from assay.runs.resolve import resolve_model
from assay.train.update import Updater
from assay.types import UserError


def load_reference(updater: Updater, run_path: Path, source: str, runs_dir: str) -> None:
    """The model that the settings name, or the one a resumed run set aside; else `freeze_reference` makes it later."""
    kept = run_path / "reference"
    if not source and not kept.exists():
        return
    place = resolve_model(source, Path(runs_dir)) if source else str(kept)
    reference = load_model(place, device=updater.policy.device, dtype=updater.dtype)
    if reference.vocab_size != updater.policy.vocab_size:
        raise UserError(
            f"the reference has {reference.vocab_size} tokens and the policy {updater.policy.vocab_size}: "
            "choose a reference with the same tokenizer"
        )
    updater.reference = reference.requires_grad_(False).eval()


def freeze_reference(updater: Updater, run_path: Path) -> None:
    """Take the policy as it is now, unless another model is the reference; kept on disk, for resuming."""
    if updater.reference is None:
        save_model(updater.policy, run_path / "reference")
        updater.reference = copy.deepcopy(updater.policy).requires_grad_(False).eval()
