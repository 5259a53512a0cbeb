"""Tokens a second of an engine on a workload, and what belongs beside that figure."""

from __future__ import annotations

import gc
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from assay.bench.mismatch import mismatch
from assay.bench.parts import step_parts
from assay.bench.shapes import float32_model
from assay.bench.transformers_peer import TransformersPeer
from assay.bench.workload import Workload, words_of
from assay.engine import Engine, Request, generate, make_engine
from assay.models.base import PolicyModel
from assay.models.device import pick_device, pick_dtype
from assay.types import UserError

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
