from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.models import logprobs
from assay.models.quantize import NF4, dequantize, quantize, value_table

pytest.importorskip("triton")
from assay.models import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def example(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    logits = (5 * torch.randn(rows, size, generator=generator)).to(DEVICE, dtype)
    targets = torch.randint(size, (rows,), generator=generator).to(DEVICE)
    grad_logprobs, grad_entropy = torch.randn(2, rows, generator=generator).to(DEVICE)
    return logits, targets, grad_logprobs, grad_entropy


def reference(
    logits: Tensor, targets: Tensor, temperature: float, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> tuple:
    """By autograd, in 64 bits."""
    logits = logits.double().requires_grad_()
    every = torch.log_softmax(logits / temperature, -1)
    chosen, entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    total = (chosen * grad_logprobs.double()).sum()
    if grad_entropy is not None:
        total = total + (entropy * grad_entropy.double()).sum()
    total.backward()
    assert logits.grad is not None
    return chosen.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize(("with_entropy", "temperature"), [(True, 0.6), (False, 1.0)])
@pytest.mark.parametrize(("rows", "size"), [(5, 7), (2, 9000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_scores_and_gradients(
    dtype: torch.dtype, rows: int, size: int, temperature: float, with_entropy: bool
) -> None:
    logits, targets, grad_logprobs, grad_entropy = example(rows, size, dtype)
    expected = reference(logits, targets, temperature, grad_logprobs, grad_entropy if with_entropy else None)
    logps, entropies, partition = kernels.scores_of(logits, targets, temperature)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps.double(), expected[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=1e-5, atol=2e-5)
    grad = kernels.gradient_of(
        logits, targets, temperature, entropies, partition, grad_logprobs, grad_entropy if with_entropy else None
    )
    assert grad is logits
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(grad.double(), expected[2], rtol=tolerance, atol=tolerance)


def test_torch_gives_the_same() -> None:
    logits, targets, grad_logprobs, grad_entropy = example(6, 50, torch.float64)
    expected = reference(logits, targets, 0.7, grad_logprobs, grad_entropy)
    logps, entropies, partition = logprobs.scores_of(logits, targets, 0.7)
    grad = logprobs.gradient_of(
        logits, targets, 0.7, entropies, partition, grad_logprobs.double(), grad_entropy.double()
    )
    for found, wanted in zip((logps, entropies, grad), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", ["-inf", "finfo.min"])
@pytest.mark.parametrize(
    ("module", "dtype"),
    [(logprobs, torch.float64), (logprobs, torch.bfloat16), (kernels, torch.float32), (kernels, torch.bfloat16)],
)
def test_blocked_tokens_count_for_nothing(module: Any, dtype: torch.dtype, block: str) -> None:
    """The values and gradients are those of the vocabulary without the tokens whose logits are -inf or finfo.min."""
    temperature = 0.6
    logits, targets, grad_logprobs, grad_entropy = example(4, 5000, dtype)
    grad_logprobs, grad_entropy = (x.double() if dtype == torch.float64 else x for x in (grad_logprobs, grad_entropy))
    logits[:, 7:4100] = -torch.inf if block == "-inf" else torch.finfo(dtype).min
    targets = targets % 7
    allowed = torch.cat((logits[:, :7], logits[:, 4100:]), 1)
    expected = reference(allowed, targets, temperature, grad_logprobs, grad_entropy)
    logps, entropies, partition = module.scores_of(logits.clone(), targets, temperature)
    grad = module.gradient_of(logits, targets, temperature, entropies, partition, grad_logprobs, grad_entropy)
    assert not grad[:, 7:4100].any()
    grad = torch.cat((grad[:, :7], grad[:, 4100:]), 1)
    exact = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5}[dtype]
    torch.testing.assert_close(logps.double(), expected[0], rtol=exact, atol=exact)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=exact, atol=exact)
    tolerance = 2e-2 if dtype == torch.bfloat16 else exact
    torch.testing.assert_close(grad.double(), expected[2], rtol=tolerance, atol=tolerance)


def test_no_rows() -> None:
    logits, targets, grad_logprobs, grad_entropy = example(0, 9, torch.float32)
    logprobs, entropies, partition = kernels.scores_of(logits, targets, 1.0)
    assert len(logprobs) == len(entropies) == len(partition) == 0
    assert kernels.gradient_of(logits, targets, 1.0, entropies, partition, grad_logprobs, grad_entropy) is logits


@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (130, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_values_of_the_torch_path(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scales = quantize(weight)
    values = torch.tensor(NF4, device=DEVICE)
    got = kernels.dequantize(codes.to(DEVICE), scales.to(DEVICE), shape, values)
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
