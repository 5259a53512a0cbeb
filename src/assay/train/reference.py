"""The frozen model that a KL term compares the policy with: another model, or the policy as reinforcement found it."""

from __future__ import annotations

from pathlib import Path

from assay.models import load_model, save_model
from assay.models.lora import is_untrained
from assay.runs.resolve import resolve_model
from assay.train.parallel import parallelise
from assay.train.update import Updater
from assay.types import UserError

KEPT = "reference"  # in the run's folder


def load_reference(
    updater: Updater,
    run_path: Path | None,
    source: str,
    runs_dir: str,
    warm_start: bool = False,
    mode: str = "auto",
) -> None:
    """The model that the settings name, or the one that a resumed run set aside.

    With neither (`run_path` is None for a run that has no checkpoint yet), `freeze_reference` makes it later.
    Adapters without a warm start began with their base, which is at hand.
    """
    if source:
        place(updater, resolve_model(source, Path(runs_dir)), mode)
    elif run_path is not None and updater.policy.lora is not None and not warm_start:
        updater.reference = updater.policy
    elif run_path is not None and not (run_path / KEPT).exists():
        raise UserError(
            f"{run_path} kept no reference model, for it began without a KL term: name one as algo.reference"
        )
    elif run_path is not None:
        place(updater, str(run_path / KEPT), mode)


def freeze_reference(updater: Updater, run_path: Path, mode: str = "auto") -> None:
    """Take the policy as it is now, unless another model is the reference.

    It comes back from disk, as it does when the run is resumed: both ways it is the same to the last bit.
    Adapters that are still untrained need no copy: their base is what the policy is now, and stays so.
    """
    if updater.reference is None and is_untrained(updater.policy):
        updater.reference = updater.policy
    elif updater.reference is None:
        save_model(updater.policy, run_path / KEPT, writes=updater.mesh.is_main)
        updater.mesh.barrier()
        place(updater, str(run_path / KEPT), mode)


def place(updater: Updater, folder: str, mode: str) -> None:
    """Loaded, frozen, and laid out over the ranks as the policy is."""
    device = "cpu" if updater.offload_reference else updater.policy.device
    reference = load_model(folder, device=device, dtype=updater.dtype)
    if reference.vocab_size != updater.policy.vocab_size:
        raise UserError(
            f"the reference has {reference.vocab_size} tokens and the policy {updater.policy.vocab_size}: "
            "choose a reference with the same tokenizer"
        )
    reference = parallelise(reference.requires_grad_(False), updater.mesh, mode, updater.dtype)
    updater.reference = reference.eval()
