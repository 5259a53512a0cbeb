"""The model that a KL term compares the policy with: another model, or the policy as it was at some time.

It stays as reinforcement found it, unless the settings let it follow the policy: all the way every so many steps, or a
little after each (an exponential moving average).
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from assay.config import AlgoConfig, TrainConfig
from assay.mesh import Mesh, reshard
from assay.models import load_model, save_model
from assay.models.lora import merged_weights
from assay.runs import checkpoints
from assay.runs.resolve import resolve_model
from assay.text import Tokenizer, load_tokenizer
from assay.train.checkpoint import FILE_BYTES
from assay.train.checkpoint import REFERENCE as KEPT
from assay.train.components import PRESET, reference_is_dynamic
from assay.train.learner.parallel import parallelise
from assay.train.learner.update import Updater
from assay.train.rank_checks import check_weights
from assay.types import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_reference(
    updater: Updater, cfg: TrainConfig, tokenizer: Tokenizer, run_path: Path | None = None, step: int = 0
) -> None:
    """The model that the settings name, or the one that a resumed run had at its checkpoint of `step`.

    With neither (`run_path` is None for a run that has no checkpoint yet), `freeze_reference` makes it later.
    Adapters without a warm start began with their base, which is at hand.
    """
    saved = None if run_path is None else checkpoints.folder(run_path, step) / KEPT
    if saved is not None and reference_is_dynamic(cfg.algo):
        place(updater, cfg, str(saved))
    elif cfg.algo.reference.startswith(PRESET):
        raise UserError(f"algo.reference = {cfg.algo.reference!r} would be untrained: name a folder, or run:NAME@last")
    elif cfg.algo.reference:
        source = updater.mesh.on_main(lambda: resolve_model(cfg.algo.reference, Path(cfg.runs_dir)))
        place(updater, cfg, source, same_tokens(source, tokenizer, cfg.algo.reference))
    elif run_path is not None and (run_path / KEPT).exists():
        check_kept(run_path, updater.mesh)
        place(updater, cfg, str(run_path / KEPT))
    elif run_path is not None and updater.policy.lora is not None and not cfg.sft.steps:
        updater.reference = updater.policy
    elif run_path is not None:
        raise UserError(
            f"{run_path} kept no reference model, for it began without a KL term: name one as algo.reference"
        )


def check_kept(run_path: Path, mesh: Mesh) -> None:
    """Refuse a reference whose files have changed since, or that has no checksums."""
    if found := mesh.on_main(lambda: checkpoints.problems(run_path / KEPT)):
        raise UserError(f"{found[0]}: resume with --algo.reference run:{run_path}@0, which is the same model")


def freeze_reference(updater: Updater, cfg: TrainConfig, run_path: Path) -> None:
    """Take the policy as it is now, unless another model is the reference.

    It comes back from disk, as it does when the run is resumed: both ways it is the same to the last bit.
    Adapters that are still untrained need no copy: their base is what the policy is now, and stays so.
    """
    if updater.reference is None and updater.policy.adapters_are_zero() and not reference_is_dynamic(cfg.algo):
        updater.reference = updater.policy
    elif updater.reference is None:
        target, is_main = run_path / KEPT, updater.mesh.is_main
        with checkpoints.atomic_folder(target) if is_main else nullcontext(target) as folder:
            save_model(updater.policy, folder, shard_bytes=FILE_BYTES, writes=is_main)
        updater.mesh.barrier()
        place(updater, cfg, str(run_path / KEPT))


def same_tokens(source: str, tokenizer: Tokenizer, name: str) -> bool:
    """Whether its tokenizer knows all that the policy's knows, by the same ids. False where it has none to ask."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return False
    if not tokenizer.is_part_of(load_tokenizer(source)):
        raise UserError(
            f"algo.reference = {name!r} has another tokenizer than the policy, so that tokens do not mean "
            "the same to both: choose one with the same tokenizer, of any size"
        )
    return True


def place(updater: Updater, cfg: TrainConfig, folder: str, same_tokens: bool = False) -> None:
    """Loaded, frozen, and laid out over the ranks as the policy is.

    Models with the same tokenizer may differ in how far their vocabulary is padded; without it, sizes have to tell.
    """
    device = "cpu" if updater.offload_reference else updater.policy.device
    dtype = updater.dtype
    if cfg.algo.reference_ema:  # 16 bits would round the small steps of a moving average away
        dtype = torch.promote_types(dtype, torch.float32)
    reference = load_model(folder, device=device, dtype=dtype)
    wanted = updater.policy.vocab_size
    if reference.vocab_size < wanted or (reference.vocab_size > wanted and not same_tokens):
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
    if reference_is_dynamic(cfg.algo) and shapes(reference) != shapes(updater.policy):
        raise UserError("a reference that is to follow the policy must have its shape: choose another algo.reference")
    updater.reference = reference.eval()


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in merged_weights(getattr(model, "network", model))}


def move_reference(updater: Updater, cfg: AlgoConfig, step: int) -> None:
    """After `step` steps: let the reference follow the policy as far as the settings say."""
    if cfg.reference_ema:
        follow(updater, cfg.reference_ema)
    elif cfg.refresh_reference and step % cfg.refresh_reference == 0:
        follow(updater, 0.0)


@torch.no_grad()
def follow(updater: Updater, keep: float) -> None:
    """reference = keep * reference + (1 - keep) * policy; adapters count as merged."""
    assert updater.reference is not None and updater.reference is not updater.policy, "a reference of its own"
    reshard(updater.reference)
    weights = dict(updater.reference.network.named_parameters())
    for name, weight in merged_weights(updater.policy.network):
        own = weights[name]
        if keep:
            own.mul_(keep).add_(weight.to(own.device, own.dtype), alpha=1.0 - keep)
        else:
            own.copy_(weight)
