"""GGUF files: loading them as decoders, and writing decoders of Llama, Mistral, Qwen2 and Qwen3.

The spec comes from the metadata. Weights are dequantised one at a time under their Hugging Face names.

Names come from the table of the gguf package. The rest is our own: transformers knows neither SmolLM 3, OLMo 2 and
GLM 4 nor the frequencies of Llama 3, and needs twice the memory (Gemma 3 270M in bfloat16: peak of 2.7 GB, not 1.3 GB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from assay.models.base import LoadOptions, PolicyModel
from assay.models.decoder import Decoder, WeightLoader, llama3_frequencies
from assay.models.lora import weight_shapes
from assay.models.spec import FAMILIES, LLAMA3_SCALING, Family, ModelSpec, checked_size
from assay.types import UserError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderTensor

ARCHITECTURES = {  # of GGUF files -> our families. (Mistral's files are Llama's.)
    **{name: name for name in ("llama", "qwen2", "qwen3", "smollm3", "olmo2", "phi3", "glm4")},
    "gemma3": "gemma3_text",
}
PERMUTED = ("llama", "smollm3")  # their files have the rows of queries and keys in the order of interleaved pairs
LLAMA3_USUAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PLAIN = ("F32", "F16", "BF16")
ROPE_FREQS = "rope_freqs.weight"  # the divisor of each rotary frequency, in files of Llama 3.x
VALUES_AT_ONCE = 1 << 24  # 64 MiB in float32


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def load_gguf(path: Path, options: LoadOptions) -> Decoder | None:
    """The model in a file, or None if `Decoder` does not cover its architecture."""
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    spec = spec_from_gguf(reader, tensors, path)
    if spec is None:
        return None
    if spec.parameters > 8 * path.stat().st_size:  # every format takes at least a bit per weight
        raise UserError(f"'{path}' asks for {spec.parameters:,} weights, which it is too small to hold: fetch it again")
    loader = WeightLoader(spec, f"the model in '{path}'", options)
    names = hf_names(loader.targets, value_of(reader, "general.architecture"), spec.layers)
    if spec.tied:
        names["output.weight"] = "model.embed_tokens.weight"
    for name, tensor in tensors.items():
        if name == ROPE_FREQS or (name == "token_embd.weight" and spec.tied and "output.weight" in tensors):
            continue  # part of the spec; of the two copies of a tied embedding, the output is more precise
        part = name.split(".")[-2]
        write: Callable[[ReaderTensor, Tensor], None] = write_rows
        if spec.family in PERMUTED and part in ("attn_q", "attn_k"):
            write = partial(write_permuted, spec)
        elif spec.design.norm_offset and part.endswith("norm"):
            write = partial(write_norm, spec)
        try:
            loader.load(names.get(name, name), tensor.shape.tolist()[::-1], partial(write, tensor))
        except (NotImplementedError, KeyError) as error:
            raise UserError(f"'{path}': {name} is stored as {tensor.tensor_type.name}, which cannot be read") from error
    return loader.finish()


def open_gguf(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("reading a GGUF file needs the gguf package: pip install gguf") from error

    class PlainReader(GGUFReader):
        """Reads the file through a plain array: slices of numpy's memmap class are several times slower."""

        @property
        def data(self) -> Any:
            return self.__dict__["data"]

        @data.setter
        def data(self, mapped: Any) -> None:
            self.__dict__["data"] = np.asarray(mapped)

    try:
        reader = PlainReader(path)
    except (ValueError, IndexError, OSError, KeyError) as error:
        raise UserError(f"'{path}' is damaged or incomplete ({error}): fetch it again") from error
    if int(value_of(reader, "split.count", 1)) > 1:
        raise UserError(
            f"'{path}' is one part of a split model: join the parts into one .gguf (llama-gguf-split --merge)"
        )
    return reader


def value_of(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def gguf_spec(path: Path) -> ModelSpec | None:
    """The spec of the model in a file, whose weights are not read."""
    reader = open_gguf(path)
    return spec_from_gguf(reader, {tensor.name: tensor for tensor in reader.tensors}, path)


def spec_from_gguf(reader: GGUFReader, tensors: dict[str, ReaderTensor], path: Path) -> ModelSpec | None:
    """The spec, or None if `Decoder` does not cover the architecture."""
    architecture = value_of(reader, "general.architecture")

    def number(key: str, default: Any = None) -> Any:
        value = value_of(reader, f"{architecture}.{key}", default)
        if value is None:
            raise UserError(f"'{path}' lacks {architecture}.{key} in its metadata: fetch it again")
        return value

    layers = checked_size(number("block_count", 1), "block_count", f"'{path}'")
    if architecture not in ARCHITECTURES or value_of(reader, f"{architecture}.expert_count", 0):
        return None
    name = ARCHITECTURES[architecture]
    family = FAMILIES[name]
    if "token_embd.weight" not in tensors:
        raise UserError(f"'{path}' has no token embedding: it is not a complete language model")

    def size(key: str, default: Any = None) -> int:
        return checked_size(number(key, default), key, f"'{path}'")

    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden // heads)
    rotary = size("rope.dimension_count", head_dim)
    if rotary != head_dim and not family.partial_rotary:
        return None
    return ModelSpec(
        family=name,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=size("feed_forward_length"),
        max_length=size("context_length"),
        rope_theta=shortest(number("rope.freq_base", 10_000.0)),
        rope_scaling=rope_scaling(number, tensors, rotary, path),
        norm_eps=shortest(number("attention.layer_norm_rms_epsilon", 1e-6)),
        tied=is_tied(tensors),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        windows=windows(number, family, layers),
        local_rope_theta=shortest(number("rope.freq_base_swa", family.local_rope_theta)),
        no_rope=tuple(range(3, layers, 4)) if family.no_rope else (),  # not in the metadata: as in llama.cpp
        rotary=0 if rotary == head_dim else rotary,
        # Not in the metadata: of Gemma 3's sizes, the one with 62 layers has another scale.
        query_scalar=hidden // heads if family.query_scalar and layers == 62 else 0,
    )


def windows(number: Callable[..., Any], family: Family, layers: int) -> tuple[int, ...]:
    """The sliding window of each layer; which ones have it is rarely in the metadata."""
    window = int(number("attention.sliding_window", 0)) if family.windows else 0
    if not window or family.windows == "all":
        return (window,) * layers if window else ()
    pattern = number("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % int(pattern) != 0 for layer in range(layers)]
    return tuple(window * bool(slides) for slides in pattern)


def shortest(value: float) -> float:
    """Metadata are float32: 9.99999974e-06 stands for 1e-05."""
    return float(str(np.float32(value)))


def rope_scaling(
    number: Callable[..., Any], tensors: dict[str, ReaderTensor], rotary: int, path: Path
) -> tuple[tuple[str, Any], ...]:
    kind = "longrope" if "rope_factors_long.weight" in tensors else number("rope.scaling.type", "none")
    if ROPE_FREQS in tensors:
        divisors = dequantise(tensors[ROPE_FREQS])
        return llama3_scaling(divisors, float(number("rope.freq_base", 10_000.0)), rotary, path)
    if kind == "linear":
        return (("factor", float(number("rope.scaling.factor"))), ("rope_type", "linear"))
    if kind != "none":
        raise UserError(f"'{path}' uses '{kind}' rope scaling, which is not supported: only linear and llama3 are")
    return ()


def llama3_scaling(divisors: Tensor, theta: float, rotary: int, path: Path) -> tuple[tuple[str, Any], ...]:
    """Llama 3.x files store the divisor of each frequency: find the parameters that give these divisors."""
    if bool((divisors == 1.0).all()):
        return ()
    rule: dict[str, Any] = {"factor": float(divisors.max()), **LLAMA3_USUAL}
    expected = llama3_divisors(theta, rotary, rule)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise UserError(f"'{path}' has unknown rotary frequencies: load the original Hugging Face folder")
    return (*((key, rule[key]) for key in sorted(LLAMA3_SCALING)), ("rope_type", "llama3"))


def llama3_divisors(theta: float, rotary: int, rule: Mapping[str, Any]) -> Tensor:
    frequencies = 1.0 / theta ** (torch.arange(0, rotary, 2).float() / rotary)
    return frequencies / llama3_frequencies(frequencies, **rule)


def is_tied(tensors: dict[str, ReaderTensor]) -> bool:
    """Whether there is no output head, or it equals the embedding up to rounding in a sample of rows."""
    if "output.weight" not in tensors:
        return True
    pair = (tensors["token_embd.weight"], tensors["output.weight"])
    if not np.array_equal(pair[0].shape, pair[1].shape):
        return False
    stride = max(1, int(pair[0].shape[1]) // 2048)
    embedding, output = (dequantise(tensor, slice(None, None, stride)) for tensor in pair)
    exact = all(tensor.tensor_type.name in PLAIN for tensor in pair)
    tolerance = 0.01 if exact else 0.3  # unrelated matrices differ by 1.4
    return bool((embedding - output).norm() <= tolerance * output.norm())


def dequantise(tensor: ReaderTensor, rows: slice = slice(None)) -> Tensor:
    from gguf import dequantize

    values = np.asarray(dequantize(tensor.data[rows], tensor.tensor_type), dtype=np.float32)
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # a read-only view of the file


def hf_names(weights: Iterable[str], architecture: str, layers: int) -> dict[str, str]:
    """Hugging Face names of weights, by their names in files of the architecture."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, layers)
    return {str(table.get_name(weight, (".weight", ".bias"))): weight for weight in weights}


def write_rows(tensor: ReaderTensor, target: Tensor) -> None:
    """Dequantise some rows at a time: a large embedding is never in memory twice."""
    step = max(1, VALUES_AT_ONCE // max(1, target[0].numel()))
    for start in range(0, len(target), step):
        rows = slice(start, start + step)
        target[rows].copy_(dequantise(tensor, rows))


def write_norm(spec: ModelSpec, tensor: ReaderTensor, target: Tensor) -> None:
    """Files have the weights with the offset that the model adds."""
    target.copy_(dequantise(tensor) - spec.design.norm_offset)


def write_permuted(spec: ModelSpec, tensor: ReaderTensor, target: Tensor) -> None:
    """Some files interleave the two halves of each head's rotary pairs; Hugging Face separates the halves."""
    heads = spec.heads if ".attn_q." in tensor.name else spec.kv_heads
    interleaved = dequantise(tensor)
    pairs = interleaved.view(heads, spec.head_dim // 2, 2, *interleaved.shape[1:])
    target.copy_(pairs.transpose(1, 2).reshape(interleaved.shape))


# -- writing

WRITTEN = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # our families -> of files
Q8_BLOCK = 32  # values that share a scale; matrices with other rows are float16, as llama.cpp stores them


def check_writable(model: PolicyModel) -> ModelSpec:
    """The spec of a model that a GGUF file can hold; otherwise a `UserError`."""
    advice = "export a Hugging Face folder instead"
    if not isinstance(model, Decoder):
        raise UserError(f"models that run through transformers cannot be written as GGUF: {advice}")
    spec = model.spec
    if spec.family not in WRITTEN or any(spec.windows):
        windows = " with a sliding window" if any(spec.windows) else ""
        raise UserError(f"{spec.family}{windows} cannot be written as GGUF, only {', '.join(WRITTEN)}: {advice}")
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
    writer = GGUFWriter(path, WRITTEN[spec.family])
    add_metadata(writer, spec, kind)
    for key, value in metadata.items():
        add_value(writer, key, value)
    scaling, divisors = dict(spec.rope_scaling), None
    if scaling.get("rope_type") == "llama3":
        divisors = llama3_divisors(spec.rope_theta, spec.rotated, {key: scaling[key] for key in LLAMA3_SCALING})
    shapes = weight_shapes(model)
    names = {weight: name for name, weight in hf_names(shapes, WRITTEN[spec.family], spec.layers).items()}
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


def interleaved(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """Queries and keys in the order of the rows of their files; see `write_permuted`."""
    part = name.split(".")[-2]
    if WRITTEN[spec.family] not in PERMUTED or part not in ("q_proj", "k_proj"):
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
