from __future__ import annotations

import pytest
import torch

from assay.models.quantize import NF4, dequantize, quantize, value_table

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (130, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_values_of_the_torch_path(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from assay.models import quantize_kernels

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scales = quantize(weight)
    values = torch.tensor(NF4, device=DEVICE)
    got = quantize_kernels.dequantize(codes.to(DEVICE), scales.to(DEVICE), shape, values)
    assert got.dtype == dtype and got.shape == weight.shape
    # Triton's interpreter truncates to bfloat16, a GPU rounds to nearest.
    exact = DEVICE == "cuda" or dtype == torch.float32
    torch.testing.assert_close(got.cpu(), dequantize(codes, scales, shape), rtol=0 if exact else 2**-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_on_a_gpu_gives_the_codes_of_the_cpu(dtype: torch.dtype) -> None:
    """A run may be resumed on another device, with the same base."""
    weight = torch.randn(1000, 777, generator=torch.Generator().manual_seed(2)).to(dtype)
    codes, scales = quantize(weight)
    on_gpu = quantize(weight.cuda())
    assert torch.equal(on_gpu[0].cpu(), codes) and torch.equal(on_gpu[1].cpu(), scales)
    assert torch.equal(dequantize(*on_gpu, weight.shape).cpu(), dequantize(codes, scales, weight.shape))


def test_bytes_are_pairs_of_values() -> None:
    values, pairs = value_table(torch.device("cpu"), torch.float32)
    assert pairs[0x3A].tolist() == [values[3], values[10]]
