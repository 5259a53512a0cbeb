"""Sampling on CUDA: everything between the logits and the next step, without the host.

The kernels compute `assay.engine.sampler.sample_rows`. The vocabulary is divided into chunks. One pass over the logits
writes three statistics per chunk; sampling chooses a chunk by these and reads only that chunk again. Truncated rows are
read more often: about four times for top-k and four times for top-p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.engine import sampler
from assay.engine.sequence import FORBIDDEN_SLOTS, STOP_SLOTS, Column, RowState

CHUNK = 2048
SPAN = 8192  # logits that truncation loads at once; a multiple of CHUNK
SLOTS = triton.next_power_of_2(FORBIDDEN_SLOTS + STOP_SLOTS)

FORBIDDEN_TABLE = tl.constexpr(FORBIDDEN_SLOTS)
STOP_TABLE = tl.constexpr(STOP_SLOTS)
TOKEN, POSITION, COUNT, LIMIT, MIN_NEW, KEY, TOP_K, STATE, FORBIDDEN, STOPS = (
    tl.constexpr(int(Column[name]))
    for name in ["TOKEN", "POSITION", "COUNT", "LIMIT", "MIN_NEW", "KEY", "TOP_K", "STATE", "FORBIDDEN", "STOPS"]
)
RUNNING, LENGTH, STOP, BROKEN = (tl.constexpr(int(RowState[name])) for name in ["RUNNING", "LENGTH", "STOP", "BROKEN"])
GOLDEN = tl.constexpr(sampler.GOLDEN % 2**64)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = (tl.constexpr(value % 2**64) for value in sampler.MULTIPLIERS)
TOP_P_GAP = tl.constexpr(1 - sampler.TOP_P_SLACK)
NO_INDEX = tl.constexpr(2**31 - 1)


class Scratch:
    """Buffers that pass values between the kernels, allocated once."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        chunks = triton.cdiv(vocabulary, CHUNK)
        self.removed = torch.empty(rows, SLOTS, device=device)  # logits of forbidden tokens
        self.maxima = torch.empty(rows, chunks, device=device)  # of allowed logits l; with z = (l - maximum) / T:
        self.sums = torch.empty(rows, chunks, device=device)  # of exp z
        self.moments = torch.empty(rows, chunks, device=device)  # of z exp z
        self.kept = torch.empty(rows, chunks, device=device)  # of exp z of the kept tokens, with the row's maximum
        self.cuts = torch.empty(rows, 2, dtype=torch.int32, device=device)  # lowest kept key, end of its kept ids


def sample(
    logits: Tensor,
    ints: Tensor,
    floats: Tensor,
    forbidden: Tensor,
    step: Tensor,
    log_tokens: Tensor,
    log_scores: Tensor,
    scratch: Scratch,
    *,
    forbids: bool = True,
    truncates: bool = True,
) -> None:
    """`sampler.sample_rows` for logits [N, V] in 16 or 32 bits; logits of forbidden tokens are overwritten.

    `forbids`, `truncates`: whether any row does; see `Modes`.
    """
    rows, vocabulary = logits.shape
    chunks = scratch.sums.shape[1]
    assert logits.is_contiguous() and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert rows <= len(scratch.sums) and chunks == triton.cdiv(vocabulary, CHUNK) and SPAN % CHUNK == 0
    assert ints.is_contiguous() and floats.is_contiguous() and floats.shape[1] == 4
    assert forbidden.is_contiguous() and forbidden.shape[1] == FORBIDDEN_SLOTS
    assert log_tokens.is_contiguous() and log_scores.is_contiguous()
    table = (logits, ints, floats)
    statistics = (scratch.maxima, scratch.sums, scratch.moments)
    sizes = {"VOCABULARY": vocabulary, "WIDTH": ints.shape[1]}
    wide = {"CHUNK": CHUNK, "CHUNKS": chunks, "LANES": triton.next_power_of_2(chunks)}
    if forbids:
        forbid_kernel[(rows,)](logits, ints, forbidden, scratch.removed, **sizes, SLOTS=SLOTS, num_warps=1)
    statistics_kernel[(chunks, rows)](*table, *statistics, **sizes, CHUNK=CHUNK, num_warps=1)
    if truncates:
        truncate_kernel[(rows,)](
            *table, *statistics[:2], scratch.kept, scratch.cuts,
            **sizes, **wide, SPAN=SPAN, GROUP=16 // logits.itemsize, num_warps=16,
        )  # fmt: skip
    sample_kernel[(rows,)](
        *table, forbidden, step, log_tokens, log_scores, scratch.removed, *statistics, scratch.kept, scratch.cuts,
        **sizes, **wide, log_steps=log_tokens.shape[0], log_rows=log_tokens.shape[1], SLOTS=SLOTS, num_warps=8,
    )  # fmt: skip


@triton.jit
def forbidden_now(row_ints, row_forbidden, VOCABULARY: tl.constexpr, SLOTS: tl.constexpr):
    """Forbidden tokens of the row, and its stop tokens below its minimum length; -1 in unused slots."""
    slots = tl.arange(0, SLOTS)
    used = tl.minimum(tl.load(row_ints + FORBIDDEN), FORBIDDEN_TABLE)
    early = tl.load(row_ints + COUNT) < tl.load(row_ints + MIN_NEW)
    always = tl.load(row_forbidden + slots, mask=slots < used, other=-1)
    stop = slots - FORBIDDEN_TABLE
    at_first = tl.load(row_ints + STOPS + stop, mask=(stop >= 0) & (stop < STOP_TABLE) & early, other=-1)
    tokens = tl.where(stop < 0, always, at_first)
    return tl.where(tokens < VOCABULARY, tokens, -1)


@triton.jit
def forbid_kernel(logits, ints, forbidden, removed, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(ints + row * WIDTH + STATE) != RUNNING:
        return
    tokens = forbidden_now(ints + row * WIDTH, forbidden + row * FORBIDDEN_TABLE, VOCABULARY, SLOTS)
    places = logits + row * VOCABULARY + tokens
    values = tl.load(places, mask=tokens >= 0, other=float("-inf")).to(tl.float32)
    tl.store(removed + row * SLOTS + tl.arange(0, SLOTS), values)
    tl.store(places, tl.full((SLOTS,), float("-inf"), tl.float32).to(logits.dtype.element_ty), mask=tokens >= 0)


@triton.jit
def temperature_of(row_floats):
    """The temperature of log-probabilities: 1 for greedy rows."""
    setting = tl.load(row_floats)
    return tl.where(setting > 0, setting, 1.0)


@triton.jit
def statistics_kernel(
    logits, ints, floats, maxima, sums, moments,
    VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(ints + row * WIDTH + STATE) != RUNNING:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * VOCABULARY + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32)
    maximum = tl.max(values)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    z = (values - base) * (1.0 / temperature_of(floats + row * 4))
    e = tl.exp(z)  # NaN if a logit is NaN
    place = row * tl.num_programs(0) + chunk
    tl.store(maxima + place, maximum)
    tl.store(sums + place, tl.sum(e))
    tl.store(moments + place, tl.sum(tl.where(e > 0, z * e, 0.0)))


@triton.jit
def keys_of(values):
    """Integers in the order of the values; equal values have equal keys."""
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFF)
    else:
        bits = values.to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(keys == -1, 0, keys)  # -0.0 equals 0.0


@triton.jit
def value_of(key, kind: tl.constexpr):
    """Inverse of `keys_of`, for one key."""
    if kind.primitive_bitwidth == 16:
        bits = (key ^ ((key >> 31) & 0x7FFF)).to(tl.int16)
    else:
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(kind, bitcast=True).to(tl.float32)


@triton.jit
def weights_of(values, top, inv_temperature):
    """Probabilities divided by the probability of the most likely token."""
    return tl.exp((values.to(tl.float32) - top) * inv_temperature)


@triton.jit
def chunk_weights(maxima, sums, top, inv_temperature, inside):
    """Sums of the chunks in float64, relative to the row's maximum instead of the chunk's; also the log factors."""
    real = inside & (maxima != float("-inf"))
    shifts = tl.where(real, (maxima - top).to(tl.float64) * inv_temperature, 0.0)
    return sums.to(tl.float64) * tl.exp(shifts), shifts


@triton.jit
def span_of(row_logits, start, VOCABULARY: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr):
    """SPAN logits as [SPAN / GROUP, GROUP]: each thread loads a group at once and sums it without communication."""
    ids = start + tl.arange(0, SPAN // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(row_logits + ids, mask=ids < VOCABULARY, other=float("-inf"))


@triton.jit
def bisect(
    row_logits, low, high, goal, top, inv_temperature,
    MASS: tl.constexpr, VOCABULARY: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The highest key such that tokens with this key or a higher one reach the goal, in number or (MASS) in mass.

    `low` must reach it; no key above `high` may.
    """
    size = high - low + 1
    while size > 1:
        size = (size + 3) // 4  # two bits per pass: three thresholds
        first = (low + size).to(tl.int32)
        second = (low + 2 * size).to(tl.int32)
        third = (low + 3 * size).to(tl.int32)
        above_first = tl.full((SPAN // GROUP,), 0.0, tl.float32)
        above_second = tl.full((SPAN // GROUP,), 0.0, tl.float32)
        above_third = tl.full((SPAN // GROUP,), 0.0, tl.float32)
        for start in range(0, VOCABULARY, SPAN):
            values = span_of(row_logits, start, VOCABULARY, SPAN, GROUP)
            keys = keys_of(values)
            if MASS:
                weight = weights_of(values, top, inv_temperature)
            else:
                weight = tl.full((SPAN // GROUP, GROUP), 1.0, tl.float32)
            above_first += tl.sum(tl.where(keys >= first, weight, 0.0), 1)
            above_second += tl.sum(tl.where(keys >= second, weight, 0.0), 1)
            above_third += tl.sum(tl.where(keys >= third, weight, 0.0), 1)
        reached = (tl.sum(above_first.to(tl.float64)) >= goal).to(tl.int64)
        reached += (tl.sum(above_second.to(tl.float64)) >= goal).to(tl.int64)
        reached += (tl.sum(above_third.to(tl.float64)) >= goal).to(tl.int64)
        low += reached * size
    return tl.minimum(low, high)


@triton.jit
def beyond(row_logits, key, top, inv_temperature, VOCABULARY: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr):
    """Number and mass of tokens with a higher key."""
    higher = tl.full((SPAN // GROUP,), 0, tl.int32)
    mass = tl.full((SPAN // GROUP,), 0.0, tl.float32)
    for start in range(0, VOCABULARY, SPAN):
        values = span_of(row_logits, start, VOCABULARY, SPAN, GROUP)
        keys = keys_of(values)
        higher += tl.sum((keys > key).to(tl.int32), 1)
        mass += tl.sum(tl.where(keys > key, weights_of(values, top, inv_temperature), 0.0), 1)
    return tl.sum(higher).to(tl.int64), tl.sum(mass.to(tl.float64))


@triton.jit
def is_row_truncated(row_ints, row_floats, VOCABULARY: tl.constexpr):
    top_k = tl.load(row_ints + TOP_K)
    limits = ((top_k > 0) & (top_k < VOCABULARY)) | (tl.load(row_floats + 1) < 1) | (tl.load(row_floats + 2) > 0)
    return limits & (tl.load(row_floats) > 0)


@triton.jit
def truncate_kernel(
    logits, ints, floats, maxima, sums, kept, cuts, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The truncation point of a row: kept are tokens with a key above the cut, or equal to it and an id below `end`."""
    row = tl.program_id(0).to(tl.int64)
    row_ints, row_floats, row_logits = ints + row * WIDTH, floats + row * 4, logits + row * VOCABULARY
    if tl.load(row_ints + STATE) != RUNNING:
        return
    if not is_row_truncated(row_ints, row_floats, VOCABULARY):
        return
    kind: tl.constexpr = logits.dtype.element_ty
    temperature = temperature_of(row_floats)
    inv_temperature = 1.0 / temperature
    lanes = tl.arange(0, LANES)
    peaks = tl.load(maxima + row * CHUNKS + lanes, mask=lanes < CHUNKS, other=float("-inf"))
    parts = tl.load(sums + row * CHUNKS + lanes, mask=lanes < CHUNKS, other=0.0)
    top = tl.max(peaks)
    weights, _ = chunk_weights(peaks, parts, top, inv_temperature, lanes < CHUNKS)
    mass = tl.sum(weights)
    high = keys_of(top.to(kind)).to(tl.int64)
    key = tl.full((), -(2**31), tl.int64)
    ties_kept = tl.full((), 0, tl.int64)  # number of kept tokens with exactly this key

    top_k = tl.load(row_ints + TOP_K)
    if (top_k > 0) & (top_k < VOCABULARY):
        # The k-th highest logit is at least the k-th highest maximum of a chunk.
        behind = tl.sum((peaks[None, :] >= peaks[:, None]).to(tl.int32), 1)
        low = keys_of(tl.max(tl.where(behind >= top_k, peaks, float("-inf"))).to(kind)).to(tl.int64)
        key = bisect(row_logits, low, high, top_k.to(tl.float64), top, inv_temperature, False, VOCABULARY, SPAN, GROUP)
        higher, mass = beyond(row_logits, key.to(tl.int32), top, inv_temperature, VOCABULARY, SPAN, GROUP)
        ties_kept = top_k - higher
        last = weights_of(value_of(key.to(tl.int32), kind), top, inv_temperature)
        mass += ties_kept.to(tl.float64) * last.to(tl.float64)
    top_p = tl.load(row_floats + 1).to(tl.float64)
    if top_p < 1:
        goal = top_p * (mass - mass * TOP_P_GAP)
        # All tokens below this logit hold less than 1 - p together; the second line is a margin for rounding.
        top_p_floor = top + temperature * tl.log((1 - top_p) * mass / VOCABULARY).to(tl.float32)
        top_p_floor -= 0.01 * (tl.abs(top_p_floor) + temperature)
        low = tl.maximum(key, keys_of(top_p_floor.to(kind)).to(tl.int64))
        key = bisect(row_logits, low, high, goal, top, inv_temperature, True, VOCABULARY, SPAN, GROUP)
        higher, held = beyond(row_logits, key.to(tl.int32), top, inv_temperature, VOCABULARY, SPAN, GROUP)
        last = weights_of(value_of(key.to(tl.int32), kind), top, inv_temperature)
        needed = tl.ceil((goal - held) / tl.maximum(last.to(tl.float64), 1e-38))
        ties_kept = tl.maximum(tl.minimum(needed, VOCABULARY), 1.0).to(tl.int64)

    cut = key.to(tl.int32)
    min_p = tl.minimum(tl.load(row_floats + 2), 1.0)
    seen = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int32)
    some = tl.arange(0, SPAN // CHUNK)
    for start in range(0, CHUNKS, SPAN // CHUNK):
        ids = (start + some)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        values = tl.load(row_logits + ids, mask=ids < VOCABULARY, other=float("-inf"))
        equals = (keys_of(values) == cut) & (ids < VOCABULARY)
        number = tl.sum(equals.to(tl.int32))
        if (number > 0) & (seen < ties_kept):
            rank = seen + tl.cumsum(tl.reshape(equals.to(tl.int32), (SPAN,)), 0)
            keep = tl.reshape(equals, (SPAN,)) & (rank <= ties_kept)
            end = tl.maximum(end, tl.max(tl.where(keep, start * CHUNK + tl.arange(0, SPAN) + 1, 0)))
        seen += number
        weight = kept_weights(values, ids, cut, end, min_p, top, inv_temperature)
        tl.store(kept + row * CHUNKS + start + some, tl.sum(weight, 1), mask=start + some < CHUNKS)
    tl.store(cuts + row * 2, cut)
    tl.store(cuts + row * 2 + 1, end)


@triton.jit
def kept_weights(values, ids, cut, end, min_p, top, inv_temperature):
    """Weights of the tokens that truncation keeps, 0 for others."""
    keys, weights = keys_of(values), weights_of(values, top, inv_temperature)
    keep = ((keys > cut) | ((keys == cut) & (ids < end))) & (weights >= min_p)
    return tl.where(keep, weights, 0.0)


@triton.jit
def mix(x):
    x = (x ^ (x >> 30)) * FIRST_MULTIPLIER
    x = (x ^ (x >> 27)) * SECOND_MULTIPLIER
    return x ^ (x >> 31)


@triton.jit
def uniform(key, position):
    """Float64 in [0, 1): `sampler.uniform`."""
    bits = mix(key.to(tl.uint64) + (position + 1).to(tl.uint64) * GOLDEN)
    return (bits >> 12).to(tl.int64).to(tl.float64) * 2.0**-52


@triton.jit
def first_above(weights, noise, indices):
    """The first index at which the cumulative weight exceeds the noise; indices of weight 0 are skipped."""
    cumulative = tl.cumsum(weights, 0)
    first = tl.min(tl.where((cumulative > noise) & (weights > 0), indices, NO_INDEX))
    last = tl.max(tl.where(weights > 0, indices, 0))
    return tl.minimum(first, last)


@triton.jit
def sample_kernel(
    logits, ints, floats, forbidden, step, log_tokens, log_scores, removed, maxima, sums, moments, kept, cuts,
    log_steps, log_rows, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ints, row_floats, row_logits = ints + row * WIDTH, floats + row * 4, logits + row * VOCABULARY
    if tl.load(row_ints + STATE) != RUNNING:
        return
    temperature = temperature_of(row_floats)
    inv_temperature = 1.0 / temperature
    count = tl.load(row_ints + COUNT)
    greedy = tl.load(row_floats) == 0
    is_truncated = is_row_truncated(row_ints, row_floats, VOCABULARY)

    # Statistics of the whole row, from the statistics of its chunks.
    lanes = tl.arange(0, LANES)
    inside = lanes < CHUNKS
    places = row * CHUNKS + lanes
    peaks = tl.load(maxima + places, mask=inside, other=float("-inf"))
    parts = tl.load(sums + places, mask=inside, other=0.0)
    top = tl.max(peaks)
    weights, shifts = chunk_weights(peaks, parts, top, inv_temperature, inside)
    allowed = tl.sum(weights)
    slopes = tl.load(moments + places, mask=inside, other=0.0).to(tl.float64) * tl.exp(shifts)
    moment = tl.sum(tl.where(weights > 0, weights * shifts + slopes, 0.0))
    if is_truncated:
        weights = tl.load(kept + places, mask=inside, other=0.0).to(tl.float64)
    kept_sum = tl.sum(weights)

    # The chunk first, then the token within it.
    target = uniform(tl.load(row_ints + KEY), count) * kept_sum
    samplable = tl.where(weights > 1e-33, weights, 0.0)  # smaller weights would vanish in float32 within the chunk
    chunk = first_above(samplable, target, lanes)
    highest = tl.min(tl.where(inside & (peaks == top), lanes, NO_INDEX))
    chunk = tl.minimum(tl.where(greedy, highest, chunk), CHUNKS - 1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(row_logits + ids, mask=ids < VOCABULARY, other=float("-inf"))
    if is_truncated:
        cut, end = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
        min_p = tl.minimum(tl.load(row_floats + 2), 1.0)
        inner = kept_weights(values, ids, cut, end, min_p, top, inv_temperature)
    else:
        inner = weights_of(values, top, inv_temperature)
    before = tl.sum(tl.where(lanes < chunk, samplable, 0.0))
    token = first_above(inner.to(tl.float64), target - before, ids)
    values = values.to(tl.float32)
    best = tl.min(tl.where(values == top, ids, NO_INDEX))
    token = tl.minimum(tl.where(greedy, best, token), VOCABULARY - 1)
    value = tl.sum(tl.where(ids == token, values, 0.0))

    # The scores include forbidden tokens again. `base` is the highest logit of all tokens.
    tokens = forbidden_now(row_ints, forbidden + row * FORBIDDEN_TABLE, VOCABULARY, SLOTS)
    removed_logits = tl.load(removed + row * SLOTS + tl.arange(0, SLOTS), mask=tokens >= 0, other=float("-inf"))
    base = tl.maximum(top, tl.max(removed_logits))
    log_shift = (top - base).to(tl.float64) / temperature
    z = (removed_logits - base).to(tl.float64) / temperature
    e = tl.exp(z)
    whole = allowed * tl.exp(log_shift) + tl.sum(e)
    moment = (moment + allowed * log_shift) * tl.exp(log_shift) + tl.sum(tl.where(e > 0, e * z, 0.0))
    normalizer = tl.log(whole)
    engine = (value - base).to(tl.float64) / temperature - normalizer
    broken = (engine != engine) | (top == float("-inf"))
    engine = tl.where(broken, float("nan"), engine)
    sampling = tl.minimum((value - top).to(tl.float64) / temperature - tl.log(kept_sum), 0.0)
    mass = tl.minimum(kept_sum / allowed, 1.0) * (allowed * tl.exp(log_shift) / whole)
    sampling = tl.where(greedy, 0.0, sampling)
    mass = tl.where(greedy, 1.0, mass)
    entropy = tl.maximum(normalizer - moment / whole, 0.0)

    at = tl.load(step) % log_steps
    tl.store(log_tokens + at * log_rows + row, token)
    plane = log_scores + at * log_rows + row
    tl.store(plane, engine.to(tl.float32))
    tl.store(plane + log_steps * log_rows, sampling.to(tl.float32))
    tl.store(plane + 2 * log_steps * log_rows, mass.to(tl.float32))
    tl.store(plane + 3 * log_steps * log_rows, entropy.to(tl.float32))

    stop_slots = tl.arange(0, STOP_TABLE)
    stopped = tl.sum((tl.load(row_ints + STOPS + stop_slots) == token).to(tl.int32)) > 0
    state = tl.where(count + 1 >= tl.load(row_ints + LIMIT), LENGTH, RUNNING)
    state = tl.where(stopped, STOP, state)
    state = tl.where(broken, BROKEN, state)
    tl.store(row_ints + TOKEN, token.to(tl.int64))
    tl.store(row_ints + COUNT, count + 1)
    tl.store(row_ints + POSITION, tl.load(row_ints + POSITION) + 1)
    tl.store(row_ints + STATE, state.to(tl.int64))
