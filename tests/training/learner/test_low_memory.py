"""AdamW in 8 or 6 bytes per parameter: exact weights, rounding that is right on average, and the Triton kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_parts import tiny_decoder

from assay.config import OptimConfig
from assay.models import Lora
from assay.models.decoder import Decoder
from assay.training.learner import low_memory
from assay.training.learner.low_memory import (
    BLOCK,
    TOP_SIGNED,
    TOP_UNSIGNED,
    AdamW8bit,
    Precision,
    decode,
    encode,
    hashed,
    join,
    lower_precision,
    noise,
    remainder_of,
    round_at_random,
    split,
)
from assay.training.learner.optim import (
    Muon,
    allocate_optimizer_state,
    clip_gradients,
    make_optimizer,
    optimizer_tensors,
)
from assay.types import UserError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = ("8bit", "bfloat16")


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def lowered(precision: Precision, seed: int = 0) -> Decoder:
    model = tiny_decoder(seed, torch.float32)
    lower_precision(model, precision)
    return model


def weights_of(model: nn.Module) -> list[Tensor]:
    """As exact as they are known."""
    return [p.detach().float() if (r := remainder_of(p)) is None else join(p.detach(), r) for p in model.parameters()]


def test_a_weight_and_its_remainder_are_exact() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-38, -3e-42, 3e38, -3e38, 1 + 2**-8, 1 + 2**-9, float("inf")])
    values = torch.cat((special, normal(10_000, scale=0.02), torch.rand(10_000).exp()))
    high, remainder = split(values)
    assert high.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert join(high, remainder).view(torch.int32).equal(values.view(torch.int32))
    difference = (high.float() - values).abs()[values.isfinite()]
    assert (
        difference <= 2**-8 * values.abs()[values.isfinite()].clamp(min=2**-126)
    ).all()  # the nearest bfloat16, not the one below


@pytest.mark.parametrize("top", [TOP_SIGNED, TOP_UNSIGNED])
def test_codes_of_moments_are_right_on_average(top: int) -> None:
    values = normal(4 * BLOCK) ** 3 if top == TOP_SIGNED else normal(4 * BLOCK) ** 4
    values[5] = 0.0
    total, trials = torch.zeros_like(values), 400
    for trial in range(trials):
        codes, scales = encode(values, noise(0, len(values), hashed(trial), values.device), top)
        decoded = decode(codes, scales, top)
        floor = scales.repeat_interleave(BLOCK) * 2.0 ** (-15 if top == TOP_SIGNED else -31)
        assert ((decoded - values).abs() <= torch.maximum(values.abs() / 8, floor)).all()
        total += decoded
    error = (total / trials - values).abs()
    large = values.abs() > 1e-4 * values.abs().max()
    assert (error[large] < 0.02 * values[large].abs()).all()  # 400 roundings by up to 12.5 %
    assert decoded[5] == 0 and scales.equal(values.abs().view(-1, BLOCK).amax(1))


def test_a_second_moment_never_becomes_zero() -> None:
    values = torch.full((BLOCK,), 1e-30)
    values[0] = 1.0
    codes, scales = encode(values, noise(0, BLOCK, 1, values.device), TOP_UNSIGNED)
    assert (decode(codes, scales, TOP_UNSIGNED) > 0).all()


def test_weights_are_rounded_to_either_neighbour() -> None:
    value = torch.full((20_000,), 1 + 0.3 * 2**-7)
    rounded = round_at_random(value, noise(0, len(value), 3, value.device)).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert (rounded > 1).float().mean().item() == pytest.approx(0.3, abs=0.02)


def trained(precision: Precision, steps: int, lr: float = 1e-3) -> tuple[Decoder, Any]:
    """The gradients do not depend on the weights, so that optimizers can be compared."""
    model = lowered(precision)
    optimizer = make_optimizer(model, OptimConfig(lr=lr, weight_decay=0.1))
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            grad = normal(*parameter.shape, seed=1000 * step + number) + 0.5 * normal(*parameter.shape, seed=number)
            parameter.grad = grad.bfloat16().to(parameter.dtype)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("precision", LOW)
def test_steps_are_those_of_adamw(precision: Precision) -> None:
    """With moments of 3 bits, each step may differ; many of them together hardly do."""
    exact, optimizer = trained("float32", 60)
    assert isinstance(optimizer, torch.optim.AdamW)
    low, optimizer = trained(precision, 60)
    assert isinstance(optimizer, AdamW8bit)
    start = weights_of(lowered("float32"))
    for before, a, b in zip(start, weights_of(exact), weights_of(low), strict=True):
        moved, difference = (a - before).norm(), (b - a).norm()
        if a.dim() < 2:
            assert torch.allclose(a, b, atol=1e-6)  # vectors have a plain state
        else:
            assert difference < {"8bit": 0.12, "bfloat16": 0.3}[precision] * moved, difference / moved
            cosine = torch.nn.functional.cosine_similarity((a - before).flatten(), (b - before).flatten(), dim=0)
            assert cosine > {"8bit": 0.99, "bfloat16": 0.96}[precision]


def test_updates_far_below_the_precision_of_bfloat16_are_not_lost() -> None:
    """A learning rate of 1e-6 changes weights of about 1 by 2^-20 per step."""
    for precision in LOW:
        parameter = nn.Parameter(torch.ones(64, 64))
        low = nn.Module()
        low.weight = parameter
        lower_precision(low, precision)  # type: ignore[arg-type]
        optimizer = AdamW8bit([{"params": [low.weight]}], lr=1e-5)
        for _ in range(50):
            low.weight.grad = torch.ones(64, 64, dtype=torch.bfloat16)
            optimizer.step()
        (weight,) = weights_of(low)
        tolerance = 1e-5 if precision == "8bit" else 1e-4
        assert weight.mean().item() == pytest.approx(1 - 50e-5, abs=tolerance)


def test_matrices_are_in_bfloat16_and_vectors_in_float32() -> None:
    for precision in LOW:
        model = lowered(precision)
        by_dim = {parameter.dim() >= 2: parameter.dtype for parameter in model.parameters()}
        assert by_dim == {True: torch.bfloat16, False: torch.float32}
        remainders = [remainder_of(parameter) is not None for parameter in model.parameters() if parameter.dim() >= 2]
        assert set(remainders) == {precision == "8bit"}
    assert {p.dtype for p in lowered("float32").parameters()} == {torch.float32}


def test_adapters_stay_in_float32_on_a_base_in_bfloat16() -> None:
    model = tiny_decoder(0, torch.float32)
    model.add_lora(Lora(2, 4.0))
    lower_precision(model, "8bit")
    kinds = {(p.requires_grad, p.dim() >= 2): p.dtype for p in model.parameters()}
    assert kinds[True, True] == torch.float32 and kinds[False, True] == torch.bfloat16
    assert all(remainder_of(parameter) is None for parameter in model.parameters())  # a frozen weight needs none
    assert isinstance(make_optimizer(model, OptimConfig()), torch.optim.AdamW)


@pytest.mark.parametrize("precision", LOW)
def test_state_is_saved_and_loaded(precision: Precision) -> None:
    model, optimizer = trained(precision, 3)
    saved = {k: v.detach().clone() for k, v in optimizer_tensors(model.named_parameters(), optimizer).items()}
    again = lowered(precision, seed=1)
    with torch.no_grad():
        for target, source in zip(again.parameters(), model.parameters(), strict=True):
            if target.dim() >= 2:
                target.copy_(source)  # vectors are part of the state: the model is saved in bfloat16
    loaded = make_optimizer(again, OptimConfig())
    shapes = {name: value.shape for name, value in saved.items()}
    for name, tensor in allocate_optimizer_state(again.named_parameters(), loaded, shapes).items():
        tensor.copy_(saved[name])
    assert all(a.equal(b) for a, b in zip(weights_of(model), weights_of(again), strict=True))
    assert optimizer_tensors(again.named_parameters(), loaded).keys() == saved.keys()
    for part in (model, again):
        for number, parameter in enumerate(part.parameters()):
            parameter.grad = normal(*parameter.shape, seed=number).to(parameter.dtype)
    loaded.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    for group, other in zip(loaded.param_groups, optimizer.param_groups, strict=True):
        group |= {name: other[name] for name in ("lr", "weight_decay")}
    optimizer.step(), loaded.step()
    assert all(a.equal(b) for a, b in zip(weights_of(model), weights_of(again), strict=True))  # rounding noise as well


def test_the_state_of_another_optimizer_is_refused() -> None:
    kinds: dict[str, tuple[Decoder, Any]] = {
        precision: trained(precision, 1) for precision in ("float32", "8bit", "bfloat16")
    }
    muon = tiny_decoder(0, torch.float32)
    kinds["muon"] = muon, make_optimizer(muon, OptimConfig(name="muon", matrix_lr=0.1))
    assert isinstance(kinds["muon"][1], Muon)
    muon_state = {f"{name}|momentum": p.shape for name, p in muon.named_parameters() if ".layers." in name}
    for name, (model, optimizer) in kinds.items():
        saved = {k: v.shape for k, v in optimizer_tensors(model.named_parameters(), optimizer).items()} or muon_state
        for other, (_, _) in kinds.items():
            if other == name:
                continue
            target = muon if other == "muon" else lowered(other)  # type: ignore[arg-type]
            cfg = OptimConfig(name="muon", matrix_lr=0.1) if other == "muon" else OptimConfig()
            with pytest.raises(UserError, match=r"optim\.precision"):
                allocate_optimizer_state(target.named_parameters(), make_optimizer(target, cfg), saved)


def test_muon_is_refused() -> None:
    with pytest.raises(UserError, match="Muon needs weights in float32"):
        make_optimizer(lowered("8bit"), OptimConfig(name="muon", matrix_lr=0.1))


def test_the_norm_of_gradients_in_bfloat16_is_exact() -> None:
    model = lowered("8bit")
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = normal(*parameter.shape, seed=number).to(parameter.dtype)
    squares = sum(parameter.grad.double().square().sum() for parameter in model.parameters())  # type: ignore[union-attr]
    assert float(clip_gradients(model.parameters(), 0.0)) == pytest.approx(float(squares) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("precision", LOW)
def test_moments_in_cpu_memory_change_nothing(precision: Precision) -> None:
    results = []
    for offload in (False, True):
        model = lowered(precision).to(DEVICE)
        for parameter in model.parameters():
            if (low := remainder_of(parameter)) is not None:
                parameter.low_bits = low.to(DEVICE)  # type: ignore[attr-defined]
        optimizer = make_optimizer(model, OptimConfig(lr=1e-3, offload=offload))
        for step in range(3):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = normal(*parameter.shape, seed=10 * step + number).to(parameter)
            optimizer.step()
        codes = [state[key] for state in optimizer.state.values() for key in state if key.endswith("codes")]
        assert {code.device.type for code in codes} == {"cpu" if offload else DEVICE.type}
        results.append([*weights_of(model), *codes])
    assert all(a.cpu().equal(b.cpu()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("size", [5, BLOCK, 9 * BLOCK + 17])
@pytest.mark.parametrize("precision", LOW)
def test_the_kernel_equals_the_reference(precision: Precision, size: int) -> None:
    """Roots and contracted products round differently in their last bit, which few 8-bit codes depend on."""
    pytest.importorskip("triton")
    from assay.training.learner import low_memory_kernels

    high, low = split(normal(size, scale=0.02))
    state: list[Any] = [high, low if precision == "8bit" else None]
    moments = torch.zeros(size, dtype=torch.uint8), torch.zeros(-(-size // BLOCK))
    state += [moments[0], moments[1], moments[0].clone(), moments[1].clone()]
    ours, theirs = ([None if x is None else x.to(DEVICE, copy=True) for x in state] for _ in range(2))
    for step in range(1, 5):
        grad = normal(size, seed=step, scale=10.0 ** (-3 * step)).bfloat16().to(DEVICE)
        coefficients = {"beta1": 0.9, "beta2": 0.95, "rate": 1e-3 / (1 - 0.9**step), "scale": (1 - 0.95**step) ** -0.5}
        coefficients |= {"eps": 1e-8, "keep": 0.999}
        for side, make_step in ((ours, low_memory_kernels.update), (theirs, low_memory.update)):
            make_step(side[0], side[1], grad, *side[2:], hashed(step), **coefficients)
    most = 0.0 if DEVICE.type == "cpu" else 0.01
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        assert (a != b).float().mean() <= most
    if precision == "8bit":
        assert torch.allclose(
            *(join(high, low) for high, low, *_ in (ours, theirs)), rtol=1e-6, atol=1e-9 + most * 1e-3
        )
    else:
        assert (ours[0] != theirs[0]).float().mean() <= most
