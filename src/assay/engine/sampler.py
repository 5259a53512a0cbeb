"""Drawing tokens: batched, and keyed so that a draw depends on its own row and nothing else.

The noise of a token is one uniform number, an integer hash of (request seed, sample index, position), pushed through
the inverse of the row's cumulative distribution. Truncation only zeroes probabilities and keeps the vocabulary's order,
so a row that asks for none draws the same token whether or not its neighbours do.

`draw_rows` is a whole step of the engine's table of rows; `kernels/sampling.py` does the same on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.engine.sequence import STOP_SLOTS, Column, RowState

BLOCK = 256  # tokens whose probabilities are summed first when drawing
SMALL = 4096  # a vocabulary for which a table of products costs less than a loop over rows
HEAD = 64  # truncation looks at this many of the likeliest tokens before it sorts the whole vocabulary
PART = 2**20  # logits that one CPU thread works on at a time
SLACK = 1 - 1e-6  # top-p: a set short of p by rounding alone has reached it


@dataclass(slots=True)
class Draw:
    """One token a row. A greedy token is certain: its sampling log-probability is 0.

    Where logits are not numbers, or no token is allowed, engine_logprobs is NaN and the token means nothing.
    """

    tokens: Tensor  # [B] int64
    engine_logprobs: Tensor  # [B] at the sampling temperature (greedy: 1), before forbidding and truncation
    sampling_logprobs: Tensor  # [B] after both
    kept_mass: Tensor  # [B] probability of what may be drawn
    entropies: Tensor  # [B] of the distribution that engine_logprobs are of


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    forbidden: Tensor | None = None,
    greedy: bool | None = None,
    random: bool | None = None,
    truncate: bool | None = None,
) -> Draw:
    """Draw from logits [B, V]; all else is [B], `keys` from `noise_keys`, `positions` counted within the completion.

    `forbidden` [B, F] holds distinct tokens, -1 where unused. `greedy`, `random` and `truncate` say whether any row is
    greedy, is not, or is truncated by top-k, top-p or min-p; who knows saves looking.
    """
    if greedy is None:
        greedy = bool((temperature == 0).any())
    if random is None:
        random = bool((temperature != 0).any())
    if truncate is None:
        truncate = random and bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
    noise = uniform(keys, positions)
    size = rows_at_once(logits)
    if len(logits) <= size:
        picks = pick(logits, temperature, top_k, top_p, min_p, noise, forbidden, greedy, random, truncate)
    else:
        parts = zip(*(column.split(size) for column in (logits, temperature, top_k, top_p, min_p, noise)), strict=True)
        bans = [None] * len(logits) if forbidden is None else forbidden.split(size)
        modes = (greedy, random, truncate)
        picks = joined([pick(*part, ban, *modes) for part, ban in zip(parts, bans, strict=False)])  # type: ignore
    return scored(picks, temperature == 0, greedy, logits.dtype)


@dataclass(slots=True)
class Picks:
    """What there is to know of each row once its token is chosen, all [B]; logits are over the temperature."""

    tokens: Tensor
    logit: Tensor  # of the token
    prob: Tensor  # of the token among the allowed; these need not quite sum to 1
    total: Tensor  # float64: what they sum to
    kept_total: Tensor  # float64: the same of those that truncation keeps
    mean: Tensor  # the sum of allowed logits, each times its probability
    removed: Tensor | None  # [B, F] logits of forbidden tokens, -inf where there are fewer


def pick(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    noise: Tensor,
    forbidden: Tensor | None,
    greedy: bool,
    random: bool,
    truncate: bool,
) -> Picks:
    """The part that passes over whole rows of the vocabulary, as seldom as can be."""
    certain = temperature == 0
    scaled = scale(logits, torch.where(certain, 1.0, temperature) if greedy else temperature)
    removed = places = None
    if forbidden is not None:
        scaled = scaled.clone() if scaled is logits else scaled
        removed, places = forbid(scaled, forbidden)
    tokens = best(scaled) if greedy else None
    probs = torch.softmax(scaled, dim=-1)
    sums = block_sums(probs)
    total = kept_total = sums.sum(-1)
    if places is not None:
        scaled[places] = 0.0  # their probability is 0, and 0 times -inf would be no number
    mean = dots(probs, scaled)
    if truncate:
        sums = truncate_rows(probs, sums, top_k, top_p, min_p, certain)
        kept_total = sums.sum(-1)
    if random:
        drawn = invert(probs, sums, noise)
        tokens = drawn if tokens is None else torch.where(certain, tokens, drawn)
    assert tokens is not None
    logit, prob = (table.gather(-1, tokens[:, None])[:, 0] for table in (scaled, probs))
    return Picks(tokens, logit, prob, total, kept_total, mean, removed)


def scored(picks: Picks, certain: Tensor, greedy: bool, dtype: torch.dtype) -> Draw:
    logprobs = (picks.prob.double() / picks.total).log()  # among the allowed
    normaliser, mean = picks.logit.double() - logprobs, picks.mean.double() / picks.total
    mass = (picks.kept_total / picks.total).clamp(max=1.0)
    engine_logprobs, sampling_logprobs = logprobs, (logprobs - mass.log()).clamp(max=0.0)
    if picks.removed is not None:
        removed = picks.removed.double()
        allowed, normaliser = normaliser, torch.cat((normaliser[:, None], removed), dim=-1).logsumexp(-1)
        shares = (removed - normaliser[:, None]).exp()
        share = (allowed - normaliser).exp()
        mean = share * mean + torch.where(shares > 0, shares * removed, 0.0).sum(-1)
        mass, engine_logprobs = mass * share, logprobs + (allowed - normaliser)
    if greedy:
        sampling_logprobs, mass = torch.where(certain, 0.0, sampling_logprobs), torch.where(certain, 1.0, mass)
    scores = (engine_logprobs, sampling_logprobs, mass, (normaliser - mean).clamp(min=0.0))
    return Draw(picks.tokens, *(score.to(torch.promote_types(dtype, torch.float32)) for score in scores))


def rows_at_once(logits: Tensor) -> int:
    """On a CPU the rows are taken in parts: the temporaries of a part stay small, and in the cache."""
    if logits.device.type != "cpu":
        return max(1, len(logits))
    return max(1, PART * torch.get_num_threads() // logits.shape[-1])


def joined(parts: list[Picks]) -> Picks:
    columns: list[Tensor] = []
    for field in fields(Picks):
        column = [getattr(part, field.name) for part in parts]
        columns.append(column[0] if column[0] is None else torch.cat(column))  # type: ignore
    return Picks(*columns)


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over temperature, in float32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if logits.device.type == "cpu" and bool((temperature == 1).all()):
        return wide
    divisor = temperature.to(wide.dtype)[:, None]
    return wide / divisor if wide is logits else wide.div_(divisor)


def forbid(scaled: Tensor, forbidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Take the forbidden tokens out, in place. What stood there [B, F], and where: rows and columns."""
    used = forbidden >= 0
    removed = scaled.gather(-1, forbidden.clamp(min=0)).masked_fill(~used, -torch.inf)
    rows, slots = used.nonzero(as_tuple=True)
    places = rows, forbidden[rows, slots]
    scaled[places] = -torch.inf
    return removed, places


def dots(probs: Tensor, values: Tensor) -> Tensor:
    """Row by row the sum of products, where a value of -inf has probability 0 and counts for nothing."""
    if probs.device.type != "cpu":
        return (probs * values.masked_fill(probs == 0, 0.0)).sum(-1)
    if probs.shape[-1] <= SMALL:
        products = torch.linalg.vecdot(probs, values)
    else:  # the way without a table of products
        products = torch.stack([p @ v for p, v in zip(probs, values, strict=True)])
    if bool(products.isnan().any()):
        products = torch.linalg.vecdot(probs, values.masked_fill(probs == 0, 0.0))
    return products


def truncate_rows(probs: Tensor, sums: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, certain: Tensor) -> Tensor:
    """Zero what may not be drawn, in place, and give the block sums of what is left. Greedy rows need none of it."""
    rows = (((top_k > 0) | (top_p < 1) | (min_p > 0)) & ~certain).nonzero()[:, 0]
    if len(rows) == 0:
        return sums
    total = sums.sum(-1)
    if len(rows) == len(probs):
        return block_sums(probs.mul_(kept(probs, total, top_k, top_p, min_p)))
    some = probs[rows]
    probs[rows] = some.mul_(kept(some, total[rows], top_k[rows], top_p[rows], min_p[rows]))
    return sums.index_copy(0, rows, block_sums(some))


def kept(probs: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """1.0 for tokens that survive, else 0.0: a CPU is faster with these than with booleans. `total`: sum of `probs`.

    Of the top k the fewest that hold p of their mass, and of these the ones at least min_p times as likely as the
    likeliest. Ties at the end of the top k and the top p go to the lower id.
    """
    number, last = cut(probs, total, top_k, top_p)
    floor = (min_p.clamp(max=1.0).to(probs.dtype) * probs.amax(-1))[:, None]
    keep = torch.ge(probs, torch.maximum(last, floor), out=torch.empty_like(probs))
    crowded = (keep.sum(-1) > number).nonzero()[:, 0]
    if len(crowded):  # too many are as likely as the last one
        some, tie = probs[crowded], last[crowded]
        more, ties = some > tie, some == tie
        room = number[crowded] - more.sum(-1)
        keep[crowded] = (more | (ties & (ties.cumsum(-1) <= room[:, None]))).to(probs.dtype)
    return keep


def cut(probs: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens top-k and top-p keep [B], and the probability of the last of them [B, 1]."""
    vocabulary = probs.shape[-1]
    limit = torch.where((top_k <= 0) | (top_k >= vocabulary), vocabulary, top_k)
    ranked = highest(probs, min(HEAD, int(limit.max())))
    number, last, enough = cut_ranked(ranked, total, limit, top_p, limit == vocabulary)
    rows = (~enough).nonzero()[:, 0]
    if len(rows):
        ranked = probs[rows].sort(dim=-1, descending=True).values
        number[rows], last[rows], _ = cut_ranked(
            ranked, total[rows], limit[rows], top_p[rows], limit[rows] == vocabulary
        )
    return number, last


def cut_ranked(
    ranked: Tensor, total: Tensor, limit: Tensor, top_p: Tensor, everything: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`cut` by the likeliest tokens in order, and whether they were enough; `everything`: rows without top-k."""
    width = ranked.shape[-1]
    within = torch.arange(width, device=ranked.device) < limit[:, None]
    ordered = torch.where(within, ranked, 0.0).double()
    cumulative = ordered.cumsum(-1)
    wanted = top_p.double() * torch.where(everything, total, cumulative[:, -1]) * SLACK
    needed = (within & (cumulative - ordered < wanted[:, None])).sum(-1).clamp(min=1)
    number = torch.where(top_p < 1, needed, limit)
    last = ranked.gather(-1, number.clamp(max=width)[:, None] - 1)
    whole = everything & (top_p >= 1)
    enough = (limit <= width) | whole | (everything & (cumulative[:, -1] >= wanted))
    return number, last.masked_fill(whole[:, None], 0.0), enough


def highest(probs: Tensor, count: int) -> Tensor:
    """The `count` highest in order. They stand in the `count` blocks with the highest maxima, or in the last one."""
    blocks = probs.shape[-1] // BLOCK
    if blocks <= 2 * count:
        return probs.topk(count, dim=-1).values
    body, tail = probs[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)), probs[:, blocks * BLOCK :]
    chosen = body.amax(-1).topk(count, dim=-1, sorted=False).indices
    rows = torch.arange(len(probs), device=probs.device)[:, None]
    return torch.cat((body[rows, chosen].flatten(1), tail), dim=-1).topk(count, dim=-1).values


def invert(probs: Tensor, sums: Tensor, noise: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds the noise; one of probability 0 is never it."""
    # First the block, then the token within it: two short cumulative sums instead of one over everything. They are
    # float64: at 32 bits a large vocabulary's unlikely tokens would vanish between two of them.
    cumulative = sums.cumsum(-1)
    target = noise * cumulative[:, -1]
    block = above(cumulative, target)
    before = F.pad(cumulative, (1, 0)).gather(-1, block[:, None])[:, 0]
    inside = in_block(probs, block, 0.0).cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + above(inside, target - before)).clamp(max=probs.shape[-1] - 1)


def above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place in each row where the sum exceeds the target, kept below the row's total against rounding."""
    target = torch.minimum(target, cumulative[:, -1] * (1 - 2.0**-52))
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return found.clamp(max=cumulative.shape[-1] - 1)  # only sums that are not numbers run past the end


def best(scaled: Tensor) -> Tensor:
    """The arg max, lowest id on ties: first among blocks, since torch's own is slow on a CPU."""
    block = by_block(scaled, torch.amax).argmax(-1)
    return (block * BLOCK + in_block(scaled, block, -torch.inf).argmax(-1)).clamp(max=scaled.shape[-1] - 1)


def block_sums(probs: Tensor) -> Tensor:
    return by_block(probs, torch.sum).double()


def by_block(table: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[B, V] -> [B, V / BLOCK rounded up]. The last, shorter block goes by itself: padding would copy the table."""
    count = table.shape[-1] // BLOCK
    body, tail = table[:, : count * BLOCK], table[:, count * BLOCK :]
    reduced = reduce(body.unflatten(-1, (count, BLOCK)), -1)
    return torch.cat((reduced, reduce(tail, -1)[:, None]), dim=-1) if tail.shape[-1] else reduced


def in_block(table: Tensor, block: Tensor, fill: float) -> Tensor:
    """[B, BLOCK or fewer]: of each row one block, filled up where the vocabulary ends."""
    if table.shape[-1] <= BLOCK:
        return table  # there is one block only
    places = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    beyond = places >= table.shape[-1]
    return table.gather(-1, places.clamp(max=table.shape[-1] - 1)).masked_fill(beyond, fill)


def draw_rows(
    logits: Tensor,
    ints: Tensor,
    floats: Tensor,
    forbidden: Tensor,
    step: Tensor,
    log_tokens: Tensor,
    log_scores: Tensor,
    *,
    greedy: bool | None = None,
    random: bool | None = None,
    truncate: bool | None = None,
    forbids: bool | None = None,
) -> None:
    """Draw for the first rows of the table from their logits [N, V] and bring the table up to date.

    `log_tokens` [S, R] and `log_scores` [4, S, R] (engine, sampling, kept mass, entropy) are written at step modulo S.
    Rows that do not run stay as they are. `forbids`: whether any row has forbidden tokens or a minimum length.
    """
    size = len(logits)
    rows, settings = ints[:size], floats[:size]
    temperature, top_p, min_p = settings[:, 0], settings[:, 1], settings[:, 2]
    draw = sample(
        logits,
        temperature,
        rows[:, Column.TOP_K],
        top_p,
        min_p,
        rows[:, Column.KEY],
        rows[:, Column.COUNT],
        forbidden=banned(rows, forbidden[:size], forbids),
        greedy=greedy,
        random=random,
        truncate=truncate,
    )
    running = rows[:, Column.STATE] == RowState.RUNNING
    tokens = torch.where(running, draw.tokens, rows[:, Column.TOKEN])
    scores = torch.stack((draw.engine_logprobs, draw.sampling_logprobs, draw.kept_mass, draw.entropies))
    at = step % len(log_tokens)
    log_tokens[at, :size] = torch.where(running, tokens.int(), log_tokens[at, :size])
    log_scores[:, at, :size] = torch.where(running, scores[:, None].to(log_scores.dtype), log_scores[:, at, :size])
    state = state_after(rows, tokens, draw.engine_logprobs)
    rows[:, Column.TOKEN] = tokens
    rows[:, Column.COUNT] += running
    rows[:, Column.POSITION] += running
    rows[:, Column.STATE] = torch.where(running, state, rows[:, Column.STATE])


def state_after(rows: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """The state of rows that ran, now that they have drawn these tokens."""
    ended = (rows[:, Column.COUNT] + 1 >= rows[:, Column.LIMIT]) * RowState.LENGTH
    stopped = (rows[:, Column.STOPS : Column.STOPS + STOP_SLOTS] == tokens[:, None]).any(1) * RowState.STOP
    return torch.maximum(torch.maximum(ended, stopped), logprobs.isnan() * RowState.BROKEN)


def banned(rows: Tensor, forbidden: Tensor, forbids: bool | None) -> Tensor | None:
    """The forbidden tokens of each row, and its stop tokens while it is too short; None where there are none."""
    early = rows[:, Column.COUNT] < rows[:, Column.MIN_NEW]
    if forbids is None:
        forbids = bool((early | (rows[:, Column.FORBIDDEN] > 0)).any())
    if not forbids:
        return None
    used = torch.arange(forbidden.shape[-1], device=rows.device) < rows[:, Column.FORBIDDEN, None]
    stops = rows[:, Column.STOPS : Column.STOPS + STOP_SLOTS]
    return torch.cat((forbidden.where(used, -1), stops.where(early[:, None], -1)), dim=-1)


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
