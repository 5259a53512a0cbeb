"""Weights and activations of matrix products in 8 bits (e4m3), for generation on GPUs that multiply them: Hopper, Ada.

A row of numbers has one scale: its largest absolute value becomes the largest number of e4m3. Weights are quantized
when they are copied into the engine, from the engine's dtype; activations before each product. Only the linear layers
of the blocks are quantized: embedding and head are as important as they are large.

A product multiplies codes alone, and the operation that reads its result applies the scales of rows and columns
(`Scaled`): products with scales of their own are slower, on an H200 up to 2.6 times for 64 rows.

The trainer computes the same codes to check what the engine serves (`served_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.models.device import uses_triton
from assay.types import UserError

LARGEST = 448.0  # of e4m3
LEAST = 1e-12  # scales of rows of zeros
MULTIPLE = 16  # of both sizes of a matrix
CAPABILITY = (8, 9)  # of CUDA devices with products in 8 bits
SCALES = "_scales"  # end of the name of a weight's scales


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations [N, D] as codes, and the scales [N] of their rows."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Scaled:
    """The numbers `values` [N, D], times the scales of rows [N] and of columns [D], plus a bias [D]."""

    values: Tensor
    rows: Tensor
    columns: Tensor
    bias: Tensor | None

    def tensor(self) -> Tensor:
        wide = self.values.float() * self.rows[:, None] * self.columns
        return (wide if self.bias is None else wide + self.bias).to(self.values.dtype)


def is_quantized(name: str) -> bool:
    """Whether the weight of this Hugging Face name is that of a linear layer of a block."""
    return name.endswith("_proj.weight")


def quantize(x: Tensor) -> Quantized:
    """Rows of `x` [N, D], with scales in float32."""
    if uses_triton(x.device):
        from assay.models import kernels

        return Quantized(*kernels.quantize_rows(x, LARGEST, LEAST))
    scales = x.float().abs().amax(1).clamp(min=LEAST) / LARGEST
    codes = (x.float() * scales.reciprocal()[:, None]).clamp(-LARGEST, LARGEST)
    return Quantized(codes.to(torch.float8_e4m3fn), scales)


def served_weights(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What an engine with quantized weights serves: codes and scales of those, and the others in its dtype."""
    for name, weight in weights:
        weight = weight.detach().to(dtype)
        if not is_quantized(name):
            yield name, weight
            continue
        quantized = quantize(weight.contiguous())
        yield name, quantized.codes
        yield name + SCALES, quantized.scales


class Fp8Matrix:
    """A weight [out, in] of a linear layer, as codes and a scale per row. Parts of its rows are views of it."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales
        self.one = torch.ones((), device=codes.device)

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Fp8Matrix:
        """`dtype`: of what is not quantized."""
        if rows % MULTIPLE or columns % MULTIPLE:
            raise UserError(
                f"engine.quantize = 'fp8' needs matrices with sizes that are multiples of {MULTIPLE}, not {rows} x "
                f"{columns}: remove it"
            )
        codes = torch.zeros(rows, columns, device=device, dtype=torch.float8_e4m3fn)
        return cls(codes, torch.zeros(rows, device=device))

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def split(self, sizes: int | list[int]) -> list[Fp8Matrix]:
        return [Fp8Matrix(*part) for part in zip(self.codes.split(sizes), self.scales.split(sizes), strict=True)]

    def chunk(self, parts: int) -> list[Fp8Matrix]:
        return self.split(len(self.scales) // parts)

    def copy_(self, weight: Tensor) -> None:
        """Quantize a weight of the same shape."""
        quantized = quantize(weight.to(self.codes.device, torch.bfloat16).contiguous())
        self.codes.copy_(quantized.codes)
        self.scales.copy_(quantized.scales)

    def product(self, x: Quantized, bias: Tensor | None = None) -> Scaled:
        """x [N, in] @ weight.T + bias."""
        values = torch._scaled_mm(
            x.codes, self.codes.t(), self.one, self.one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return Scaled(values, x.scales, self.scales, bias)


def check_device(device: torch.device, dtype: torch.dtype, parallel: bool = False) -> None:
    """Raise a `UserError` if this device has no products in 8 bits. `parallel`: weights are split over ranks."""
    if parallel:
        raise UserError("engine.quantize = 'fp8' does not work with parallel.tp above 1: remove one of them")
    if dtype != torch.bfloat16:
        raise UserError("engine.quantize = 'fp8' needs engine.dtype = 'bfloat16': change one of them")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"engine.quantize = 'fp8' needs a GPU with 8-bit products (Hopper, Ada), not {name}: remove it")
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"engine.quantize = 'fp8' is for CUDA and, slowly, CPUs, not {device.type}: remove it")
