"""How far an engine's log-probabilities are from those that the trainer computes for the same tokens.

Where the time of a decode step goes on a GPU: its kernels, by what they are for.

Tokens a second of an engine on a workload, and what belongs beside that figure.

From starting Python to the first generated token.
"""

from __future__ import annotations

import gc
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from assay.bench.transformers_peer import TransformersPeer
from assay.bench.workload import Workload, float32_model, words_of
from assay.engine import Engine, Failed, Request, generate, make_engine
from assay.models.base import PolicyModel
from assay.models.device import pick_device, pick_dtype
from assay.models.logprobs import token_logprobs
from assay.types import Completion, UserError

SEQUENCES = 64  # looked at, evenly spread over all
TOKENS_AT_ONCE = 16384

Pair = tuple[Sequence[int], Completion]  # prompt ids and what followed


def mismatch(
    model: PolicyModel,
    requests: Sequence[Request],
    completions: Sequence[Sequence[Completion]],
    dtype: torch.dtype,
) -> dict[str, float]:
    """`model` in float32; with bfloat16 it computes under autocast, as the trainer does."""
    pairs = [(request.prompt_ids, c) for request, group in zip(requests, completions, strict=True) for c in group]
    temperature = requests[0].params.temperature or 1.0  # greedy tokens are scored at 1
    differences = torch.cat(
        [
            engine_logprobs(part) - trainer_logprobs(model, part, temperature, dtype).double().cpu()
            for part in parts_of(spread(pairs, SEQUENCES))
        ]
    ).abs()
    return {
        "mismatch_mean_abs": differences.mean().item(),
        "mismatch_max_ratio": math.exp(differences.max().item()),
        "mismatch_tokens": differences.numel(),
    }


def spread(pairs: Sequence[Pair], count: int) -> list[Pair]:
    count = min(count, len(pairs))
    return [pairs[index * len(pairs) // count] for index in range(count)]


def parts_of(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Consecutive ones, few enough tokens together; one that is longer comes alone."""
    part: list[Pair] = []
    size = 0
    for pair in pairs:
        own = len(pair[0]) + len(pair[1].token_ids)
        if part and size + own > TOKENS_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(pair)
        size += own
    if part:
        yield part


def engine_logprobs(part: Sequence[Pair]) -> Tensor:
    return torch.tensor([value for _, completion in part for value in completion.engine_logprobs], dtype=torch.float64)


@torch.no_grad()
def trainer_logprobs(model: PolicyModel, part: Sequence[Pair], temperature: float, dtype: torch.dtype) -> Tensor:
    """Of all completions' tokens, one after the other."""
    device = model.device
    ids = torch.tensor([token for prompt, c in part for token in (*prompt, *c.token_ids)], device=device)
    drawn = [mark for prompt, c in part for mark in ([False] * len(prompt) + [True] * len(c.token_ids))]
    lengths = [len(prompt) + len(c.token_ids) for prompt, c in part]
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        return token_logprobs(model, ids, lengths, torch.tensor(drawn, device=device), temperature)[0]


LONGEST = 256  # steps profiled at most

# The first whose words are found in a kernel's name takes it.
PARTS = {
    "attention": r"attn|attention|attend|flash|fmha|paged|kv_?cache|store_?kv|write_?kv|^_merge",
    "matmul": r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|wgmma|split_?k|mm_kernel",
    "sampling": r"sampl|draw|forbid|statistics|truncat|softmax|sort|top_?[kp]|argmax|gumbel|noise|scan|cumsum|search",
    "norm_rope_activation": r"norm(?!al)|rms|rope|rotar|rotate|silu|swiglu|gelu|activation|start_step",
}
PATTERNS = {part: re.compile(words, re.IGNORECASE) for part, words in PARTS.items()}
OTHER = "other"


def step_parts(engine: Engine, requests: Sequence[Request], batch: int) -> dict[str, float]:
    """Milliseconds of kernels in a decode step with `batch` sequences, a mean over the steps of a short run.

    What a run of one token costs is taken off: prefill, and the set-up of the batch.
    """
    new = min(max(request.params.max_new_tokens for request in requests), LONGEST)
    if new < 2:
        return {}
    short, long = (kernel_times(engine, full_batch(requests, batch, length)) for length in (1, new))
    parts = {part: max(long[part] - short[part], 0.0) / (new - 1) for part in (*PARTS, OTHER)}
    return {part: round(ms, 4) for part, ms in {**parts, "total": sum(parts.values())}.items()}


def full_batch(requests: Sequence[Request], batch: int, new: int) -> list[Request]:
    """As many of the requests as run at once, all of one length."""
    chosen: list[Request] = []
    for request in requests:
        n = min(request.params.n, batch)
        if n:
            chosen.append(replace(request, params=replace(request.params, n=n, max_new_tokens=new)))
        batch -= n
    return chosen


def kernel_times(engine: Engine, requests: Sequence[Request]) -> Counter[str]:
    """Milliseconds of GPU kernels in a run, by part."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        generate(engine, requests)
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiled.key_averages():
        if event.device_type == DeviceType.CUDA:
            times[part_of(event.key)] += event.self_device_time_total / 1000
    return times


def part_of(kernel: str) -> str:
    return next((part for part, pattern in PATTERNS.items() if pattern.search(kernel)), OTHER)


# Of an engine that counts them.
STATS = (
    *("prefill_tokens", "decode_steps", "decoded_tokens", "preemptions"),
    *("kv_waste", "kv_waste_peak"),
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """How to measure, beside what."""

    device: str = "auto"
    dtype: str = "auto"
    repeat: int = 3  # timed runs, after one that is reported apart
    mismatch: bool = True
    parts: bool = False
    compare: str | None = None  # "transformers"

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UserError(f"--repeat must be at least 1, not {self.repeat}")


@dataclass
class Speeds:
    """Tokens a second, run by run; the first is the warm-up."""

    values: list[float] = field(default_factory=list)

    @property
    def typical(self) -> float:
        return median(self.values[1:])

    def row(self) -> dict[str, Any]:
        first, *runs = (round(value, 1) for value in self.values)
        return {"tokens_per_s": round(self.typical, 1), "runs": runs, "first_run_tokens_per_s": first}


def measure(work: Workload, options: Options) -> list[dict[str, Any]]:
    """A row for our engine, and one for the system that it is compared with."""
    model, engine, device, dtype = build(work, options)
    model.to("cpu")  # what a trainer would hold is not counted as the engine's memory
    free_memory(device)
    ours, theirs = Speeds(), Speeds()
    facts: dict[str, Any] = {}
    peer: TransformersPeer | None = None
    for run in range(1 + options.repeat):
        requests = work.make_requests(model.vocab_size, run)
        reset_stats(engine)
        completions, seconds = timed(partial(generate, engine), requests, device)
        ours.values.append(count_tokens(completions, work) / seconds)
        facts |= stats_of(engine)
        if run == 0:
            facts["peak_memory_gib"] = peak_memory_gib(device)
            peer = TransformersPeer(model, device, dtype, work.batch) if options.compare else None
        if peer is not None:
            tokens, seconds = timed(peer.generate, requests, device)
            theirs.values.append(tokens / seconds)
    if options.parts and device.type == "cuda":
        facts["parts_ms"] = step_parts(engine, requests, work.batch)
    del engine, peer
    free_memory(device)
    if options.mismatch:
        facts |= mismatch(model.to(device), requests, completions, dtype)
    return rows_of(work, options, ours, theirs, facts)


def rows_of(
    work: Workload, options: Options, ours: Speeds, theirs: Speeds, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    settings = settings_of(work, options)
    shared = {"id": named(work.id, options)}
    last = {"command": shlex.join(["assay", "bench", "engine", *words_of(work), *words_of(options)])}
    row = {**shared, "system": "assay", "logprobs": True, **ours.row(), **facts, **settings, **last}
    if options.compare is None:
        return [row]
    other = {**shared, "system": options.compare, "logprobs": False, **theirs.row(), **settings, **last}
    return [row | {f"ratio_to_{options.compare}": round(ours.typical / theirs.typical, 3)}, other]


def build(work: Workload, options: Options) -> tuple[PolicyModel, Engine, torch.device, torch.dtype]:
    """The model in float32, an engine that serves a copy of it, and where and in which dtype it does."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    model = float32_model(work.shape, work.model, device, work.seed)
    if work.prompt_tokens + work.new > model.max_length:
        raise UserError(
            f"{work.prompt_tokens} tokens of prompt and {work.new} new ones are more than the {model.max_length} "
            f"of {work.label}: ask for fewer with --prompt-tokens or --new"
        )
    engine = make_engine("auto", model, device=device, dtype=dtype, max_batch=work.batch, max_length=work.max_length)
    return model, engine, device, dtype


def settings_of(work: Workload, options: Options) -> dict[str, Any]:
    """Everything that was chosen, by the user or by us."""
    device = pick_device(options.device)
    lengths = {"requests": work.requests} if work.is_longtail else {"samples": work.samples}
    return {
        "shape": None if work.model else work.shape,
        "model": work.model,
        "prompts": work.prompts,
        **lengths,
        "prompt_tokens": work.prompt_tokens,
        "new": work.new,
        "mean_new": round(work.mean_new, 2),
        "lengths": work.lengths,
        "max_batch": work.batch,
        "seed": work.seed,
        "temperature": work.temperature,
        "top_p": work.top_p,
        "top_k": work.top_k,
        "min_p": work.min_p,
        "device": device.type,
        "dtype": dtype_name(pick_dtype(options.dtype, device)),
        "threads": torch.get_num_threads(),
        "repeat": options.repeat,
    }


def named(row_id: str, options: Options) -> str:
    """With device and dtype, where they are not those that would be picked here."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    others = [device.type] * (device.type != pick_device().type)
    others += [dtype_name(dtype)] * (dtype != pick_dtype("auto", device))
    return "-".join([row_id, *others])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def timed(
    generate: Callable[[list[Request]], Result], requests: list[Request], device: torch.device
) -> tuple[Result, float]:
    synchronise(device)
    start = time.perf_counter()
    result = generate(requests)
    synchronise(device)
    return result, time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def count_tokens(completions: Any, work: Workload) -> int:
    lengths = [len(completion.token_ids) for group in completions for completion in group]
    assert lengths == work.new_tokens, "a sequence did not reach its length"
    return sum(lengths)


def free_memory(device: torch.device) -> None:
    """And count its peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float | None:
    """Of tensors on the GPU, weights and cache included; not known elsewhere."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3) if device.type == "cuda" else None


def reset_stats(engine: Engine) -> None:
    if hasattr(engine, "reset_stats"):
        engine.reset_stats()


def stats_of(engine: Engine) -> dict[str, Any]:
    stats = getattr(engine, "stats", None)
    return {name: getattr(stats, name) for name in STATS if hasattr(stats, name)}


FIRST_TOKEN = "first token"  # the line that the started process prints
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def print_first_token(work: Workload, options: Options) -> None:
    """What the started process does: generate until the first token arrives."""
    model, engine, _, _ = build(work, options)
    ids = [engine.add(replace(request, stream=True)) for request in work.make_requests(model.vocab_size, run=0)]
    event = engine.step()[0]
    if isinstance(event, Failed):
        raise UserError(event.error)
    print(FIRST_TOKEN, flush=True)
    engine.abort(ids)


def measure_startup(work: Workload, options: Options) -> list[dict[str, Any]]:
    """Twice with one cache of compiled kernels, which the first finds empty."""
    words = ["bench", "engine", *words_of(work), *words_of(options)]
    with tempfile.TemporaryDirectory(prefix="assay-startup-") as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        cold, warm = (seconds_to_first_token([*words, "--first-token"], caches) for _ in range(2))
    row = {
        "id": named(f"startup-{work.label}", options),
        "system": "assay",
        "seconds": round(warm, 3),
        "seconds_cold": round(cold, 3),
        "runs": [round(cold, 3), round(warm, 3)],
        **settings_of(work, options),
        "command": shlex.join(["assay", *words, "--startup"]),
    }
    return [row]


def seconds_to_first_token(words: Sequence[str], environment: dict[str, str]) -> float:
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "assay", *words],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = any(line.strip() == FIRST_TOKEN for line in process.stdout)
            seconds = time.perf_counter() - start
            process.communicate()
        finally:
            process.kill()
            process.wait()
        if said:
            return seconds
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise UserError(f"the process that was started gave no token: {reason.removeprefix('assay: ')}")
