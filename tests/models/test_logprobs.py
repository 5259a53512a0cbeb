from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.models import Decoder, HFModel, ModelSpec
from assay.models.logprobs import token_logprobs, token_loss
from assay.models.spec import spec_from_hf

LENGTHS = [5, 2, 17, 9]


def decoder_of(hf: Any) -> Decoder:
    spec = spec_from_hf(hf.config.to_dict())
    assert isinstance(spec, ModelSpec)
    model = Decoder(spec)
    model.load_state_dict(hf.state_dict(), strict=False)
    return model


def packed(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Token ids and a scattered choice of tokens, never the first of a sequence."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(vocabulary, (sum(LENGTHS),), generator=generator)
    chosen = torch.rand(len(ids), generator=generator) < 0.7
    start = 0
    for length in LENGTHS:
        chosen[start] = False
        start += length
    return ids, chosen


def plainly(
    logits_of: Callable[[Tensor], Tensor],
    ids: Tensor,
    chosen: Tensor,
    temperature: float,
    columns: Tensor | None = None,
) -> tuple:
    """One sequence at a time, all logits at once; `columns`: that of each token, where some have none."""
    logprobs, entropies = [], []
    for sequence, marks in zip(ids.split(LENGTHS), chosen.split(LENGTHS), strict=True):
        every = torch.softmax(logits_of(sequence) / temperature, -1).log()
        for place in marks.nonzero().squeeze(1).tolist():
            row = every[place - 1]
            token = sequence[place]
            logprobs.append(row[token if columns is None else columns[token]])
            entropies.append(-(row.exp() * row).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logprobs_and_entropy_are_those_of_transformers(
    make_hf: Callable[..., Any], family: str, temperature: float
) -> None:
    hf = make_hf(family)
    model = decoder_of(hf)
    ids, chosen = packed(model.vocab_size)
    with torch.no_grad():
        expected = plainly(lambda s: hf(input_ids=s[None]).logits[0], ids, chosen, temperature)
        found = token_logprobs(model, ids, LENGTHS, chosen, temperature)
    assert found[0].shape == (int(chosen.sum()),)
    assert (found[0] - expected[0]).abs().max() < 1e-4 and (found[1] - expected[1]).abs().max() < 1e-4
    assert expected[1].std() > 0.01  # or the comparison would say little


def test_a_fallback_model_goes_the_same_way() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    hf = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=48)).eval()
    ids, chosen = packed(61)
    with torch.no_grad():
        expected = plainly(lambda s: hf(input_ids=s[None]).logits[0], ids, chosen, 1.0)
        found = token_logprobs(HFModel(hf), ids, LENGTHS, chosen)
    assert (found[0] - expected[0]).abs().max() < 1e-5 and (found[1] - expected[1]).abs().max() < 1e-5


class Blocking(HFModel):
    """A model whose logits of some tokens are replaced, as a bias or a mask of the vocabulary does."""

    blocked = (3, 17, 60)
    block = -torch.inf

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        mask = torch.zeros(self.vocab_size).index_fill(0, torch.tensor(self.blocked), self.block)
        return super().hidden(ids, lengths, shared) + mask


@pytest.mark.parametrize("block", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("slice_size", [3, 10**6])
@pytest.mark.parametrize("gradients", [True, False])
def test_blocked_tokens_leave_entropy_and_gradients_finite_and_exact(
    gradients: bool, slice_size: int, block: float
) -> None:
    """Those of the vocabulary without the blocked tokens, in 64 bits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    hf = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=48)).eval()
    ids, chosen = packed(61)
    ids[torch.isin(ids, torch.tensor(Blocking.blocked))] = 5
    mix = torch.randn(int(chosen.sum()), generator=torch.Generator().manual_seed(4))
    allowed = [token for token in range(61) if token not in Blocking.blocked]
    exact = copy.deepcopy(hf).double()
    places = torch.tensor([allowed.index(token) if token in allowed else 0 for token in range(61)])

    def allowed_logits(sequence: Tensor) -> Tensor:
        return exact(input_ids=sequence[None]).logits[0][:, allowed]

    wanted = plainly(allowed_logits, ids, chosen, 0.6, places)
    (wanted[0] * mix + wanted[1] * mix.flip(0)).sum().backward()
    model = Blocking(hf)
    model.block = block
    with torch.set_grad_enabled(gradients):
        found = token_logprobs(model, ids, LENGTHS, chosen, 0.6, logits_at_once=61 * slice_size)
    assert (found[0] - wanted[0]).abs().max() < 1e-5 and (found[1] - wanted[1]).abs().max() < 1e-5
    if gradients:
        (found[0] * mix + found[1] * mix.flip(0)).sum().backward()
        for (name, weight), other in zip(hf.named_parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(weight.grad.double(), other.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("slice_size", [1, 7, 22])
def test_slices_change_neither_values_nor_gradients(make_hf: Callable[..., Any], slice_size: int) -> None:
    model = decoder_of(make_hf("qwen3")).double()
    ids, chosen = packed(model.vocab_size)
    mix = torch.randn(int(chosen.sum()), generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def run(at_once: int) -> tuple[Tensor, Tensor, Tensor]:
        model.zero_grad(set_to_none=True)
        logprobs, entropy = token_logprobs(model, ids, LENGTHS, chosen, 0.8, logits_at_once=at_once)
        ((logprobs + 0.3 * entropy) * mix).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return logprobs.detach(), entropy.detach(), gradient

    whole, parts = run(10**9), run(slice_size * model.vocab_size)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(whole, parts, strict=True))
    assert whole[2].norm() > 0.1


def test_a_slice_is_never_larger_than_asked(make_hf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder_of(make_hf("llama"))
    ids, chosen = packed(model.vocab_size)
    seen: list[int] = []

    def unembed(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return model.lm_head(hidden)

    monkeypatch.setattr(model, "unembed", unembed)
    with torch.no_grad():
        token_logprobs(model, ids, LENGTHS, chosen, logits_at_once=4 * model.vocab_size)
    assert max(seen) <= 4 and sum(seen) == int(chosen.sum())


def test_scores_are_computed_in_full_precision_whatever_the_models(make_hf: Callable[..., Any]) -> None:
    model = decoder_of(make_hf("llama")).bfloat16()
    ids, chosen = packed(model.vocab_size)
    logprobs, entropy = token_logprobs(model, ids, LENGTHS, chosen)
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_nothing_chosen_gives_nothing(make_hf: Callable[..., Any]) -> None:
    model = decoder_of(make_hf("llama"))
    ids, chosen = packed(model.vocab_size)
    logprobs, entropy = token_logprobs(model, ids, LENGTHS, torch.zeros_like(chosen))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()


@pytest.mark.parametrize("slice_size", [1, 7, 10**6])
def test_a_loss_through_the_head_is_that_of_the_scores(make_hf: Callable[..., Any], slice_size: int) -> None:
    """Values and gradients, of tied and untied heads, with terms that bend: each slice by itself must be enough."""
    for family in ("qwen2", "llama"):
        model = decoder_of(make_hf(family)).double()
        ids, chosen = packed(model.vocab_size)
        mix = torch.randn(int(chosen.sum()), generator=torch.Generator().manual_seed(4), dtype=torch.float64)

        def loss(at: slice, logprobs: Tensor, entropy: Tensor, mix: Tensor = mix) -> Tensor:
            return (logprobs.exp() * mix[at]).sum() + 0.3 * (entropy.square() * mix[at]).sum()

        def gradients(total: Tensor, model: Decoder = model) -> Tensor:
            model.zero_grad(set_to_none=True)
            (2.5 * total).backward()
            return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

        expected = loss(slice(None), *token_logprobs(model, ids, LENGTHS, chosen, 0.8))
        at_once = slice_size * model.vocab_size
        found = token_loss(model, ids, LENGTHS, chosen, loss, 0.8, logits_at_once=at_once)
        assert (found - expected).abs() < 1e-12
        assert (gradients(found) - (wanted := gradients(expected))).abs().max() < 1e-12 and wanted.norm() > 0.1


def test_a_loss_that_uses_no_entropy_or_nothing_at_all(make_hf: Callable[..., Any]) -> None:
    model = decoder_of(make_hf("qwen3")).double()
    ids, chosen = packed(model.vocab_size)
    token_loss(model, ids, LENGTHS, chosen, lambda _, logprobs, entropy: logprobs.sum() + 0 * entropy.detach().sum())
    asked: list[int] = []

    def loss(at: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        asked.append(len(logprobs))
        return logprobs.sum()

    total = token_loss(model, ids, LENGTHS, torch.zeros_like(chosen), loss)
    total.backward()
    assert asked == [0] and total == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def shared_batch(vocabulary: int) -> tuple[Tensor, list[int], list[int], Tensor]:
    """Five answers to one prompt, a sequence alone, two answers to another, of which one is empty."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(vocabulary, (size,), generator=generator) for size in (6, 0, 3)]
    answers = [[4, 1, 7, 2, 4], [8], [5, 0]]
    sequences, shared, chosen = [], [], []
    for prompt, sizes in zip(prompts, answers, strict=True):
        for index, size in enumerate(sizes):
            sequences.append(torch.cat((prompt, torch.randint(vocabulary, (size,), generator=generator))))
            shared.append(len(prompt) if index else 0)
            chosen.append(torch.arange(len(sequences[-1])) >= max(len(prompt), 1))
    return torch.cat(sequences), [len(s) for s in sequences], shared, torch.cat(chosen)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_prompts_computed_once_change_neither_values_nor_gradients(make_hf: Callable[..., Any], family: str) -> None:
    model = decoder_of(make_hf(family)).double()
    ids, lengths, shared, chosen = shared_batch(model.vocab_size)
    mix = torch.randn(int(chosen.sum()), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rows: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda _, args, out: rows.append(len(out)))

    def run(shared: list[int] | None) -> tuple[Tensor, Tensor, Tensor]:
        model.zero_grad(set_to_none=True)
        logprobs, entropy = token_logprobs(model, ids, lengths, chosen, 0.9, shared=shared)
        ((logprobs + 0.3 * entropy) * mix).sum().backward()
        return logprobs.detach(), entropy.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    whole, once = run(None), run(shared)
    handle.remove()
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(whole, once, strict=True))
    assert whole[2].norm() > 0.1
    assert rows == [len(ids), len(ids) - sum(shared)]
