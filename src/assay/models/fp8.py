"""Weights and activations of matrix products in 8 bits (e4m3), for generation on GPUs that multiply them: Hopper, Ada.

A weight has one scale, and activations have one per row: the largest absolute value becomes the largest number of
e4m3. (These are floating-point numbers, so scales by row hardly make weights more precise.) Weights are quantized when
they are copied into the engine, from the engine's dtype; activations before each product. The output head is quantized
only on request ("fp8_head"), and with a scale per row of its weights. In SmolLM2-135M, the layers in 8 bits change
log-probabilities by 0.18 on average, the head alone by 0.10, and with one scale by as much as the layers.

The output of attention gets a constant scale, so that the kernel that computes it writes codes at once: it is a mean of
values, and no value exceeds a bound that follows from the weights (`largest_output`).

A product multiplies codes alone, and the operation that reads its result applies the scales (`Scaled`): products with
scales by row are slower, on an H200 up to 2.6 times for 64 rows.

The trainer computes the same codes to check what the engine serves (`served_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.types import UserError

LARGEST = 448.0  # of e4m3
LEAST = 1e-12  # scales of rows of zeros
MULTIPLE = 16  # of both sizes of a matrix
CAPABILITY = (8, 9)  # of CUDA devices with products in 8 bits
SCALES = "_scales"  # end of the name of a weight's scales
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
QUANTIZED_ROWS = 1 << 14  # of the head at once


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations [N, D] as codes, and the scales [N] of their rows, or a scale [1] of all."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Scaled:
    """The numbers `values` [N, D], times the scales of rows [N] or [1] and of parts of the columns, plus a bias [D]."""

    values: Tensor
    rows: Tensor
    parts: Tensor  # scales
    sizes: Sequence[int]  # of the parts
    bias: Tensor | None

    def tensor(self) -> Tensor:
        columns = torch.cat([scale.expand(size) for scale, size in zip(self.parts, self.sizes, strict=True)])
        wide = self.values.float() * self.rows[:, None] * columns
        return (wide if self.bias is None else wide + self.bias).to(self.values.dtype)


def is_quantized(name: str) -> bool:
    """Whether the weight of this Hugging Face name is that of a linear layer of a block."""
    return name.endswith("_proj.weight")


def quantize(x: Tensor) -> Quantized:
    """Rows of `x` [N, D], with scales in float32."""
    scales = x.abs().amax(1).float().clamp(min=LEAST) / LARGEST
    return Quantized(codes_of(x, scales[:, None]), scales)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and the scale [1]."""
    scale = weight.abs().amax().float().clamp(min=LEAST).view(1) / LARGEST
    return codes_of(weight, scale), scale


def codes_of(x: Tensor, scale: Tensor) -> Tensor:
    return to_fp8(x.float() * scale.reciprocal())


def served_weights(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, head: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """What an engine with quantized weights serves: codes and scales of those, and the others in its dtype.

    `head`: the output head is quantized, too; one that is tied to the embedding is served as an additional weight.
    """
    tied: Tensor | None = None
    for name, weight in weights:
        weight = weight.detach().to(dtype)
        if head and name == HEAD:
            yield from named(HEAD, *quantize_head(weight))
            head = False
        elif is_quantized(name):
            yield from named(name, *quantize_weight(weight))
        else:
            tied = weight if name == EMBEDDING else tied
            yield name, weight
    if head and tied is not None:
        yield from named(HEAD, *quantize_head(tied))


def named(name: str, codes: Tensor, scales: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, codes
    yield name + SCALES, scales


def quantize_head(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and the scales of the rows."""
    parts = [quantize(part) for part in weight.split(QUANTIZED_ROWS)]
    return torch.cat([as_bytes(part.codes) for part in parts]).view(torch.float8_e4m3fn), torch.cat(
        [part.scales for part in parts]
    )


class Fp8Head:
    """The output head: codes [V, D], and a scale of each row."""

    def __init__(self, tokens: int, hidden: int, device: torch.device) -> None:
        if tokens % MULTIPLE or hidden % MULTIPLE:
            raise UserError(
                f"engine.quantize = 'fp8_head' needs a vocabulary and a hidden size that are multiples of {MULTIPLE}, "
                f"not {tokens} and {hidden}: use 'fp8'"
            )
        self.codes = torch.zeros(tokens, hidden, device=device, dtype=torch.float8_e4m3fn)
        self.scales = torch.zeros(tokens, device=device)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def copy_(self, weight: Tensor) -> None:
        codes, scales = quantize_head(weight.to(self.codes.device, torch.bfloat16))
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def logits(self, x: Quantized) -> Tensor:
        scales = x.scales[:, None], self.scales[None, :]
        return torch._scaled_mm(x.codes, self.codes.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


class Fp8Matrix:
    """Weights of linear layers with the same inputs, one below the other, as codes [out, in] and a scale of each."""

    def __init__(self, codes: Tensor, scales: Tensor, sizes: Sequence[int]) -> None:
        self.codes, self.scales, self.sizes = codes, scales, sizes
        self.one = torch.ones((), device=codes.device)

    @classmethod
    def zeros(cls, sizes: Sequence[int], inputs: int, device: torch.device, dtype: torch.dtype) -> Fp8Matrix:
        """`dtype`: of what is not quantized."""
        if sum(sizes) % MULTIPLE or inputs % MULTIPLE:
            raise UserError(
                f"engine.quantize = 'fp8' needs matrices with sizes that are multiples of {MULTIPLE}, not {sum(sizes)} "
                f"x {inputs}: remove it"
            )
        codes = torch.zeros(sum(sizes), inputs, device=device, dtype=torch.float8_e4m3fn)
        return cls(codes, torch.zeros(len(sizes), device=device), sizes)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def split(self, sizes: Sequence[int]) -> list[Fp8Matrix]:
        """Views of the weights; `sizes` as given to `zeros`."""
        assert list(sizes) == list(self.sizes)
        parts = zip(self.codes.split(list(sizes)), self.scales.split(1), sizes, strict=True)
        return [Fp8Matrix(codes, scale, [size]) for codes, scale, size in parts]

    def largest_output(self, count: int, norm: Tensor, bias: Tensor | None) -> Tensor:
        """A bound [] of the last `count` outputs, for inputs that are a normalized vector times `norm` [in]."""
        weight = self.codes[-count:].float() * self.scales[-1] * norm.float()
        # A normalized vector has the length sqrt(in); rounded to codes, it is longer by a sixteenth at most.
        lengths = weight.norm(dim=1) * math.sqrt(len(norm)) * 17 / 16
        return (lengths if bias is None else lengths + bias.float().abs()).amax()

    def copy_(self, weight: Tensor) -> None:
        """Quantize a single weight."""
        codes, scale = quantize_weight(weight.to(self.codes.device, torch.bfloat16))
        self.codes.copy_(codes)
        self.scales.copy_(scale)

    def product(self, x: Quantized, bias: Tensor | None = None) -> Scaled:
        """x [N, in] @ weight.T + bias."""
        values = torch._scaled_mm(
            x.codes, self.codes.t(), self.one, self.one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return Scaled(values, x.scales, self.scales, self.sizes, bias)


def check_device(setting: str, device: torch.device, dtype: torch.dtype, parallel: bool = False) -> None:
    """Raise a `UserError` if this device has no products in 8 bits. `parallel`: weights are split over ranks."""
    if parallel:
        raise UserError(f"{setting} does not work with parallel.tp above 1: remove one of them")
    if dtype != torch.bfloat16:
        raise UserError(f"{setting} needs engine.dtype = 'bfloat16': change one of them")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{setting} needs a GPU with 8-bit numbers (Hopper, Ada), not {name}: remove it")
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"{setting} is for CUDA and, slowly, CPUs, not {device.type}: remove it")


def to_fp8(x: Tensor) -> Tensor:
    """Numbers beyond the largest become the largest."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def as_bytes(x: Tensor) -> Tensor:
    """A view of 8-bit numbers as integers, which operators that only move data need; of others, `x`."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
