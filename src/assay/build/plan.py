"""What a run costs on GPUs that are not here: memory, seconds per step, and how to divide GPUs among its two sides.

Seconds of a GPU are sums of what its arithmetic and its memory need at their published peaks, multiplied by factors
that were fitted to measurements on one H200 (`bench/fit_cost.py`). `simulate` combines them to steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from assay.build.cost import Line, kv_bytes
from assay.build.models import activation_bytes
from assay.build.simulate import Decoding, Pipeline, SimulatedRun, simulate
from assay.engine.native.kernels.few_rows import MAX_LAYER_BYTES, MAX_ROWS
from assay.models.spec import ModelSpec
from assay.types import UserError, plural, unknown_name

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Published peaks of a GPU."""

    flops: float  # per second, bfloat16, without sparsity
    bandwidth: float  # bytes per second, of its memory
    memory: float  # GiB
    link: float  # bytes per second to GPUs of the same node, in each direction
    overlaps: bool = True  # kernels: Hopper or later


GPUS = {
    "h200": Gpu(989e12, 4.8e12, 140, 450e9),
    "h100": Gpu(989e12, 3.35e12, 79.6, 450e9),
    "a100": Gpu(312e12, 2.04e12, 80, 300e9, overlaps=False),
    "b200": Gpu(2250e12, 8e12, 178, 900e9),
    "l40s": Gpu(362e12, 0.864e12, 45, 32e9, overlaps=False),
    "rtx4090": Gpu(165e12, 1.008e12, 23.6, 32e9, overlaps=False),
}
MEASURED_ON = "h200"

# Factors by which the seconds of the H200 exceed what its peaks allow. `bench/fit_cost.py` prints them.
DECODE_LAYER_S = 31.1e-6  # per position and layer, whatever runs: latency of kernels
FEW_ROWS_S = 14.2e-6  # of it, what the kernels for few rows save: one sequence before and after they existed
DECODE_MATMUL = 1.501
DECODE_CACHE = 1.052
DECODE_ROW = 0.4267
TRAIN_MATMUL = 1.556
TRAIN_ATTENTION = 2.012
TRAIN_ROW = 5.161
MICRO_BATCH_LAYER_S = 3e-3  # per micro-batch and layer, at least: starting its kernels

# Assumptions: nothing of these was measured on several GPUs.
NETWORK = 50e9  # bytes per second and GPU between nodes: 400 Gbit/s
LINK_SHARE = 0.7  # of published peaks of links that collective operations reach
ALL_REDUCE_S = 15e-6  # latency of one, within a node
SYNC_S = 0.1  # of a weight sync, whatever its size
JUDGE_S = 1e-3  # per answer
MEMORY_SHARE = 0.92  # of the memory that a plan uses
OTHER_GIB = 3.0  # CUDA context, kernels' workspaces, logits
MANY_ANSWERS = 10_000  # per step: fewer steps are simulated
MOST_ROWS = 1024  # sequences that an engine decodes at a time, at most
RECOMPUTED = 4 / 3  # time of an update with activation checkpointing
TENSOR_PARALLEL = (1, 2, 4, 8)
OPTIMIZER_BYTES = 30.0  # that an optimizer step reads and writes per parameter


@dataclass(frozen=True)
class Cluster:
    gpus: int = 1
    gpu: str = MEASURED_ON
    per_node: int = 8

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise unknown_name("GPU", self.gpu, GPUS)

    @property
    def peaks(self) -> Gpu:
        return GPUS[self.gpu]

    def bandwidth(self, gpus: int) -> float:
        """Bytes per second and GPU of a collective operation among so many GPUs."""
        return LINK_SHARE * (self.peaks.link if gpus <= self.per_node else min(self.peaks.link, NETWORK))


@dataclass(frozen=True)
class StepWork:
    """What is trained on. `lengths`: of answers, of which a simulation draws."""

    prompts: int
    samples: int
    prompt_tokens: int
    limit: int  # of tokens of an answer
    lengths: Sequence[int]

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.limit

    @property
    def tokens(self) -> float:
        """Of a batch."""
        return self.prompts * (self.prompt_tokens + self.samples * self.mean)

    @property
    def sequence(self) -> float:
        """Length of the sequence to which a token belongs, on average over all tokens."""
        return self.prompt_tokens + sum(n * n for n in self.lengths) / sum(self.lengths)


def matmul_weights(spec: ModelSpec) -> int:
    """Weights that each token is multiplied with."""
    return spec.parameters - (0 if spec.tied else spec.vocab_size * spec.hidden)


def row_numbers(spec: ModelSpec) -> int:
    """Numbers of a token that operations between products read and write, about."""
    per_layer = 10 * spec.hidden + 4 * spec.heads * spec.head_dim + 4 * spec.intermediate
    return spec.layers * per_layer + 4 * spec.vocab_size


def decode_features(spec: ModelSpec, gpu: Gpu, rows: int, context: float) -> tuple[float, float, float, float]:
    """Seconds of a decoded position at the peaks: of layers (1 s each), products, KV cache, other operations."""
    weights = 2 * matmul_weights(spec)
    products = max(weights / gpu.bandwidth, rows * weights / gpu.flops)
    cache = rows * context * kv_bytes(spec, torch.bfloat16) / gpu.bandwidth
    return spec.layers, products, cache, rows * 2 * row_numbers(spec) / gpu.bandwidth


def train_features(spec: ModelSpec, gpu: Gpu, length: float) -> tuple[float, float, float]:
    """Seconds of a trained token at the peaks: of products, causal attention, other operations. `length`: of its
    sequence."""
    attention = 6 * spec.layers * spec.heads * spec.head_dim * length
    products = 6 * matmul_weights(spec) / gpu.flops
    return products, attention / gpu.flops, 2 * row_numbers(spec) / gpu.bandwidth


def train_seconds(spec: ModelSpec, gpu: Gpu, length: float) -> float:
    """Of a trained token on one GPU."""
    factors = TRAIN_MATMUL, TRAIN_ATTENTION, TRAIN_ROW
    return sum(factor * part for factor, part in zip(factors, train_features(spec, gpu, length), strict=True))


def decoding(spec: ModelSpec, gpu: Gpu, tp: int = 1) -> Decoding:
    """`tp`: GPUs that share an engine. All but the latency is divided."""
    layers, weights, cache, row = decode_features(spec, gpu, 1, 1.0)
    exchanged = 0.0 if tp == 1 else 2 * spec.layers * 2 * spec.hidden / (LINK_SHARE * gpu.link)
    return Decoding(
        fixed=layers * (DECODE_LAYER_S + 2 * ALL_REDUCE_S * (tp > 1)),
        row=DECODE_ROW * row / tp + exchanged,
        context=DECODE_CACHE * cache / tp,
        weights=DECODE_MATMUL * weights / tp,
        product=DECODE_MATMUL * 2 * matmul_weights(spec) / gpu.flops / tp,
        saved=spec.layers * FEW_ROWS_S,
        few_rows=few_rows_of(spec, gpu, tp),
    )


def few_rows_of(spec: ModelSpec, gpu: Gpu, tp: int = 1) -> int:
    """Up to which number of sequences the engine has kernels for few rows."""
    layers = spec.parameters - (1 if spec.tied else 2) * spec.vocab_size * spec.hidden
    return MAX_ROWS if gpu.overlaps and tp == 1 and 2 * layers / spec.layers <= MAX_LAYER_BYTES else 0


def prefill(spec: ModelSpec, gpu: Gpu, length: float, tp: int = 1) -> Line:
    """Seconds to compute a prompt: a third of an update per token, and the latency of the kernels."""
    return Line(spec.layers * DECODE_LAYER_S, train_seconds(spec, gpu, length) / 3 / tp)


@dataclass(frozen=True)
class EngineFit:
    """An engine on `tp` GPUs."""

    tp: int
    weights: float  # GiB per GPU, as the next
    cache: float
    rows: int  # sequences that fit into the KV cache


def fit_engine(spec: ModelSpec, work: StepWork, gpu: Gpu, per_node: int, beside: float = 0.0) -> EngineFit | None:
    """On as few GPUs as hold the weights and sequences of full length. None if no number does.

    `beside`: GiB per GPU of a learner, whose weights and moments stay there.
    """
    per_token = kv_bytes(spec, torch.bfloat16)
    for tp in TENSOR_PARALLEL:
        if tp > per_node or spec.kv_heads % tp:
            continue
        weights = 2 * spec.parameters / tp
        cache = (MEMORY_SHARE * gpu.memory - OTHER_GIB - beside) * GIB - weights
        tokens = cache * tp / per_token
        if tokens >= 2 * work.longest:
            # Long answers run longer: the running ones are on average about as long as all of them are at their end.
            rows = int(tokens / (work.prompt_tokens + work.mean))
            return EngineFit(tp, weights / GIB, cache / GIB, min(MOST_ROWS, rows))
    return None


@dataclass(frozen=True)
class LearnerFit:
    """Learners on `gpus` GPUs, which share weights and optimizer (FSDP)."""

    gpus: int
    precision: str  # optim.precision
    recompute: bool
    budget: int  # train.token_budget
    parts: dict[str, float] = field(default_factory=dict)  # GiB per GPU

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


# Bytes per parameter: weights with gradients and moments. The last two are for one process.
STATES = {"float32": 16.0, "8bit": 8.1, "bfloat16": 6.1}
GRADIENTS = {"float32": 4.0, "8bit": 2.0, "bfloat16": 2.0}  # of it, which are freed after an update


def fit_learner(spec: ModelSpec, work: StepWork, cluster: Cluster, gpus: int, beside: float = 0.0) -> LearnerFit | None:
    """The fastest setting that fits. `beside`: GiB per GPU of an engine that sleeps meanwhile."""
    free = MEMORY_SHARE * cluster.peaks.memory - OTHER_GIB - beside
    layer = 2 * spec.parameters / spec.layers / GIB  # gathered in bfloat16
    for recompute in (False, True):
        for precision in ("float32",) if gpus > 1 else STATES:
            state = STATES[precision] * spec.parameters / gpus / GIB
            parts = {"weights, gradients, optimizer": state}
            if gpus > 1:
                parts["gathered layers"] = 3 * layer
            elif precision == "float32":
                parts["weights in bfloat16"] = 2 * spec.parameters / GIB
            per_token = activation_bytes(spec, torch.bfloat16, recompute, compiled=True) / GIB
            budget = 16384
            while budget > work.longest and budget * per_token > free - sum(parts.values()):
                budget //= 2
            budget = max(budget, work.longest)
            parts["activations"] = budget * per_token
            if sum(parts.values()) <= free:
                return LearnerFit(gpus, precision, recompute, budget, parts)
    return None


def update_line(spec: ModelSpec, work: StepWork, cluster: Cluster, fit: LearnerFit) -> Line:
    """Seconds of an update by the number of its tokens."""
    gpu, n = cluster.peaks, fit.gpus
    token = train_seconds(spec, gpu, work.sequence) * (RECOMPUTED if fit.recompute else 1.0)
    fixed = OPTIMIZER_BYTES * spec.parameters / n / gpu.bandwidth
    # Each micro-batch gathers the weights twice and scatters the gradients, beside the computation.
    moved = (2 * 2 + 4) * spec.parameters * (n - 1) / n / cluster.bandwidth(n)
    token = max(token, moved / fit.budget, spec.layers * MICRO_BATCH_LAYER_S / fit.budget)
    least = max(token * work.longest, moved)  # of a rank: a sequence cannot be divided
    return Line(fixed, token / n) if token * work.tokens / n > least else Line(fixed + least, 0.0)


@dataclass(frozen=True)
class Layout:
    """A division of the GPUs, and what a simulation says of it. Colocated: engines and learners take turns."""

    engine_gpus: int
    engine: EngineFit
    learner: LearnerFit
    pipeline: Pipeline
    result: SimulatedRun

    @property
    def colocated(self) -> bool:
        return self.pipeline.staleness == 0


def layout(spec: ModelSpec, work: StepWork, cluster: Cluster, learner_gpus: int, staleness: int = 1) -> Layout | None:
    """Simulate a division; None if something does not fit. `staleness` 0: all GPUs do both."""
    engine = fit_engine(spec, work, cluster.peaks, cluster.per_node)
    engine_gpus = cluster.gpus if not staleness else cluster.gpus - learner_gpus
    if engine is None or engine_gpus < engine.tp:
        return None
    learner = fit_learner(spec, work, cluster, learner_gpus, 0.0 if staleness else engine.weights)
    if learner is None:
        return None
    if not staleness:
        resident = (STATES[learner.precision] - GRADIENTS[learner.precision]) * spec.parameters / learner_gpus / GIB
        engine = fit_engine(spec, work, cluster.peaks, cluster.per_node, resident)
        if engine is None or engine_gpus < engine.tp:
            return None
    gpu = cluster.peaks
    pipeline = Pipeline(
        engines=engine_gpus // engine.tp,
        max_batch=engine.rows,
        decoding=decoding(spec, gpu, engine.tp),
        prefill=prefill(spec, gpu, work.prompt_tokens, engine.tp),
        prompts=work.prompts,
        samples=work.samples,
        prompt_tokens=work.prompt_tokens,
        lengths=work.lengths,
        update=update_line(spec, work, cluster, learner),
        sync=sync_seconds(spec, cluster),
        staleness=staleness,
        judge=JUDGE_S / max(engine_gpus, 8),
    )
    result = simulate(pipeline, *steps_of(work))
    return Layout(engine_gpus, engine, learner, pipeline, result)


def steps_of(work: StepWork) -> tuple[int, int]:
    """How many steps are simulated, and how many before them."""
    return (4, 2) if work.prompts * work.samples <= MANY_ANSWERS else (2, 1)


def sync_seconds(spec: ModelSpec, cluster: Cluster, share: float = 1.0) -> float:
    """`share`: of the bytes that are sent."""
    if cluster.gpus == 1:
        return SYNC_S + 2 * 2 * spec.parameters / cluster.peaks.bandwidth
    return SYNC_S + share * 2 * spec.parameters / cluster.bandwidth(cluster.gpus)


def layouts(spec: ModelSpec, work: StepWork, cluster: Cluster, staleness: int = 1) -> list[Layout]:
    """Divisions that fit: colocated, and asynchronous ones around the balance of both sides; fastest first.

    Raises a `UserError` if none does.
    """
    check_work(spec, work, cluster)
    found = [layout(spec, work, cluster, cluster.gpus, 0)]
    if cluster.gpus > 1 and staleness:
        shares = (0.125, 0.25, 0.375, 0.5, 0.75)  # of the GPUs for learners, to begin with
        guesses = {max(1, min(cluster.gpus - 1, round(cluster.gpus * share))) for share in shares}
        tried = {number: layout(spec, work, cluster, number, staleness) for number in sorted(guesses)}
        for _ in range(3):  # halve the distance to the neighbours of the best
            fits = sorted(number for number, made in tried.items() if made)
            if not fits:
                break
            best = min(fits, key=lambda number: tried[number].result.step)  # type: ignore[union-attr]
            at = sorted(tried).index(best)
            neighbours = sorted(tried)[max(at - 1, 0) : at + 2]
            for low, high in pairwise(neighbours):
                middle = (low + high) // 2
                if middle not in tried:
                    tried[middle] = layout(spec, work, cluster, middle, staleness)
        found += tried.values()
    complete = [made for made in found if made]
    if not complete:
        raise UserError(
            f"{plural(cluster.gpus, 'GPU')} hold an engine or a learner, but not both with answers of {work.longest} "
            "tokens: plan for more GPUs, or shorter answers"
        )
    return sorted(complete, key=lambda made: made.result.step)


def check_work(spec: ModelSpec, work: StepWork, cluster: Cluster) -> None:
    """Raise a `UserError` if nothing fits, with the reason."""
    gpu, name = cluster.peaks, cluster.gpu.upper()
    if fit_engine(spec, work, gpu, cluster.per_node) is None:
        raise UserError(
            f"no engine of {min(cluster.per_node, TENSOR_PARALLEL[-1])} or fewer {name} GPUs holds "
            f"{2 * spec.parameters / GIB:.0f} GiB of weights and two answers of {work.longest} tokens: plan for larger "
            "GPUs, or shorter answers"
        )
    if all(fit_learner(spec, work, cluster, gpus) is None for gpus in {cluster.gpus, max(cluster.gpus - 1, 1)}):
        fewest = next((n for n in (2**k for k in range(1, 15)) if fit_learner(spec, work, cluster, n)), None)
        advice = f"plan for --gpus {fewest} or more" if fewest else "plan for shorter answers"
        raise UserError(
            f"{spec.parameters / 1e9:.1f}B parameters cannot be trained on {cluster.gpus} x {name} with sequences of "
            f"{work.longest} tokens: {advice}, larger GPUs, or LoRA"
        )


def assumptions(work: StepWork, cluster: Cluster) -> Iterator[str]:
    yield (
        f"speeds: measured on one {MEASURED_ON.upper()}"
        + ("" if cluster.gpu == MEASURED_ON else f", scaled to {cluster.gpu.upper()} by published peaks")
    )
    yield (
        f"answers of {work.mean:,.0f} tokens on average, at most {work.limit:,}; {JUDGE_S * 1000:g} ms to judge one, "
        "on 8 or more cores"
    )
    if cluster.gpus > 1:
        yield (
            f"between GPUs: {LINK_SHARE:.0%} of {cluster.peaks.link / 1e9:,.0f} GB/s within a node of "
            f"{cluster.per_node}, of {NETWORK / 1e9:.0f} GB/s beyond; never measured on several GPUs"
        )
