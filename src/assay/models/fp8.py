"""Weights and activations of matrix products in 8 bits (e4m3), for generation on GPUs that multiply them: Hopper, Ada.

A row of numbers has one scale: its largest absolute value becomes the largest number of e4m3. Weights are quantized
when they are copied into the engine, from the engine's dtype; activations before each product. Only the linear layers
of the blocks are quantized: embedding and head are as important as they are large.

The trainer computes the same codes to check what the engine serves (`served_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from assay.models.device import uses_triton
from assay.types import UserError

LARGEST = 448.0  # of e4m3
LEAST = 1e-12  # scales of rows of zeros
MULTIPLE = 16  # of both sizes of a matrix
CAPABILITY = (8, 9)  # of CUDA devices with products in 8 bits
SCALES = "_scales"  # end of the name of a weight's scales


def is_quantized(name: str) -> bool:
    """Whether the weight of this Hugging Face name is that of a linear layer of a block."""
    return name.endswith("_proj.weight")


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, D] and float32 scales [N] of the rows of `x`."""
    if uses_triton(x.device):
        from assay.models import kernels

        return kernels.quantize_rows(x, LARGEST, LEAST)
    scales = x.float().abs().amax(1).clamp(min=LEAST) / LARGEST
    codes = (x.float() / scales[:, None]).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scales


def served_weights(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What an engine with quantized weights serves: codes and scales of those, and the others in its dtype."""
    for name, weight in weights:
        weight = weight.detach().to(dtype)
        if not is_quantized(name):
            yield name, weight
            continue
        codes, scales = quantize(weight.contiguous())
        yield name, codes
        yield name + SCALES, scales


class Fp8Matrix:
    """A weight [out, in] of a linear layer, as codes and a scale per row. Parts of its rows are views of it."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> Fp8Matrix:
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
        codes, scales = quantize(weight.to(self.codes.device, torch.bfloat16).contiguous())
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, in] @ weight.T + bias."""
        codes, scales = quantize(x)
        return torch._scaled_mm(
            codes,
            self.codes.t(),
            scale_a=scales[:, None],
            scale_b=self.scales[None],
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )


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
