"""The torch sampler against plain Python references, distributions and ties; its noise; one step of the row table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_parts import drawable
from scipy import stats
from torch import Tensor

from assay.engine.base import Request, SamplingParams
from assay.engine.sampler import Rows, Sampled, keep_mask, noise_keys, sample, signed, uniform
from assay.engine.sequence import Job, Modes, Sample

LIMITS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
LOGITS = [2.0, -1.0, 0.5, 0.5, 3.0, -4.0, 1.0, 0.0]
SAMPLES = 20_000


def sample_many(
    logits: list[float], temperature: float, count: int = SAMPLES, forbidden: Sequence[int] = (), **limits: Any
) -> Sampled:
    keys = noise_keys(torch.full((count,), signed(5)), torch.arange(count) % 100)
    return sample(
        torch.tensor(logits).expand(count, -1),
        torch.full((count,), temperature),
        *(torch.full((count,), value) for value in (LIMITS | limits).values()),
        keys,
        torch.arange(count) // 100,
        forbidden=torch.tensor([*forbidden, -1]).expand(count, -1) if forbidden else None,
    )


def reference(logits: list[float], temperature: float, **limits: Any) -> tuple[list[float], float]:
    """The sampling distribution and the kept mass, in plain Python."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    kept = drawable(probs, 0, SamplingParams(forbidden_token_ids=limits.pop("forbidden", ()), **limits))
    mass = sum(probs[i] for i in kept)
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(probs))], mass


@pytest.mark.parametrize(
    ("temperature", "limits"),
    [
        *((1.0, {}), (0.7, {}), (1.0, {"top_k": 3}), (1.0, {"top_k": 4}), (1.3, {"top_p": 0.8}), (1.0, {"top_k": 1})),
        *((1.0, {"top_k": 5, "top_p": 0.9}), (1.0, {"top_p": 0.05}), (0.8, {"min_p": 0.05})),
        *((1.0, {"forbidden": [4, 5]}), (1.0, {"forbidden": [4], "top_k": 3})),
        (1.2, {"forbidden": [0, 2], "top_k": 5, "top_p": 0.97, "min_p": 0.06}),
    ],
)
def test_samples_follow_the_truncated_distribution(temperature: float, limits: dict[str, Any]) -> None:
    sampled = sample_many(LOGITS, temperature, **limits)
    expected, mass = reference(LOGITS, temperature, **limits)
    observed = torch.bincount(sampled.tokens, minlength=len(LOGITS)).tolist()
    assert all(count == 0 for count, p in zip(observed, expected, strict=True) if p == 0)
    possible = [(count, p * SAMPLES) for count, p in zip(observed, expected, strict=True) if p > 0]
    if len(possible) > 1:
        assert stats.chisquare(*zip(*possible, strict=True)).pvalue > 1e-3
    assert torch.allclose(sampled.kept_mass, torch.tensor(mass), atol=1e-6)
    plain = torch.log_softmax(torch.tensor(LOGITS) / temperature, -1)
    assert torch.allclose(sampled.engine_logprobs, plain[sampled.tokens], atol=1e-6)
    assert torch.allclose(sampled.sampling_logprobs, torch.tensor(expected).log()[sampled.tokens], atol=1e-5)
    assert torch.allclose(sampled.entropies, -(plain.exp() * plain).sum(), atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 40])
def test_samples_follow_the_distribution_over_a_large_vocabulary(top_k: int) -> None:
    count = 6000
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3000, generator=generator)
    logits[torch.randperm(3000, generator=generator)[:40]] += 5.0
    logits[500:1100] = -math.inf
    sampled = sample_many(logits.tolist(), 1.0, count, top_k=top_k)
    expected, _ = reference(logits.tolist(), 1.0, top_k=top_k)
    probs = torch.tensor(expected, dtype=torch.float64)
    assert bool((probs[sampled.tokens] > 0).all())
    # Adjacent tokens are merged into cells with about 50 expected samples each.
    cells = (probs.cumsum(0) * (count // 50)).long().clamp(max=count // 50 - 1)
    number = int(cells.max()) + 1
    counts = torch.bincount(cells[sampled.tokens], minlength=number)
    wanted = torch.zeros(number, dtype=torch.float64).index_add(0, cells, probs) * count
    possible = wanted > 0
    assert stats.chisquare(counts[possible].numpy(), wanted[possible].numpy()).pvalue > 1e-3
    plain = torch.distributions.Categorical(logits=logits.double())
    assert torch.allclose(sampled.entropies.double(), torch.special.entr(plain.probs).sum(), atol=1e-5)


def test_greedy_sampling_returns_the_argmax_scored_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    for temperature in ([0.0, 0.0], [0.0, 1e-3]):
        for forbidden, best in ((None, 1), (torch.tensor([[-1, 1], [-1, -1]]), 2)):
            columns = (temperature, [2, 0], [0.5, 1.0], [0.5, 0.0], [1, 2], [0, 0])
            sampled = sample(logits, *map(torch.tensor, columns), forbidden=forbidden)
            assert sampled.tokens.tolist() == [best, 0]
            plain = torch.log_softmax(logits[0], -1)
            assert sampled.engine_logprobs[0].item() == pytest.approx(plain[best].item())
            assert sampled.entropies[0].item() == pytest.approx(-(plain.exp() * plain).sum().item())
            assert sampled.sampling_logprobs[0].item() == 0.0 and sampled.kept_mass[0].item() == 1.0


def test_greedy_sampling_breaks_ties_by_the_lowest_id() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 3, (200, 700), generator=generator).float()
    sampled = sample(logits, *(torch.zeros(200, dtype=torch.int64) for _ in range(6)))
    assert sampled.tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]


def mixed_rows(rows: int, vocabulary: int) -> tuple[list[Tensor], Tensor]:
    """Inputs of `sample` with different settings per row, and forbidden tokens."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(rows)
    forbidden = torch.stack([torch.randperm(vocabulary, generator=generator)[:6] for _ in range(rows)])
    columns = [
        torch.randn(rows, vocabulary, generator=generator) * 2,
        torch.where(index % 5 == 0, 0.0, 0.9),
        torch.where(index % 3 == 0, 7, 0),
        torch.where(index % 4 == 0, 0.8, 1.0),
        torch.where(index % 7 == 0, 0.1, 0.0),
        noise_keys(index, index % 4),
        index,
    ]
    return columns, forbidden.where(torch.arange(6) < (index % 6)[:, None], -1)


def test_a_sample_does_not_depend_on_other_rows_or_on_skipped_work() -> None:
    columns, forbidden = mixed_rows(64, 300)
    _, temperature, top_k, top_p, min_p, _, _ = columns
    together = sample(*columns, forbidden=forbidden)
    for i in range(64):
        own_forbidden = forbidden[i : i + 1] if (forbidden[i] >= 0).any() else None
        is_greedy = bool(temperature[i] == 0)
        truncates = not is_greedy and bool(top_k[i] > 0 or top_p[i] < 1 or min_p[i] > 0)
        own = (column[i : i + 1] for column in columns)
        alone = sample(*own, forbidden=own_forbidden, modes=Modes(is_greedy, not is_greedy, truncates))
        assert alone.tokens[0] == together.tokens[i]
        for name in ("engine_logprobs", "sampling_logprobs", "kept_mass", "entropies"):
            assert torch.isclose(getattr(alone, name)[0], getattr(together, name)[i], atol=1e-6), name


def test_float64_logits_give_float64_logprobs() -> None:
    columns, forbidden = mixed_rows(40, 5000)
    logits = columns[0].double() * 3 + 50
    sampled = sample(logits, *columns[1:], forbidden=forbidden)
    temperature = columns[1].double()[:, None]
    plain = torch.log_softmax(logits / temperature.where(temperature > 0, 1.0), -1)
    assert sampled.engine_logprobs.dtype == torch.float64
    assert torch.allclose(sampled.engine_logprobs, plain.gather(1, sampled.tokens[:, None])[:, 0], rtol=0, atol=1e-12)
    assert torch.allclose(sampled.entropies, torch.special.entr(plain.exp()).sum(-1), rtol=0, atol=1e-11)
    assert not (forbidden == sampled.tokens[:, None]).any()


def test_forbidding_a_token_of_probability_one_leaves_the_other_tokens() -> None:
    logits = torch.tensor([0.0, 500.0, 1.0]).expand(4000, -1)
    ones, index = torch.ones(4000), torch.arange(4000)
    forbidden = torch.full((4000, 1), 1)
    sampled = sample(logits, ones, 0 * index, ones, 0 * ones, noise_keys(index, index), index, forbidden=forbidden)
    share = (sampled.tokens == 2).double().mean().item()
    assert set(sampled.tokens.tolist()) == {0, 2}
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    assert sampled.engine_logprobs.tolist() == (logits[0, sampled.tokens] - 500).tolist()
    assert sampled.kept_mass.max() < 1e-30 and sampled.entropies.max() < 1e-6
    assert torch.allclose(
        sampled.sampling_logprobs, torch.log_softmax(torch.tensor([0.0, 1.0]), 0)[sampled.tokens // 2]
    )


limits = st.one_of(st.just(1.0), st.floats(0.01, 0.999))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=24), st.integers(0, 30), limits, st.floats(0.0, 1.0))
def test_truncation_keeps_the_same_set_as_the_reference_with_ties(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    values = [x / 2 for x in logits]
    probs = torch.softmax(torch.tensor([values], dtype=torch.float64), -1)
    keep = keep_mask(
        probs, probs.sum(-1, dtype=torch.float64), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )[0]
    expected, _ = reference(values, 1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = {i for i, p in enumerate(expected) if p > 0}
    got = set(keep.nonzero()[:, 0].tolist())
    # If a probability equals its limit up to rounding, one token more or less is correct too.
    mass = probs[0, keep.bool()].sum().item()
    edge = abs(mass - top_p * mass_of_top(probs[0], top_k)) < 1e-5
    edge |= bool(((probs / probs.max() - min_p).abs() < 1e-5).any())
    assert got == wanted or edge


def mass_of_top(probs: Tensor, top_k: int) -> float:
    return probs.topk(min(top_k or len(probs), len(probs))).values.sum().item()


@pytest.mark.parametrize("vocabulary", [1000, 12_007])
def test_truncation_of_bfloat16_logits_with_many_ties(vocabulary: int) -> None:
    """16-bit logits tie often; the reference sorts them by (value, id)."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(12, vocabulary, generator=generator) * 3).bfloat16()
    top_k = torch.tensor([0, 1, 5, 63, 64, 65, 500, 0, 0, 0, 20, 900])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.7, 1.0, 0.9, 1.0, 0.3, 0.9, 0.999, 0.5, 0.99])
    min_p = torch.tensor([0.0, 0.0, 0.2, 0.0, 0.0, 1e-3, 0.0, 0.0, 0.1, 0.0, 0.3, 1e-4])
    probs = torch.softmax(logits.float(), -1)
    keep = keep_mask(probs, probs.sum(-1, dtype=torch.float64), top_k, top_p, min_p)
    for row in range(12):
        exact = torch.softmax(logits[row].double(), 0)
        order = sorted(range(vocabulary), key=lambda i: (-exact[i].item(), i))[: int(top_k[row]) or None]
        cumulative = exact[order].cumsum(0)
        whole = cumulative[-1]
        mine = keep[row].nonzero()[:, 0].tolist()
        first = order[: len(mine)]
        assert sorted(first) == mine
        edge = torch.tensor([exact[order[len(mine) - 1]], exact[order[len(mine)]] if len(mine) < len(order) else 0.0])
        held = min_p[row] * exact.max() * (1 - 1e-6)
        assert edge[0] >= held
        if top_p[row] < 1 and len(mine) > 1:
            assert cumulative[len(mine) - 2] < top_p[row] * whole
        reached = top_p[row] < 1 and cumulative[len(mine) - 1] >= top_p[row] * whole * (1 - 2e-6)
        assert len(mine) == len(order) or reached or edge[1] < held * (1 + 2e-6)


def test_noise_is_uniform_and_uncorrelated_between_seeds_samples_and_positions() -> None:
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocabulary", [4, 1000])
def test_nan_logits_give_nan_logprobs_in_their_row_only(temperature: float, vocabulary: int) -> None:
    logits = torch.zeros(5, vocabulary)
    logits[1, 2] = logits[2, 1] = float("nan")
    logits[3, 1:] = -math.inf
    forbidden = torch.tensor([[-1], [-1], [1], [0], [2]])
    ones = torch.ones(5)
    for top_k in (0, 2):
        limit = torch.tensor([0, top_k, 0, top_k, top_k])
        columns = [logits, ones * temperature, limit, ones, ones * 0, torch.arange(5), torch.arange(5)]
        sampled = sample(*columns, forbidden=forbidden)
        assert sampled.engine_logprobs.isnan().tolist() == [False, True, True, True, False]
        assert int(sampled.tokens.min()) >= 0 and int(sampled.tokens.max()) < vocabulary
        wanted = torch.full((2,), math.log(vocabulary))
        assert torch.allclose(-sampled.engine_logprobs[[0, 4]], wanted)
        assert torch.allclose(sampled.entropies[[0, 4]], wanted)


def test_modes_follow_the_parameters_of_running_rows() -> None:
    def job(**params: Any) -> Job:
        return Job(0, Request([1], SamplingParams(**params), seed=0), [1], 9)

    rows = Rows(4, 1, torch.device("cpu"))
    for params, expected in (
        ({}, Modes(random=True)),
        ({"temperature": 0.0, "top_p": 0.5}, Modes(greedy=True)),
        ({"top_k": 2}, Modes(random=True, truncate=True)),
        ({"min_p": 0.1}, Modes(random=True, truncate=True)),
        ({"top_p": 0.9}, Modes(random=True, truncate=True)),
        ({"forbidden_token_ids": (1,)}, Modes(random=True, forbids=True)),
        ({"min_new_tokens": 2, "stop_token_ids": (1,)}, Modes(random=True, forbids=True)),
        ({"min_new_tokens": 2}, Modes(random=True)),
    ):
        rows.update_modes([Sample(job(**params), 0)])  # type: ignore[arg-type]
        assert rows.modes == expected
    rows.update_modes([Sample(job(temperature=0.0), 0), Sample(job(top_k=2), 0)])
    assert rows.modes == Modes(greedy=True, random=True, truncate=True)
