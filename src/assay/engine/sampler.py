"""Drawing tokens: batched, and keyed so that a draw depends on its own row and nothing else.

The noise of a token is one uniform number, an integer hash of (request seed, sample index, position), pushed through
the inverse of the row's cumulative distribution. Truncation only zeroes probabilities and keeps the vocabulary's order,
so a row that asks for none draws the same token whether or not its neighbours do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # tokens whose probabilities are summed first when drawing from a large vocabulary
HEAD = 1024  # truncation looks at this many of the likeliest tokens before it sorts the whole vocabulary
SLACK = 1 - 1e-6  # top-p: a set short of p by rounding alone has reached it


@dataclass(slots=True)
class Draw:
    """One token a row. A greedy token is certain: its sampling log-probability is 0."""

    tokens: Tensor  # [B] int64
    engine_logprobs: Tensor  # [B] at the sampling temperature (greedy: 1), before truncation; NaN where logits are
    sampling_logprobs: Tensor  # [B] after truncation
    kept_mass: Tensor  # [B] probability kept by truncation


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    greedy: bool | None = None,
    random: bool | None = None,
    truncate: bool | None = None,
) -> Draw:
    """Draw from logits [B, V]; all else is [B], `keys` from `noise_keys`, `positions` counted within the completion.

    `greedy`, `random` and `truncate` say whether any row is greedy, is not, or is truncated; who knows saves looking.
    """
    if greedy is None:
        greedy = bool((temperature == 0).any())
    if random is None:
        random = bool((temperature != 0).any())
    if truncate is None:
        truncate = bool(((top_k > 0) | (top_p < 1)).any())
    if greedy:
        certain = temperature == 0
        temperature = torch.where(certain, 1.0, temperature)
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    if not random:
        return certain_draw(logprobs)
    probs = logprobs.exp()
    mass = torch.ones_like(temperature)
    if truncate:
        probs = torch.where(kept(probs, top_k, top_p), probs, 0.0)
        mass = probs.sum(-1, dtype=torch.float64).float().clamp(max=1.0)
    tokens = invert(probs, uniform(keys, positions))
    if greedy:
        tokens = torch.where(certain, logprobs.argmax(-1), tokens)
    engine_logprobs = logprobs.gather(-1, tokens[:, None])[:, 0]
    sampling_logprobs = (engine_logprobs - mass.log()).clamp(max=0.0) if truncate else engine_logprobs
    if greedy:
        mass = torch.where(certain, 1.0, mass)
        sampling_logprobs = torch.where(certain, 0.0, sampling_logprobs)
    return Draw(tokens, engine_logprobs, sampling_logprobs, mass)


def certain_draw(logprobs: Tensor) -> Draw:
    engine_logprobs, tokens = logprobs.max(-1)
    return Draw(tokens, engine_logprobs, torch.zeros_like(engine_logprobs), torch.ones_like(engine_logprobs))


def invert(probs: Tensor, noise: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds the noise; one of probability 0 is never it."""
    vocabulary = probs.shape[-1]
    # Cumulative sums are float64: at 32 bits a large vocabulary's unlikely tokens would vanish between two of them.
    if vocabulary <= 4 * BLOCK:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        return above(cumulative, noise * cumulative[:, -1])
    # First the block, then the token within it: two short cumulative sums instead of one over everything.
    blocks = F.pad(probs, (0, -vocabulary % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double().cumsum(-1)
    target = noise * sums[:, -1]
    block = above(sums, target)
    before = F.pad(sums, (1, 0)).gather(-1, block[:, None])[:, 0]
    inside = blocks[torch.arange(len(block), device=block.device), block].cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + above(inside, target - before)).clamp(max=vocabulary - 1)


def above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place in each row where the sum exceeds the target, kept below the row's total against rounding."""
    target = torch.minimum(target, cumulative[:, -1] * (1 - 2.0**-52))
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return found.clamp(max=cumulative.shape[-1] - 1)  # only sums that are not numbers run past the end


def kept(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens survive: the top k, and of these the fewest that hold p of their mass. Ties go to the lower id."""
    vocabulary = probs.shape[-1]
    off = (top_k <= 0) | (top_k >= vocabulary)
    limit = torch.where(off, vocabulary, top_k)
    ranked = probs.topk(min(HEAD, vocabulary), dim=-1).values
    whole = off & (top_p >= 1)
    enough = whole | (limit <= HEAD) | (off & (ranked.sum(-1) >= top_p))
    if ranked.shape[-1] < vocabulary and not bool(enough.all()):
        ranked = probs.sort(dim=-1, descending=True).values
    within = torch.arange(ranked.shape[-1], device=probs.device) < limit[:, None]
    ordered = torch.where(within, ranked, 0.0).double()
    cumulative = ordered.cumsum(-1)
    wanted = top_p.double() * torch.where(off, 1.0, cumulative[:, -1]) * SLACK
    needed = (within & (cumulative - ordered < wanted[:, None])).sum(-1).clamp(min=1)
    number = torch.where(top_p < 1, needed, limit)
    last = ranked.gather(-1, (number.clamp(max=ranked.shape[-1]) - 1)[:, None])
    above, ties = probs > last, probs == last
    first_ties = ties & (ties.cumsum(-1) <= (number - above.sum(-1))[:, None])
    return above | first_ties | whole[:, None]


def noise_keys(seeds: Tensor, samples: Tensor) -> Tensor:
    """One key a sequence, from its request's seed [B] and its sample index [B] (int64)."""
    return mix(mix(seeds + GOLDEN) ^ mix(samples * GOLDEN + WEYL))


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Float64 in [0, 1), on a grid of 2**-52."""
    return shift(mix(keys + (positions + 1) * GOLDEN), 12).double() * 2.0**-52


def signed(value: int) -> int:
    """The 64-bit integer with the same bits as `value` modulo 2**64, as torch's int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63


# Odd constants with well-mixed bits: the golden ratio's fraction, one more like it, and splitmix64's two multipliers.
GOLDEN = signed(0x9E3779B97F4A7C15)
WEYL = signed(0xD1B54A32D192ED03)
MULTIPLIERS = (signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB))


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which each input bit changes about half the output bits."""
    x = (x ^ shift(x, 30)) * MULTIPLIERS[0]
    x = (x ^ shift(x, 27)) * MULTIPLIERS[1]
    return x ^ shift(x, 31)
