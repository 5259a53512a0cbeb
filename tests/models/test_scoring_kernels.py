from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.models import logprobs

triton = pytest.importorskip("triton")
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


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("rows", "size"), [(5, 7), (3, 300), (2, 9000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_scores_and_gradients(
    dtype: torch.dtype, rows: int, size: int, temperature: float, with_entropy: bool
) -> None:
    from assay.models import scoring_kernels

    logits, targets, grad_logprobs, grad_entropy = example(rows, size, dtype)
    expected = reference(logits, targets, temperature, grad_logprobs, grad_entropy if with_entropy else None)
    logps, entropies, partition = scoring_kernels.scores_of(logits, targets, temperature)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps.double(), expected[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=1e-5, atol=2e-5)
    grad = scoring_kernels.gradient_of(
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
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_blocked_tokens_count_for_nothing(
    implementation: str, dtype: torch.dtype, temperature: float, block: str
) -> None:
    """The values and gradients are those of the vocabulary without the tokens whose logits are -inf or finfo.min."""
    if implementation == "triton" and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    from assay.models import scoring_kernels

    module: Any = scoring_kernels if implementation == "triton" else logprobs
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
    from assay.models import scoring_kernels

    logits, targets, grad_logprobs, grad_entropy = example(0, 9, torch.float32)
    logprobs, entropies, partition = scoring_kernels.scores_of(logits, targets, 1.0)
    assert len(logprobs) == len(entropies) == len(partition) == 0
    assert (
        scoring_kernels.gradient_of(logits, targets, 1.0, entropies, partition, grad_logprobs, grad_entropy) is logits
    )
