"""Write a decoder as a GGUF file: the inverse of `gguf.py`, for Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from assay.models.base import PolicyModel
from assay.models.decoder import Decoder, llama3_frequencies
from assay.models.gguf import LLAMA3_USUAL, PERMUTED, hf_names
from assay.models.lora import weight_shapes
from assay.models.spec import LLAMA3_SCALING, ModelSpec
from assay.types import UserError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # our families -> of files
Q8_BLOCK = 32  # values that share a scale; matrices with other rows are float16, as llama.cpp stores them
ROPE_FREQS = "rope_freqs.weight"


def check_writable(model: PolicyModel) -> ModelSpec:
    """The spec of a model that a GGUF file can hold; otherwise a `UserError`."""
    advice = "export a Hugging Face folder instead"
    if not isinstance(model, Decoder):
        raise UserError(f"models that run through transformers cannot be written as GGUF: {advice}")
    spec = model.spec
    if spec.family not in ARCHITECTURES or any(spec.windows):
        windows = " with a sliding window" if any(spec.windows) else ""
        raise UserError(f"{spec.family}{windows} cannot be written as GGUF, only {', '.join(ARCHITECTURES)}: {advice}")
    scaling = dict(spec.rope_scaling)
    if scaling.get("rope_type") == "llama3" and any(scaling[key] != value for key, value in LLAMA3_USUAL.items()):
        raise UserError(f"GGUF files have only the usual rope scaling of Llama 3, not this model's: {advice}")
    return spec


def save_gguf(model: PolicyModel, path: Path, kind: str, metadata: Mapping[str, Any]) -> None:
    """Write the file, one weight at a time. `kind`: of matrices, f16 or q8_0; norms and biases are float32.

    `metadata`: further entries, such as those of the tokenizer.
    """
    from gguf import GGUFWriter

    spec = check_writable(model)
    writer = GGUFWriter(path, ARCHITECTURES[spec.family])
    add_metadata(writer, spec, kind)
    for key, value in metadata.items():
        add_value(writer, key, value)
    divisors = rope_divisors(spec)
    shapes = weight_shapes(model)
    names = {weight: name for name, weight in hf_names(shapes, ARCHITECTURES[spec.family], spec.layers).items()}
    if divisors is not None:
        add_tensor_info(writer, ROPE_FREQS, divisors.shape, kind)
    for weight, shape in shapes.items():
        add_tensor_info(writer, names[weight], shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        if divisors is not None:
            writer.write_tensor_data(stored(divisors, kind))
        for weight, tensor in model.weights():
            writer.write_tensor_data(stored(interleaved(spec, weight, tensor.detach()), kind))
    finally:
        writer.close()


def add_metadata(writer: GGUFWriter, spec: ModelSpec, kind: str) -> None:
    from gguf import LlamaFileType, RopeScalingType

    writer.add_file_type(LlamaFileType.MOSTLY_F16 if kind == "f16" else LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(spec.max_length)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.rotated)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)
    scaling = dict(spec.rope_scaling)
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)  # type: ignore[operator]


def rope_divisors(spec: ModelSpec) -> Tensor | None:
    """What Llama 3.x files store of the scaling: the divisor of each frequency."""
    scaling = dict(spec.rope_scaling)
    if scaling.get("rope_type") != "llama3":
        return None
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, spec.rotated, 2).float() / spec.rotated)
    return frequencies / llama3_frequencies(frequencies, **{key: scaling[key] for key in LLAMA3_SCALING})


def interleaved(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """Queries and keys in the order of the rows of their files; see `gguf.write_permuted`."""
    part = name.split(".")[-2]
    if ARCHITECTURES[spec.family] not in PERMUTED or part not in ("q_proj", "k_proj"):
        return tensor
    heads = spec.heads if part == "q_proj" else spec.kv_heads
    halves = tensor.view(heads, 2, spec.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def storage(shape: torch.Size, kind: str) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType

    if len(shape) == 1:
        return GGMLQuantizationType.F32
    quantized = kind == "q8_0" and shape[-1] % Q8_BLOCK == 0
    return GGMLQuantizationType.Q8_0 if quantized else GGMLQuantizationType.F16


def add_tensor_info(writer: GGUFWriter, name: str, shape: torch.Size, kind: str) -> None:
    from gguf import GGML_QUANT_SIZES

    form = storage(shape, kind)
    values, size = GGML_QUANT_SIZES[form]
    writer.add_tensor_info(name, list(shape), np.dtype(np.float32), shape.numel() // values * size, raw_dtype=form)


def stored(tensor: Tensor, kind: str) -> np.ndarray:
    from gguf import quantize

    values = tensor.to("cpu", torch.float32).contiguous()
    if not float(values.abs().max()) <= torch.finfo(torch.float16).max:
        raise UserError("a weight is not finite, or too large for float16: export a Hugging Face folder instead")
    return quantize(values.numpy(), storage(values.shape, kind))


@dataclass(frozen=True)
class Greedy:
    """Greedy continuations of prompts, for a comparison with the model after rounding."""

    sequences: list[list[int]]  # prompts with their continuations
    new: int  # tokens of each continuation
    logits: Tensor  # [tokens of all continuations, vocabulary], which they were chosen by

    @property
    def tokens(self) -> int:
        return len(self.logits)

    @torch.no_grad()
    def compare(self, model: PolicyModel) -> tuple[int, float]:
        """Number of tokens that the other model chooses too, given those before, and largest difference of logits."""
        logits = continuation_logits(model, self.sequences, self.new)
        equal = logits.argmax(-1) == self.logits.argmax(-1)
        return int(equal.sum()), float((logits - self.logits).abs().max())


@torch.no_grad()
def greedy(model: PolicyModel, prompts: Sequence[Sequence[int]], new: int) -> Greedy:
    """Continue each prompt by `new` tokens. All is computed again for every token, which is enough for a few."""
    sequences = [list(prompt)[new - model.max_length :] for prompt in prompts]
    for _ in range(new):
        for sequence, logits in zip(sequences, continuation_logits(model, sequences, 0), strict=True):
            sequence.append(int(logits.argmax()))
    return Greedy(sequences, new, continuation_logits(model, sequences, new))


def continuation_logits(model: PolicyModel, sequences: Sequence[Sequence[int]], new: int) -> Tensor:
    """Logits of the last `new` tokens of each sequence; 0: of the token after each sequence."""
    lengths = [len(sequence) for sequence in sequences]
    hidden = model.hidden(torch.tensor([index for sequence in sequences for index in sequence]), lengths)
    parts = [part[-new - 1 : -1] if new else part[-1:] for part in hidden.split(lengths)]
    return model.unembed(torch.cat(parts))
