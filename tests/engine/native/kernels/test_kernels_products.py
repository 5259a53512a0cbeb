from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from assay.engine.native.kernels.products import MAX_ROWS, Tiling, new_counters, product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiling(outputs=16, inputs=32, warps=2, stages=2)
DTYPES = [torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.bfloat16]  # on a GPU, for 16 bits only
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "bias", "norm", "activation", "add"),
    [
        (1, 40, 24, True, False, "", False),
        (MAX_ROWS, 200, 36, False, False, "", True),  # split
        (5, 200, 16, True, False, "", True),
        (3, 72, 50, True, True, "", False),
        (8, 64, 40, False, True, "silu", False),
        (2, 72, 24, True, True, "gelu_tanh", False),
        (2, 72, 24, True, False, "silu", False),
    ],
)
def test_a_product_with_what_comes_before_and_after_it(
    rows: int, inputs: int, outputs: int, bias: bool, norm: bool, activation: str, add: bool, dtype: torch.dtype
) -> None:
    width = 2 * outputs if activation else outputs
    x, weight = 3 * normal(rows, inputs, dtype=dtype, seed=1), normal(width, inputs, dtype=dtype, seed=2) / 8
    biases = normal(width, dtype=dtype, seed=3) if bias else None
    scale = normal(inputs, dtype=dtype, seed=4) if norm else None
    target = normal(rows, outputs, dtype=dtype, seed=5) if add else None
    expected = x.double()
    if scale is not None:
        expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (scale.double() + 0.5)
    expected = expected @ weight.double().T + (0.0 if biases is None else biases.double())
    if activation:
        gate, up = expected.chunk(2, dim=-1)
        expected = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    expected = expected + (0.0 if target is None else target.double())
    counters, options = new_counters(outputs, torch.device(DEVICE)), {"eps": 1e-3, "offset": 0.5, "tiling": SMALL}
    for parts in (counters, counters, None):
        given = None if target is None else target.clone()
        found = product(
            *(x, weight, biases), norm=scale, activation=activation, add_to=given, counters=parts, **options
        )
        assert not counters.any()
        assert given is None or found is given
        tolerance = 1e-5 if dtype == torch.float32 else 2**-6
        size = float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * size)
