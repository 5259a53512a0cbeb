"""Save a model as a Hugging Face folder for transformers, vLLM and others, and adapters as a folder for PEFT."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.mesh import full_tensor
from assay.models.base import HFModel, PolicyModel, fingerprint
from assay.models.decoder import Decoder
from assay.models.load import read_json, reported_bars
from assay.models.lora import adapted_layers, is_adapter, merged_state, weight_shapes
from assay.models.spec import spec_to_hf
from assay.types import UserError

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

SHARD_BYTES = 5 * 10**9
WRITERS = 4  # files that are written, and held in memory, at the same time


def save_model(
    model: PolicyModel,
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    eos_ids: Sequence[int] = (),
    pad_id: int | None = None,
    bos_id: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    writes: bool = True,
) -> None:
    """Save config, generation config and weights, cast to `dtype` if given. The tokenizer is saved separately.

    If weights are sharded over ranks, all ranks call this, and one of them `writes`.
    """
    folder = Path(folder)
    if not writes:
        for _ in model.weights() if isinstance(model, Decoder) else merged_state(model.network):
            pass  # takes part in gathering the weights
        return
    dtype = dtype or next(model.parameters()).dtype
    eos = list(eos_ids)
    special = {"eos_token_id": eos[0] if len(eos) == 1 else eos or None, "pad_token_id": pad_id, "bos_token_id": bos_id}
    tokens = {key: value for key, value in special.items() if value is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drop_old_weights(folder)
        if isinstance(model, HFModel):
            save_fallback(model, folder, dtype, tokens, shard_bytes)
        elif isinstance(model, Decoder):
            save_config(model, folder, dtype, special)
            write_json(folder / "generation_config.json", tokens)
            write_weights(folder, model.weights(), weight_shapes(model), dtype, shard_bytes)
        else:
            raise TypeError(f"cannot save a {type(model).__name__}")
    except OSError as error:
        raise UserError(
            f"cannot write the model to '{folder}' ({error}): choose a folder that can be written"
        ) from error


def save_config(model: PolicyModel, folder: Path, dtype: torch.dtype, special: Mapping[str, Any] | None = None) -> None:
    """Save config.json alone. `special`: ids of special tokens."""
    if isinstance(model, HFModel):
        model.hf.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    else:
        assert isinstance(model, Decoder)
        config = {
            **spec_to_hf(model.spec),
            **(special or {}),  # also if None: otherwise the defaults of the family (1 and 2 for Llama) would apply
            # Without it, transformers warns of a possibly wrong tokenizer.
            "transformers_version": version("transformers"),
        }
    write_json(folder / "config.json", {**config, "dtype": name_of(dtype), "torch_dtype": name_of(dtype)})


def save_fallback(model: HFModel, folder: Path, dtype: torch.dtype, tokens: dict[str, Any], shard_bytes: int) -> None:
    hf = model.hf
    if hf.generation_config is not None:
        for key, value in tokens.items():
            setattr(hf.generation_config, key, value)
    with reported_bars(None):
        hf.save_pretrained(folder, state_dict=cast_state(merged_state(hf), dtype), max_shard_size=shard_bytes)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**config, "dtype": name_of(dtype)})


def cast_state(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast floating-point weights. Tied ones still share memory; otherwise they would be written twice."""
    done: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in state.values():
        done.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return {name: done[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Write one model.safetensors, or numbered shards with an index; a few shards are in memory at a time."""
    plan = shard_plan("model", {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}, shard_bytes)
    write_files(in_shards(folder, plan, ((name, weight.detach().to("cpu", dtype)) for name, weight in weights)))
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def shard_plan(stem: str, sizes: dict[str, int], shard_bytes: int) -> StateDictSplit:
    """Which file holds which tensor, as transformers names and divides files. `sizes`: in bytes."""
    from huggingface_hub import split_state_dict_into_shards_factory

    pattern = f"{stem}{{suffix}}.safetensors"
    return split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, filename_pattern=pattern, max_shard_size=shard_bytes
    )


def in_shards(
    folder: Path, plan: StateDictSplit, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Files with their tensors, each as soon as all its tensors are there."""
    begun: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        file = plan.tensor_to_filename[name]
        begun[file][name] = tensor.contiguous()
        if len(begun[file]) == len(plan.filename_to_tensors[file]):
            yield folder / file, begun.pop(file)


def write_files(files: Iterable[tuple[Path, dict[str, Tensor]]]) -> None:
    """Write files in several threads: one alone does not use the bandwidth of a disk. Raises the first error."""
    written: list[Path] = []
    with ThreadPoolExecutor(WRITERS) as threads:
        writing: set[Future[None]] = set()
        for path, tensors in files:
            writing.add(threads.submit(save_file, tensors, path, {"format": "pt"}))
            written.append(path)
            del tensors  # only its writer keeps it
            if len(writing) == WRITERS:
                done, writing = wait(writing, return_when=FIRST_COMPLETED)
                for writer in done:
                    writer.result()
        for writer in writing:
            writer.result()
    for path in written:  # after all threads: reading the umask of the process changes it for a moment
        apply_umask(path)


def drop_old_weights(folder: Path) -> None:
    """Remove weights of an earlier save, which would be loaded instead if their file names differ."""
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"):
        for file in folder.glob(pattern):
            file.unlink()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def apply_umask(file: Path) -> None:
    """Set the permissions of a usual new file: safetensors creates files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


PREFIX = "base_model.model."  # of weight names in PEFT
WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"  # fingerprint of the base weights that the adapters were trained on


def adapter_weights(policy: PolicyModel) -> dict[str, nn.Parameter]:
    return {PREFIX + name: weight for name, weight in policy.network.named_parameters() if is_adapter(name)}


def save_adapter(policy: PolicyModel, folder: Path, writes: bool = True) -> None:
    """Save the adapters as a folder for PEFT. If they are sharded over ranks, all call this, and one `writes`."""
    lora = policy.lora
    assert lora is not None, "a policy without adapters"
    tensors = {
        name: full_tensor(weight.detach()).cpu().contiguous() for name, weight in adapter_weights(policy).items()
    }
    base = base_fingerprint(policy)
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})  # with several entries their order varies
    apply_umask(folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in adapted_layers(policy.network)}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", config)
    write_json(folder / BASE, {"fingerprint": base})


@torch.no_grad()
def load_adapter(policy: PolicyModel, folder: Path) -> None:
    """Load saved adapters into a policy with the base weights that they were trained on."""
    weights = adapter_weights(policy)
    with safe_open(folder / WEIGHTS, framework="pt") as stored:
        saved = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (a file, not a dict)
        metadata = stored.metadata() or {}
    if {n: w.shape for n, w in saved.items()} != {n: w.shape for n, w in weights.items()}:
        raise UserError(f"the adapters in {folder} have other targets or another rank: use the run's lora settings")
    base = metadata.get("base")  # of checkpoints of earlier versions
    if base is None:
        base = read_json(folder / BASE, f"'{folder / BASE}' is missing: restore it from a backup").get("fingerprint")
    if base != base_fingerprint(policy):
        raise UserError(f"the adapters in {folder} were trained on other base weights: restore the original base model")
    for name, weight in weights.items():
        weight.copy_(saved[name])


def base_fingerprint(policy: PolicyModel) -> str:
    with policy.adapters_off():
        return fingerprint(policy.weights())
