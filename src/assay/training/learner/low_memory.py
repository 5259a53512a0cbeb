"""AdamW in 8 (or 6) bytes per parameter instead of 16, for models whose weights fill a large part of a GPU.

Each weight matrix is stored in bfloat16, and so is its gradient. The two moments take 8 bits per number, with a scale
for each block of 256 numbers. What bfloat16 cannot represent of a weight is either kept in a second 16-bit number, the
remainder, so that the weight is exact to 32 bits (`optim.precision = "8bit"`), or rounded at random, so that it is
right on average ("bfloat16"). Vectors (norms, biases) and adapters are small: they stay in float32.

Moments are rounded at random as well. Rounding to the nearest code would never change a moment that moves by less than
half a code per step, which is the rule for the second moment.

The random bits are a hash of step, parameter and position: a resumed run rounds as the uninterrupted one would have.
On a GPU, `low_memory_kernels` makes the step in one pass over the memory; the torch code here is its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from assay.models import PolicyModel
from assay.models.lora import is_adapter

Precision = Literal["float32", "8bit", "bfloat16"]
BLOCK = 256  # numbers that share a scale
CHUNK = BLOCK * 2**16  # numbers that are updated at a time without Triton
# A code is the top of the bits of a float32 in (0, 1], counted down from that of 1.0, so that it is exponent and
# mantissa. Three bits of mantissa are kept: codes are at most 12.5 % apart. Code 0 is the number 0.
DROPPED = 20  # bits of the mantissa
ONE = 0x3F800000 >> DROPPED  # the kept bits of 1.0
TOP_SIGNED, TOP_UNSIGNED = 127, 255  # codes of 1.0; the smallest numbers are about 2^-16 and 2^-32 of the largest
LEAST_SCALE = 1e-37  # numbers of blocks with a smaller scale become 0: 1 / scale would overflow
MASK = 0xFFFFFFFF


def lower_precision(policy: PolicyModel, precision: Precision) -> None:
    """Store the weights as `optim.precision` says. Must be called before optimizers are made."""
    if precision == "float32":
        return
    for name, parameter in policy.named_parameters():
        if parameter.dim() >= 2 and parameter.is_floating_point() and not is_adapter(name):
            exact = parameter.data.float()
            if precision == "8bit" and parameter.requires_grad:
                parameter.data, parameter.low_bits = split(exact)  # type: ignore[attr-defined]
            else:
                parameter.data = exact.bfloat16()


def remainder_of(parameter: nn.Parameter) -> Tensor | None:
    return getattr(parameter, "low_bits", None)


def exact_parts(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a checkpoint's model, which is saved in bfloat16, lacks of a parameter of `AdamW8bit`."""
    if not isinstance(optimizer, AdamW8bit):
        return {}
    if parameter.dtype != torch.bfloat16:
        return {"weight": parameter}
    remainder = remainder_of(parameter)
    return {} if remainder is None else {"remainder": remainder}


def split(exact: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 nearest to each float32, and the remainder: the difference of their bits."""
    bits = exact.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers of `split`."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose state is small. Parameters that are not in bfloat16 get a plain AdamW state, in float32."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        offload: bool = False,
        make_step: Callable[..., None] | None = None,
    ) -> None:
        """`offload`: keep the moments of matrices in CPU memory. `make_step`: default `update`, or its kernel."""
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        self.offload = offload
        self.make_step: Callable[..., None] = make_step or update
        self.numbers = {parameter: number for number, parameter in enumerate(parameters)}

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = {"step": torch.zeros(())}
        if parameter.dtype != torch.bfloat16:
            return state | {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        blocks = -(-parameter.numel() // BLOCK)
        pinned = self.offload and parameter.is_cuda
        zeros = partial(torch.zeros, device="cpu" if self.offload else parameter.device, pin_memory=pinned)
        for name in ("exp_avg", "exp_avg_sq"):
            state[f"{name}_codes"] = zeros(parameter.shape, dtype=torch.uint8)
            state[f"{name}_scales"] = zeros(blocks, dtype=torch.float32)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= self.new_state(parameter)
                state["step"] += 1
                self._update(parameter, group, state)
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # the state is read by the CPU

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        coefficients = {
            "beta1": beta1,
            "beta2": beta2,
            "rate": group["lr"] / (1 - beta1**step),
            "scale": (1 - beta2**step) ** -0.5,
            "eps": group["eps"],
            "keep": 1 - group["lr"] * group["weight_decay"],
        }
        assert parameter.grad is not None
        if parameter.dtype != torch.bfloat16:
            targets = parameter, state["exp_avg"], state["exp_avg_sq"]
            for target, value in zip(
                targets, adamw(targets[0], parameter.grad, *targets[1:], **coefficients), strict=True
            ):
                target.copy_(value)
            return
        kept = [state[f"{name}_{part}"] for name in ("exp_avg", "exp_avg_sq") for part in ("codes", "scales")]
        moments = [tensor.to(parameter.device, non_blocking=True) for tensor in kept]
        seed = hashed(hashed(step) ^ self.numbers[parameter])
        self.make_step(parameter, remainder_of(parameter), parameter.grad, *moments, seed, **coefficients)
        if self.offload:
            for tensor, new in zip(kept, moments, strict=True):
                tensor.copy_(new, non_blocking=True)


def adamw(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta1: float,
    beta2: float,
    rate: float,
    scale: float,
    eps: float,
    keep: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """New weight and moments. `rate`, `scale`: with the corrections for moments that began at zero."""
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    return keep * weight - rate * first / (second.sqrt() * scale + eps), first, second


def update(
    weight: Tensor,
    remainder: Tensor | None,
    grad: Tensor,
    first_codes: Tensor,
    first_scales: Tensor,
    second_codes: Tensor,
    second_scales: Tensor,
    seed: int,
    **coefficients: float,
) -> None:
    """One step of AdamW, in place."""
    flat = [x.view(-1) for x in (weight, grad.contiguous(), first_codes, second_codes)]
    rest = None if remainder is None else remainder.view(-1)
    for start in range(0, weight.numel(), CHUNK):
        at, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
        high, slope, codes1, codes2 = (x[at] for x in flat)
        exact = high.float() if rest is None else join(high, rest[at])
        first = decode(codes1, first_scales[blocks], TOP_SIGNED)
        second = decode(codes2, second_scales[blocks], TOP_UNSIGNED)
        new, first, second = adamw(exact, slope.float(), first, second, **coefficients)
        bits1 = noise(start, len(high), seed, weight.device)
        bits2 = hashed(bits1 + 0x9E3779B9)
        codes1[:], first_scales[blocks] = encode(first, bits1, TOP_SIGNED)
        codes2[:], second_scales[blocks] = encode(second, bits2, TOP_UNSIGNED)
        if rest is None:
            high[:] = round_at_random(new, (bits1 >> DROPPED) | (bits2 >> DROPPED) << 12)
        else:
            high[:], rest[at] = split(new)


def encode(values: Tensor, random_bits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Codes and scales. `top`: TOP_SIGNED, or TOP_UNSIGNED for numbers that are not negative."""
    padded = nn.functional.pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = padded.amax(1)
    inverse = torch.where(scales > LEAST_SCALE, 1 / scales, 0.0)
    relative = (padded * inverse[:, None]).clamp(max=1.0).view(-1)[: len(values)]
    low = random_bits & ((1 << DROPPED) - 1)
    codes = ((relative.view(torch.int32).long() + low) >> DROPPED) - (ONE - top)
    # Below the smallest number: that or 0, at random. A second moment of 0 would make the next update infinite.
    smallest = code_value(torch.tensor(1), top).item()
    up = low.float() * 2.0**-DROPPED * smallest < relative if top == TOP_SIGNED else relative > 0
    codes = torch.where(relative < smallest, up.long(), codes)
    if top == TOP_SIGNED:
        codes |= (values < 0).long() << 7
    return codes.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, top: int) -> Tensor:
    magnitude = codes.int() & top
    values = torch.where(magnitude > 0, code_value(magnitude, top), 0.0)
    if top == TOP_SIGNED:
        values = torch.where(codes > TOP_SIGNED, -values, values)
    return values * scales.repeat_interleave(BLOCK)[: len(codes)]


def code_value(codes: Tensor, top: int) -> Tensor:
    """The number that a code above 0 stands for."""
    return ((codes.int() + (ONE - top)) << DROPPED).view(torch.float32)


def round_at_random(values: Tensor, random_bits: Tensor) -> Tensor:
    """To one of the two nearest bfloat16, with probabilities that make the result right on average."""
    bits = values.view(torch.int32).long() + (random_bits & 0xFFFF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def noise(start: int, count: int, seed: int, device: torch.device) -> Tensor:
    """32 random bits per position, as int64."""
    return hashed(torch.arange(start, start + count, device=device) ^ seed)


Bits = TypeVar("Bits", int, Tensor)


def hashed(x: Bits) -> Bits:
    """32 bits in which every bit of `x` has the same influence (the constants are those of `lowbias32`)."""
    x = x & MASK
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK
    return x ^ x >> 16
