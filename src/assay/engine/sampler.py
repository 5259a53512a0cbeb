"""Sampling of tokens in torch: the reference implementation, for any device and dtype.

The noise of a token is one uniform number, a hash of (request seed, sample index, position), which is mapped through
the inverse of the row's cumulative distribution. A sampled token therefore depends on its own row only. Truncation sets
probabilities to 0 and keeps the order of the vocabulary, so a row without truncation samples the same token whether or
not other rows are truncated.

`sample_rows` is one step for the engine's table of rows. The native engine has two faster implementations of it:
`native/kernels/sampling.py` on CUDA, and `native/kernels/cpu.c` for float32 on CPUs, for steps in which no row is
truncated or has forbidden tokens. All other steps, and the hf engine, use this module.

`Rows` has the running sequences as tensors, one row each: inputs of the next step, sampling parameters, a log of
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.engine.base import TokenScores
from assay.engine.sequence import FORBIDDEN_SLOTS, STOP_SLOTS, WIDTH, Column, Job, Modes, RowState, Sample

BLOCK = 256  # tokens whose probabilities are summed first
SMALL_VOCAB = 4096  # up to this size, a table of products is cheaper than a loop over rows
HEAD = 64  # truncation looks at this many of the most likely tokens before it sorts the whole vocabulary
ALL_MODES = Modes(greedy=True, random=True, truncate=True, forbids=True)
TOP_P_SLACK = 1 - 1e-6  # top-p: a set that misses p by rounding alone has reached it


@dataclass(slots=True)
class Sampled:
    """One token per row. A greedy token is certain: its sampling log-probability is 0.

    If a row has NaN logits, or no token is allowed, its engine log-probability is NaN and its token is meaningless.
    """

    tokens: Tensor  # [B] int64
    engine_logprobs: Tensor  # [B] at the sampling temperature (greedy: 1), before forbidden tokens and truncation
    sampling_logprobs: Tensor  # [B] after both
    kept_mass: Tensor  # [B] probability of the tokens that can be sampled
    entropies: Tensor  # [B] of the distribution of the engine log-probabilities


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
    modes: Modes = ALL_MODES,
) -> Sampled:
    """Sample from logits [B, V]. All other tensors are [B]: `keys` from `noise_keys`, `positions` in the completion.

    `forbidden` [B, F] holds distinct tokens, -1 in unused entries. `modes`: whether any row may be greedy, random, or
    truncated by top-k, top-p or min-p. False saves work.
    """
    is_greedy = temperature == 0
    scaled = scale(logits, torch.where(is_greedy, 1.0, temperature) if modes.greedy else temperature)
    removed = None
    if forbidden is not None:
        scaled = scaled.clone() if scaled is logits else scaled
        removed, removed_at = forbid(scaled, forbidden)
    tokens = argmax(scaled) if modes.greedy else None
    probs = torch.softmax(scaled, dim=-1)
    sums = block_sums(probs)
    total = kept_total = sums.sum(-1)
    if forbidden is not None:
        scaled[removed_at] = 0.0  # their probability is 0, and 0 * -inf would be NaN
    mean = dots(probs, scaled)
    if modes.truncate:
        sums = truncate_rows(probs, sums, top_k, top_p, min_p, is_greedy)
        kept_total = sums.sum(-1)
    if modes.random:
        drawn = invert_cdf(probs, sums, uniform(keys, positions))
        tokens = drawn if tokens is None else torch.where(is_greedy, tokens, drawn)
    assert tokens is not None, "rows are greedy or random"
    logit, prob = (table.gather(-1, tokens[:, None])[:, 0] for table in (scaled, probs))
    scores = scores_of(logit, prob, mean, total, kept_total, removed)
    if modes.greedy:
        scores[1], scores[2] = torch.where(is_greedy, 0.0, scores[1]), torch.where(is_greedy, 1.0, scores[2])
    return Sampled(tokens, *(score.to(torch.promote_types(logits.dtype, torch.float32)) for score in scores))


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of target tokens [N] from logits [N, V], in float32 at least."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def token_scores(logits: Tensor, targets: Tensor, count: int, temperature: float) -> TokenScores:
    """Scores of target tokens [N] and of the `count` most likely tokens, from logits [N, V], in float32 at least."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = scaled.log_softmax(-1)
    given = logprobs.gather(1, targets[:, None])
    ranks = (logprobs > given).sum(-1) + 1
    values, tokens = logprobs.topk(count, dim=-1)
    top = [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
    return TokenScores(given[:, 0].tolist(), ranks.tolist(), top)


def joined_scores(parts: Iterable[TokenScores]) -> TokenScores:
    """The scores of consecutive tokens."""
    joined = TokenScores([], [], [])
    for part in parts:
        joined.logprobs.extend(part.logprobs)
        joined.ranks.extend(part.ranks)
        joined.top.extend(part.top)
    return joined


def scores_of(
    logit: Tensor, prob: Tensor, mean: Tensor, total: Tensor, kept_total: Tensor, removed: Tensor | None
) -> list[Tensor]:
    """Engine and sampling log-probabilities, kept mass and entropies, in float64.

    For each row: logit and probability of its token among the allowed ones, sum of allowed logits weighted by
    probability, sum of the probabilities (not exactly 1), the same of those left by truncation, and the logits of its
    forbidden tokens [B, F] (-inf in unused entries). Logits are divided by the temperature.
    """
    logprobs = (prob.double() / total).log()  # among the allowed tokens
    normalizer, mean = logit.double() - logprobs, mean.double() / total
    mass = (kept_total / total).clamp(max=1.0)
    engine_logprobs, sampling_logprobs = logprobs, (logprobs - mass.log()).clamp(max=0.0)
    if removed is not None:
        removed = removed.double()
        allowed, normalizer = normalizer, torch.cat((normalizer[:, None], removed), dim=-1).logsumexp(-1)
        removed_probs = (removed - normalizer[:, None]).exp()
        allowed_prob = (allowed - normalizer).exp()
        mean = allowed_prob * mean + torch.where(removed_probs > 0, removed_probs * removed, 0.0).sum(-1)
        mass, engine_logprobs = mass * allowed_prob, logprobs + (allowed - normalizer)
    return [engine_logprobs, sampling_logprobs, mass, (normalizer - mean).clamp(min=0.0)]


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits divided by the temperature, in float32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if logits.device.type == "cpu" and bool((temperature == 1).all()):
        return wide
    divisor = temperature.to(wide.dtype)[:, None]
    return wide / divisor if wide is logits else wide.div_(divisor)


def forbid(scaled: Tensor, forbidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Set forbidden logits to -inf, in place; returns their values [B, F] and their rows and columns."""
    used = forbidden >= 0
    removed = scaled.gather(-1, forbidden.clamp(min=0)).masked_fill(~used, -torch.inf)
    rows, slots = used.nonzero(as_tuple=True)
    removed_at = rows, forbidden[rows, slots]
    scaled[removed_at] = -torch.inf
    return removed, removed_at


def dots(probs: Tensor, values: Tensor) -> Tensor:
    """Sum of products of each row; a value of -inf has probability 0 and contributes 0."""
    if probs.device.type != "cpu":
        return (probs * values.masked_fill(probs == 0, 0.0)).sum(-1)
    if probs.shape[-1] <= SMALL_VOCAB:
        products = torch.linalg.vecdot(probs, values)
    else:
        products = torch.stack([p @ v for p, v in zip(probs, values, strict=True)])
    if bool(products.isnan().any()):
        products = torch.linalg.vecdot(probs, values.masked_fill(probs == 0, 0.0))
    return products


def truncate_rows(
    probs: Tensor, sums: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, is_greedy: Tensor
) -> Tensor:
    """Set truncated probabilities to 0, in place, and return the new block sums. Greedy rows are not truncated."""
    rows = (((top_k > 0) | (top_p < 1) | (min_p > 0)) & ~is_greedy).nonzero()[:, 0]
    if len(rows) == 0:
        return sums
    total = sums.sum(-1)
    if len(rows) == len(probs):
        return block_sums(probs.mul_(keep_mask(probs, total, top_k, top_p, min_p)))
    some = probs[rows]
    probs[rows] = some.mul_(keep_mask(some, total[rows], top_k[rows], top_p[rows], min_p[rows]))
    return sums.index_copy(0, rows, block_sums(some))


def keep_mask(probs: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """1.0 for tokens that are kept, 0.0 for others (on a CPU faster than booleans). `total`: sum of `probs`.

    Kept are, of the top k, the smallest set that holds p of their mass and, of these, tokens at least min_p times as
    likely as the most likely one. Ties at the end of top-k and top-p are broken in favour of lower ids.
    """
    number, last = truncation_point(probs, total, top_k, top_p)
    min_prob = (min_p.clamp(max=1.0).to(probs.dtype) * probs.amax(-1))[:, None]
    keep = torch.ge(probs, torch.maximum(last, min_prob), out=torch.empty_like(probs))
    tied = (keep.sum(-1) > number).nonzero()[:, 0]
    if len(tied):  # too many tokens are as likely as the last one
        some, tie = probs[tied], last[tied]
        more, ties = some > tie, some == tie
        number_of_ties = number[tied] - more.sum(-1)
        keep[tied] = (more | (ties & (ties.cumsum(-1) <= number_of_ties[:, None]))).to(probs.dtype)
    return keep


def truncation_point(probs: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Number of tokens that top-k and top-p keep [B], and the probability of the last of them [B, 1]."""
    vocab_size = probs.shape[-1]
    limit = torch.where((top_k <= 0) | (top_k >= vocab_size), vocab_size, top_k)
    head = top_values(probs, min(HEAD, int(limit.max())))
    number, last, enough = truncation_point_of_sorted(head, total, limit, top_p, limit == vocab_size)
    rows = (~enough).nonzero()[:, 0]
    if len(rows):
        ranked = probs[rows].sort(dim=-1, descending=True).values
        number[rows], last[rows], _ = truncation_point_of_sorted(
            ranked, total[rows], limit[rows], top_p[rows], limit[rows] == vocab_size
        )
    return number, last


def truncation_point_of_sorted(
    ranked: Tensor, total: Tensor, limit: Tensor, top_p: Tensor, no_top_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`truncation_point` from the highest probabilities in descending order, and whether these were enough."""
    width = ranked.shape[-1]
    within = torch.arange(width, device=ranked.device) < limit[:, None]
    ordered = torch.where(within, ranked, 0.0).double()
    cumulative = ordered.cumsum(-1)
    goal = top_p.double() * torch.where(no_top_k, total, cumulative[:, -1]) * TOP_P_SLACK
    needed = (within & (cumulative - ordered < goal[:, None])).sum(-1).clamp(min=1)
    number = torch.where(top_p < 1, needed, limit)
    last = ranked.gather(-1, number.clamp(max=width)[:, None] - 1)
    everything = no_top_k & (top_p >= 1)
    enough = (limit <= width) | everything | (no_top_k & (cumulative[:, -1] >= goal))
    return number, last.masked_fill(everything[:, None], 0.0), enough


def top_values(probs: Tensor, count: int) -> Tensor:
    """The `count` highest values in descending order, faster than `topk` over a large vocabulary.

    They are in the last, shorter block or in the `count` blocks with the highest maxima.
    """
    blocks = probs.shape[-1] // BLOCK
    if blocks <= 2 * count:
        return probs.topk(count, dim=-1).values
    body, tail = probs[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)), probs[:, blocks * BLOCK :]
    chosen = body.amax(-1).topk(count, dim=-1, sorted=False).indices
    rows = torch.arange(len(probs), device=probs.device)[:, None]
    return torch.cat((body[rows, chosen].flatten(1), tail), dim=-1).topk(count, dim=-1).values


def invert_cdf(probs: Tensor, sums: Tensor, noise: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds the noise; never one of probability 0."""
    # The block first, then the token within it: two short cumulative sums instead of one over the vocabulary. They are
    # float64: in float32, unlikely tokens of a large vocabulary would vanish between two cumulative sums.
    cumulative = sums.cumsum(-1)
    target = noise * cumulative[:, -1]
    block = first_above(cumulative, target)
    before = F.pad(cumulative, (1, 0)).gather(-1, block[:, None])[:, 0]
    inside = in_block(probs, block, 0.0).cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + first_above(inside, target - before)).clamp(max=probs.shape[-1] - 1)


def first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index in each row at which the cumulative sum first exceeds the target, which rounding cannot put at the end."""
    target = torch.minimum(target, cumulative[:, -1] * (1 - 2.0**-52))
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return index.clamp(max=cumulative.shape[-1] - 1)  # only NaN sums lead past the end


def argmax(scaled: Tensor) -> Tensor:
    """Lowest id among the maxima. The block first, then the token: torch's own argmax is slow on a CPU."""
    block = by_block(scaled, torch.amax).argmax(-1)
    return (block * BLOCK + in_block(scaled, block, -torch.inf).argmax(-1)).clamp(max=scaled.shape[-1] - 1)


def block_sums(probs: Tensor) -> Tensor:
    return by_block(probs, torch.sum).double()


def by_block(table: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[B, V] -> [B, V / BLOCK rounded up]. The last, shorter block is separate: padding would copy the table."""
    count = table.shape[-1] // BLOCK
    body, tail = table[:, : count * BLOCK], table[:, count * BLOCK :]
    reduced = reduce(body.unflatten(-1, (count, BLOCK)), -1)
    return torch.cat((reduced, reduce(tail, -1)[:, None]), dim=-1) if tail.shape[-1] else reduced


def in_block(table: Tensor, block: Tensor, fill: float) -> Tensor:
    """[B, BLOCK or fewer]: one block of each row, with `fill` behind the end of the vocabulary."""
    if table.shape[-1] <= BLOCK:
        return table  # there is only one block
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    outside = ids >= table.shape[-1]
    return table.gather(-1, ids.clamp(max=table.shape[-1] - 1)).masked_fill(outside, fill)


def sample_rows(
    logits: Tensor,
    ints: Tensor,
    floats: Tensor,
    forbidden: Tensor,
    step: Tensor,
    log_tokens: Tensor,
    log_scores: Tensor,
    modes: Modes = ALL_MODES,
) -> None:
    """Sample for the first rows of the engine's table from their logits [N, V], and update the table.

    `log_tokens` [S, R] and `log_scores` [4, S, R] (engine, sampling, kept mass, entropy) are written at step modulo S.
    Rows that are not running are not changed.
    """
    size = len(logits)
    rows, settings = ints[:size], floats[:size]
    temperature, top_p, min_p = settings[:, 0], settings[:, 1], settings[:, 2]
    sampled = sample(
        logits,
        temperature,
        rows[:, Column.TOP_K],
        top_p,
        min_p,
        rows[:, Column.KEY],
        rows[:, Column.COUNT],
        forbidden=forbidden_now(rows, forbidden[:size]) if modes.forbids else None,
        modes=modes,
    )
    running = rows[:, Column.STATE] == RowState.RUNNING
    tokens = torch.where(running, sampled.tokens, rows[:, Column.TOKEN])
    scores = (sampled.engine_logprobs, sampled.sampling_logprobs, sampled.kept_mass, sampled.entropies)
    new_scores = torch.stack(scores)[:, None].to(log_scores.dtype)
    at = step % len(log_tokens)
    log_tokens[at, :size] = torch.where(running, tokens.int(), log_tokens[at, :size])
    log_scores[:, at, :size] = torch.where(running, new_scores, log_scores[:, at, :size])
    state = state_after(rows, tokens, sampled.engine_logprobs)
    rows[:, Column.TOKEN] = tokens
    rows[:, Column.COUNT] += running
    rows[:, Column.POSITION] += running
    rows[:, Column.STATE] = torch.where(running, state, rows[:, Column.STATE])


def state_after(rows: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """State of running rows after these tokens were sampled."""
    ended = (rows[:, Column.COUNT] + 1 >= rows[:, Column.LIMIT]) * RowState.LENGTH
    stopped = (rows[:, Column.STOPS : Column.STOPS + STOP_SLOTS] == tokens[:, None]).any(1) * RowState.STOP
    return torch.maximum(torch.maximum(ended, stopped), logprobs.isnan() * RowState.BROKEN)


def forbidden_now(rows: Tensor, forbidden: Tensor) -> Tensor | None:
    """Forbidden tokens of each row, and its stop tokens below its minimum length; -1 in unused entries."""
    early = rows[:, Column.COUNT] < rows[:, Column.MIN_NEW]
    used = torch.arange(forbidden.shape[-1], device=rows.device) < rows[:, Column.FORBIDDEN, None]
    stops = rows[:, Column.STOPS : Column.STOPS + STOP_SLOTS]
    return torch.cat((forbidden.where(used, -1), stops.where(early[:, None], -1)), dim=-1)


def noise_keys(seeds: Tensor, samples: Tensor) -> Tensor:
    """One key per sequence, from its request's seed [B] and its sample index [B] (int64)."""
    return mix(mix(seeds + GOLDEN) ^ mix(samples * GOLDEN + WEYL))


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Float64 in [0, 1), multiples of 2**-52."""
    return shift(mix(keys + (positions + 1) * GOLDEN), 12).double() * 2.0**-52


def signed(value: int) -> int:
    """The int64 with the same bits as `value` modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


# Odd constants with well-mixed bits: the golden ratio's fraction, a similar one, and splitmix64's two multipliers.
GOLDEN = signed(0x9E3779B97F4A7C15)
WEYL = signed(0xD1B54A32D192ED03)
MULTIPLIERS = (signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB))


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which each input bit changes about half of the output bits."""
    x = (x ^ shift(x, 30)) * MULTIPLIERS[0]
    x = (x ^ shift(x, 27)) * MULTIPLIERS[1]
    return x ^ shift(x, 31)


STAGING_BYTES = 1 << 25
ALIGNMENT = 64
LOG_STEPS = 64  # steps in the log before it is overwritten


class Staging:
    """Copies small arrays to the device asynchronously, from one buffer of pinned memory.

    The buffer has two halves. Before a half is used again, the copies from it are synchronized.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.offset, self.half = 0, STAGING_BYTES // 2
        self.memory: Tensor | None = None
        self.sent: list[torch.cuda.Event | None] = [None, None]  # recorded when a half is full

    def upload(self, values: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda" or not 0 < values.nbytes <= self.half:
            return host.to(self.device)
        if self.memory is None:
            self.memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        pinned = self._allocate(values.nbytes).view(host.dtype).view(host.shape)
        pinned.copy_(host)
        return pinned.to(self.device, non_blocking=True)

    def _allocate(self, size: int) -> Tensor:
        assert self.memory is not None
        start = -(-self.offset // ALIGNMENT) * ALIGNMENT
        current = self.offset // self.half if self.offset < STAGING_BYTES else 1
        if start + size > (current + 1) * self.half:
            event = torch.cuda.Event()
            event.record()
            self.sent[current] = event
            current = 1 - current
            start = current * self.half
            arrived = self.sent[current]
            if arrived is not None:
                arrived.synchronize()
        self.offset = start + size
        return self.memory[start : start + size]


@dataclass(slots=True)
class StepOutput:
    """Results of some decoding steps: tokens and scores by step and row, counts and states after the last step."""

    samples: list[Sample]  # by row
    first: int  # index of the first step
    tokens: Tensor  # [steps, rows] int32
    scores: Tensor  # [4, steps, rows]: engine and sampling log-probabilities, kept mass, entropy
    after: Tensor  # [2, rows]: number of sampled tokens, state
    ready: torch.cuda.Event | None = None

    def wait(self) -> StepOutput:
        if self.ready is not None:
            self.ready.synchronize()
        return self


def score_type(dtype: torch.dtype) -> type[np.floating]:
    """Of scores and sampling parameters, by the dtype of the model."""
    return np.float64 if dtype == torch.float64 else np.float32


class Rows:
    """Tensors with one row per running sequence; rows in use come first."""

    def __init__(self, rows: int, max_blocks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of the model."""
        self.device, self.size, self.float_type = device, rows, score_type(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.upload = Staging(device).upload  # copies to the device without waiting for it
        self.ints = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)
        self.ints[:, Column.STATE] = RowState.IDLE
        self.floats = torch.zeros(rows, 4, dtype=wide, device=device)  # temperature, top_p, min_p, unused
        self.forbidden = torch.full((rows, FORBIDDEN_SLOTS), -1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.log_tokens = torch.zeros(LOG_STEPS, rows, dtype=torch.int32, device=device)
        self.log_scores = torch.zeros(4, LOG_STEPS, rows, dtype=wide, device=device)
        self.modes = Modes()
        self.host_tables = np.zeros((rows, max_blocks), dtype=np.int32)
        self.prompt_lengths = np.zeros(rows, dtype=np.int64)  # tokens before the first sampled one
        self.start_offsets = np.zeros(rows, dtype=np.int64)  # sequence length minus step, constant while it runs
        self.tables_changed = False

    def column(self, column: Column, size: int) -> Tensor:
        return self.ints[:size, column]

    def enter(self, samples: Sequence[Sample]) -> None:
        """Fill the rows of samples that enter; these rows are consecutive."""
        rows = slice(samples[0].row, samples[0].row + len(samples))
        by_id = {id(sample.job): sample.job for sample in samples}
        indices, jobs = {key: index for index, key in enumerate(by_id)}, list(by_id.values())
        of_job = np.array([indices[id(sample.job)] for sample in samples])
        ints = np.array([row_of(job) for job in jobs], dtype=np.int64)[of_job]
        seeds = torch.tensor([signed(job.request.seed) for job in jobs])[of_job]
        ints[:, Column.KEY] = noise_keys(seeds, torch.tensor([sample.index for sample in samples])).numpy()
        for index, sample in enumerate(samples):
            if sample.drawn:  # it continues after a preemption
                ints[index, [Column.TOKEN, Column.COUNT]] = sample.drawn[-1], len(sample.drawn)
                ints[index, [Column.POSITION, Column.STORED]] = sample.start - 1, sample.start
        self.ints[rows] = self.upload(ints)
        self.prompt_lengths[rows] = np.array([len(job.tokens) for job in jobs])[of_job]
        drawn = [len(sample.drawn) - sample.entered for sample in samples]
        self.start_offsets[rows] = self.prompt_lengths[rows] + drawn
        params = [job.request.params for job in jobs]
        floats = [(p.temperature, p.top_p, p.min_p, 0.0) for p in params]
        self.floats[rows] = self.upload(np.array(floats, dtype=self.float_type)[of_job])
        if any(p.forbidden_token_ids for p in params):
            forbidden = [padded(sorted(set(p.forbidden_token_ids)), FORBIDDEN_SLOTS) for p in params]
            self.forbidden[rows] = self.upload(np.array(forbidden, dtype=np.int64)[of_job])

    def update_modes(self, running: Sequence[Sample]) -> None:
        """Must be called after rows were added or removed."""
        wanted = {sample.job.modes for sample in running}
        self.modes = Modes(*(any(mode) for mode in zip(*wanted, strict=True)))

    def draw(self, logits: Tensor) -> None:
        """Sample a token for each row of logits [B, V], in torch, and update the rows."""
        tables = (self.ints, self.floats, self.forbidden, self.step, self.log_tokens, self.log_scores)
        sample_rows(logits, *tables, self.modes)
        self.step += 1

    def add_blocks(self, samples: Sequence[Sample]) -> None:
        """Add the new blocks of samples to the block tables on the host."""
        for sample in samples:
            start, count = sample.blocks_in_table, len(sample.blocks)
            if start == count - 1:
                self.host_tables[sample.row, start] = sample.blocks[start]
            else:
                self.host_tables[sample.row, start:count] = sample.blocks[start:]
            sample.blocks_in_table = count
        self.tables_changed = self.tables_changed or bool(samples)

    def write_tables(self, size: int, width: int) -> None:
        """Copy the block tables of the first `size` rows to the device, up to `width` blocks each."""
        if self.tables_changed:
            self.tables[:size, :width] = self.upload(self.host_tables[:size, :width])
            self.tables_changed = False

    def move(self, moves: Sequence[tuple[int, int]], size: int, before: int) -> None:
        """Move rows (from, to) so that the first `size` rows are in use; before, the first `before` rows were."""
        if moves:
            froms, tos = (np.array(side) for side in zip(*moves, strict=True))
            for kept in (self.host_tables, self.prompt_lengths, self.start_offsets):
                kept[tos] = kept[froms]
            self.tables_changed = True
            sources, destinations = self.upload(froms), self.upload(tos)
            for table in (self.ints, self.floats, self.forbidden):
                table.index_copy_(0, destinations, table.index_select(0, sources))
        self.ints[size:before, Column.STATE] = RowState.IDLE

    def read(self, samples: list[Sample], first: int, steps: int) -> StepOutput:
        """Results of the `steps` steps from `first` on. On a GPU, the copy to the host is asynchronous."""
        start, size = first % LOG_STEPS, len(samples)
        assert start + steps <= LOG_STEPS
        tokens = self.log_tokens[start : start + steps, :size]
        scores = self.log_scores[:, start : start + steps, :size]
        after = torch.stack((self.column(Column.COUNT, size), self.column(Column.STATE, size)))
        output = StepOutput(samples, first, tokens, scores, after)
        if self.device.type == "cuda":
            output.tokens, output.scores, output.after = (to_host(x) for x in (tokens, scores, after))
            output.ready = torch.cuda.Event()
            output.ready.record()
        elif self.device.type != "cpu":
            output.tokens, output.scores, output.after = (x.cpu() for x in (tokens, scores, after))
        return output


def row_of(job: Job) -> list[int]:
    """The integers of a sample without sampled tokens; the noise key is added later."""
    params = job.request.params
    forbidden = set(params.forbidden_token_ids)
    values = {
        Column.TOKEN: job.tokens[-1],
        Column.POSITION: len(job.tokens) - 1,
        Column.STORED: len(job.tokens),
        Column.COUNT: 0,
        Column.LIMIT: job.limit,
        Column.MIN_NEW: params.min_new_tokens,
        Column.KEY: 0,
        Column.TOP_K: params.top_k,
        Column.STATE: RowState.RUNNING,
        Column.FORBIDDEN: len(forbidden),
    }
    stops = sorted(set(params.stop_token_ids) - forbidden)
    return [*(values[Column(index)] for index in range(Column.STOPS)), *padded(stops, STOP_SLOTS)]


def padded(ids: Sequence[int], width: int) -> list[int]:
    return [*ids, *[-1] * (width - len(ids))]


def to_host(x: Tensor) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x.contiguous(), non_blocking=True)
