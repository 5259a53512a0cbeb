from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from assay.engine.sampler import Draw, kept, noise_keys, sample, signed, uniform

LOGITS = [2.0, -1.0, 0.5, 0.5, 3.0, -4.0, 1.0, 0.0]
DRAWS = 20_000


def draw_many(logits: list[float], temperature: float, top_k: int, top_p: float, seed: int = 5) -> Draw:
    count = DRAWS
    keys = noise_keys(torch.full((count,), signed(seed)), torch.arange(count) % 100)
    return sample(
        torch.tensor(logits).expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        keys,
        torch.arange(count) // 100,
    )


def truncated(logits: list[float], temperature: float, top_k: int, top_p: float) -> tuple[list[float], float]:
    """Reference in plain Python: distribution after truncation and the mass that was kept."""
    weights = [math.exp(x / temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: top_k or None]
    whole, chosen, mass = sum(probs[i] for i in order), [], 0.0
    for i in order:
        if chosen and mass >= top_p * whole - 1e-9:
            break
        chosen.append(i)
        mass += probs[i]
    return [probs[i] / mass if i in chosen else 0.0 for i in range(len(probs))], mass


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.7, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, 4, 1.0),
        (1.3, 0, 0.8),
        (1.0, 5, 0.9),
        (1.0, 1, 1.0),
        (1.0, 0, 0.05),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float) -> None:
    draw = draw_many(LOGITS, temperature, top_k, top_p)
    expected, mass = truncated(LOGITS, temperature, top_k, top_p)
    observed = torch.bincount(draw.tokens, minlength=len(LOGITS)).tolist()
    assert all(count == 0 for count, p in zip(observed, expected, strict=True) if p == 0)
    possible = [(count, p * DRAWS) for count, p in zip(observed, expected, strict=True) if p > 0]
    if len(possible) > 1:
        assert stats.chisquare(*zip(*possible, strict=True)).pvalue > 1e-3
    assert draw.kept_mass.tolist() == pytest.approx([mass] * DRAWS, abs=1e-6)
    plain = torch.log_softmax(torch.tensor(LOGITS) / temperature, -1)
    assert torch.allclose(draw.engine_logprobs, plain[draw.tokens], atol=1e-6)
    assert torch.allclose(draw.sampling_logprobs, torch.tensor(expected).log()[draw.tokens], atol=1e-5)


@pytest.mark.parametrize("top_k", [0, 40])
def test_distribution_over_a_large_vocabulary(top_k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3000, generator=generator)
    logits[torch.randperm(3000, generator=generator)[:40]] += 5.0
    logits[500:1100] = -math.inf
    tokens = draw_many(logits.tolist(), 1.0, top_k, 1.0).tokens
    expected, _ = truncated(logits.tolist(), 1.0, top_k, 1.0)
    probs = torch.tensor(expected, dtype=torch.float64)
    assert bool((probs[tokens] > 0).all())
    # Neighbours are put together until each cell expects some 50 draws.
    cells = (probs.cumsum(0) * (DRAWS // 50)).long().clamp(max=DRAWS // 50 - 1)
    count = int(cells.max()) + 1
    counts = torch.bincount(cells[tokens], minlength=count)
    wanted = torch.zeros(count, dtype=torch.float64).index_add(0, cells, probs) * DRAWS
    possible = wanted > 0
    assert stats.chisquare(counts[possible].numpy(), wanted[possible].numpy()).pvalue > 1e-3


def test_greedy_takes_the_best_and_scores_it_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    for temperature in ([0.0, 0.0], [0.0, 1e-3]):
        draw = sample(
            logits,
            torch.tensor(temperature),
            torch.tensor([2, 0]),
            torch.tensor([0.5, 1.0]),
            torch.tensor([1, 2]),
            torch.tensor([0, 0]),
        )
        assert draw.tokens.tolist() == [1, 0]
        assert draw.engine_logprobs[0].item() == pytest.approx(torch.log_softmax(logits[0], -1)[1].item())
        assert draw.sampling_logprobs[0].item() == 0.0 and draw.kept_mass[0].item() == 1.0


def test_a_row_draws_the_same_whatever_stands_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 300, generator=generator) * 2
    temperature = torch.where(torch.arange(64) % 5 == 0, 0.0, 0.9)
    top_k = torch.where(torch.arange(64) % 3 == 0, 7, 0)
    top_p = torch.where(torch.arange(64) % 4 == 0, 0.8, 1.0)
    keys = noise_keys(torch.arange(64), torch.arange(64) % 4)
    rows: list[Tensor] = [logits, temperature, top_k, top_p, keys, torch.arange(64)]
    together = sample(*rows)
    for i in range(64):
        alone = sample(*(column[i : i + 1] for column in rows))
        assert alone.tokens[0] == together.tokens[i]
        assert torch.isclose(alone.engine_logprobs[0], together.engine_logprobs[i], atol=1e-6)
        assert torch.isclose(alone.sampling_logprobs[0], together.sampling_logprobs[i], atol=1e-6)
        assert torch.isclose(alone.kept_mass[0], together.kept_mass[i], atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=24),
    st.integers(0, 30),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
)
def test_kept_set_is_the_reference_one_ties_included(logits: list[int], top_k: int, top_p: float) -> None:
    values = [x / 2 for x in logits]
    probs = torch.softmax(torch.tensor([values]), -1)
    keep = kept(probs, torch.tensor([top_k]), torch.tensor([top_p]))[0]
    expected, _ = truncated(values, 1.0, top_k, top_p)
    mass = probs[0, keep].sum().item()
    wanted = {i for i, p in enumerate(expected) if p > 0}
    got = set(keep.nonzero()[:, 0].tolist())
    # Where a cumulative probability meets p to within rounding, one token more or less is as right.
    assert got == wanted or abs(mass - top_p * mass_of_top(probs[0], top_k)) < 1e-4


def mass_of_top(probs: Tensor, top_k: int) -> float:
    return probs.topk(min(top_k or len(probs), len(probs))).values.sum().item()


def test_truncation_beyond_the_head_of_a_large_vocabulary() -> None:
    logits = torch.zeros(3, 5000)
    logits[:, 4999] = 1.0
    keep = kept(torch.softmax(logits, -1), torch.tensor([0, 2000, 0]), torch.tensor([0.5, 1.0, 1.0]))
    assert keep[1].sum() == 2000 and keep[1, :1999].all() and keep[1, 4999]
    assert 2497 <= int(keep[0].sum()) <= 2500 and keep[0, 4999] and keep[0, 0]
    assert keep[2].all()


def test_noise_is_uniform_and_its_neighbours_unrelated() -> None:
    seeds, samples, positions = torch.meshgrid(torch.arange(20), torch.arange(20), torch.arange(50), indexing="ij")
    keys = noise_keys(seeds.flatten(), samples.flatten())
    noise = uniform(keys, positions.flatten())
    assert noise.min() >= 0 and noise.max() < 1
    assert noise.unique().numel() == noise.numel()
    assert noise_keys(seeds[:, :, 0].flatten(), samples[:, :, 0].flatten()).unique().numel() == 400
    assert stats.kstest(noise.numpy(), "uniform").pvalue > 1e-3
    cube = noise.view(20, 20, 50)
    for axis in range(3):
        length = cube.shape[axis]
        left, right = cube.narrow(axis, 0, length - 1).flatten(), cube.narrow(axis, 1, length - 1).flatten()
        assert abs(torch.corrcoef(torch.stack((left, right)))[0, 1]) < 4 / math.sqrt(left.numel())


def test_seeds_use_all_64_bits() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**63 - 1, 2**64 - 1]
    keys = noise_keys(torch.tensor([signed(seed) for seed in seeds]), torch.zeros(len(seeds), dtype=torch.int64))
    assert keys.unique().numel() == len(seeds)
    assert signed(2**64 + 7) == 7 and signed(-1) == -1


def test_not_a_number_is_reported_for_its_row_alone() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    ones = torch.ones(2)
    draw = sample(logits, ones, torch.tensor([0, 2]), ones, torch.tensor([3, 4]), torch.tensor([0, 0]))
    assert draw.engine_logprobs.isnan().tolist() == [False, True]
    assert int(draw.tokens.min()) >= 0 and int(draw.tokens.max()) < 4
