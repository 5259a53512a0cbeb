"""`assay bench engine`: tokens per second, kernel times, start-up time, and agreement with the trainer.

`assay bench episodes`: engine steps for episodes whose actions differ in length. Each episode continues as soon as its
own action is finished ("own-pace"), or all wait for the longest ("rounds").
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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from assay.bench import RunProgress
from assay.bench.results import summarize
from assay.bench.workload import (
    NANO,
    SHAPES,
    EpisodeOptions,
    Episodes,
    Options,
    Workload,
    command_options,
    random_model,
)
from assay.engine import Engine, EngineInfo, Event, Failed, NativeEngine, Request, SamplingParams, generate, make_engine
from assay.envs import Env
from assay.models import PolicyModel, build_preset
from assay.models.device import pick_device, pick_dtype
from assay.models.logprobs import token_logprobs
from assay.rewards import JudgePool
from assay.rollout import Collector, Limits
from assay.text import Renderer, char_tokenizer
from assay.types import Completion, Progress, Rollout, UserError

# Counters of the engine that are reported.
STATS = ("prefill_tokens", "decode_steps", "decoded_tokens", "preemptions", "kv_waste", "kv_waste_peak")
Result = TypeVar("Result")


class EngineBenchmark:
    """The engine on one workload. The first `run` is the warm-up."""

    def __init__(self, work: Workload, options: Options, progress: Progress | None = None) -> None:
        self.work, self.options = work, options
        self.progress = RunProgress(progress, options.repeat)
        self.model, self.engine, self.device, self.dtype = build(work, options, progress)
        self.model.to("cpu")  # the trainer's weights do not count as the engine's memory
        free_memory(self.device)
        self.speeds: list[float] = []
        self.stats: dict[str, Any] = {}

    def run(self) -> list[Request]:
        """Generate once. Returns the requests, so that another system can be timed on the same ones."""
        self.requests = self.work.make_requests(self.model.vocab_size, len(self.speeds))
        if isinstance(self.engine, NativeEngine):
            self.engine.reset_stats()
        self.progress.run = len(self.speeds)
        serve = partial(generate, self.engine, report=self._report)
        self.completions, seconds = timed(serve, self.requests, self.device)
        lengths = [len(completion.token_ids) for group in self.completions for completion in group]
        assert lengths == self.work.new_tokens, "a sequence did not reach its length"
        self.speeds.append(sum(lengths) / seconds)
        if isinstance(self.engine, NativeEngine):
            self.stats |= {name: getattr(self.engine.stats, name) for name in STATS}
        self.stats.setdefault("peak_memory_gib", peak_memory_gib(self.device))
        return self.requests

    def _report(self, finished: int, tokens: int) -> None:
        self.progress("sampling", tokens, sum(self.work.new_tokens), "tokens")

    def row(self, command: Sequence[str]) -> dict[str, Any]:
        """All results; to be called once, because the engine is deleted."""
        if self.options.parts and self.device.type == "cuda":
            self.stats["parts_ms"] = kernel_times_per_step(self.engine, self.requests, self.work.batch)
        del self.engine
        free_memory(self.device)
        if self.options.mismatch:
            self.stats |= mismatch(self.model.to(self.device), self.requests, self.completions, self.dtype)
        return {
            "id": row_id(self.work.id, self.options.device, self.options.dtype),
            "system": "assay",
            "logprobs": True,
            **summarize("tokens_per_s", "first_run_tokens_per_s", self.speeds, digits=1),
            **self.stats,
            **settings_of(self.work, self.options),
            "command": shlex.join(command),
        }


def measure(work: Workload, options: Options, progress: Progress | None = None) -> list[dict[str, Any]]:
    bench = EngineBenchmark(work, options, progress)
    for _ in range(1 + options.repeat):
        bench.run()
    return [bench.row(["assay", "bench", "engine", *command_options(work, options)])]


def build(
    work: Workload, options: Options, progress: Progress | None = None
) -> tuple[PolicyModel, Engine, torch.device, torch.dtype]:
    """Return the model in float32, an engine with a copy of its weights, and the engine's device and dtype."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    model = work.float32_model(device, work.seed, progress)
    work.check_length(model)
    sizes: dict[str, Any] = {"max_batch": work.batch, "max_length": work.max_length}
    sizes |= {"quantize": work.quantize, "kv_cache_dtype": work.kv_cache_dtype}
    engine = make_engine("auto", model, device=device, dtype=dtype, **sizes)
    return model, cast(Engine, engine), device, dtype


def settings_of(work: Workload, options: Options) -> dict[str, Any]:
    device = pick_device(options.device)
    return {**work.settings(), **device_settings(device, pick_dtype(options.dtype, device)), "repeat": options.repeat}


def device_settings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"device": device.type, "dtype": dtype_name(dtype), "threads": torch.get_num_threads()}


def row_id(name: str, device_name: str, dtype_choice: str) -> str:
    """The name, with device and dtype if they are not the ones that `auto` selects."""
    device = pick_device(device_name)
    dtype = pick_dtype(dtype_choice, device)
    others = [device.type] * (device.type != pick_device().type)
    others += [dtype_name(dtype)] * (dtype != pick_dtype("auto", device))
    return "-".join([name, *others])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def timed(
    work: Callable[[list[Request]], Result], requests: list[Request], device: torch.device
) -> tuple[Result, float]:
    start = now(device)
    result = work(requests)
    return result, now(device) - start


def now(device: torch.device) -> float:
    """The clock, read when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def free_memory(device: torch.device) -> None:
    """Release cached memory and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float | None:
    """Peak memory of tensors on the GPU, including weights and KV cache; None on other devices."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3) if device.type == "cuda" else None


# Agreement with the trainer

MISMATCH_SEQUENCES = 64  # evenly spaced over all sequences
SCORED_TOKENS = 16384  # per forward pass
Pair = tuple[Sequence[int], Completion]  # prompt ids and completion


def mismatch(
    model: PolicyModel, requests: Sequence[Request], completions: Sequence[Sequence[Completion]], dtype: torch.dtype
) -> dict[str, float]:
    """Compare the engine's log-probabilities with the trainer's for the same tokens.

    `model` holds float32 weights; with bfloat16 it computes under autocast, as the trainer does.
    """
    pairs = [(request.prompt_ids, c) for request, group in zip(requests, completions, strict=True) for c in group]
    temperature = requests[0].params.temperature or 1.0  # greedy tokens are scored at 1
    differences = torch.cat(
        [
            engine_logprobs(part) - trainer_logprobs(model, part, temperature, dtype).double().cpu()
            for part in split_by_tokens(evenly_spaced(pairs, MISMATCH_SEQUENCES))
        ]
    ).abs()
    return {
        "mismatch_mean_abs": differences.mean().item(),
        "mismatch_max_ratio": math.exp(differences.max().item()),
        "mismatch_tokens": differences.numel(),
    }


def evenly_spaced(pairs: Sequence[Pair], count: int) -> list[Pair]:
    count = min(count, len(pairs))
    return [pairs[index * len(pairs) // count] for index in range(count)]


def split_by_tokens(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Consecutive pairs with at most SCORED_TOKENS tokens together; a longer pair is returned alone."""
    part: list[Pair] = []
    size = 0
    for pair in pairs:
        length = len(pair[0]) + len(pair[1].token_ids)
        if part and size + length > SCORED_TOKENS:
            yield part
            part, size = [], 0
        part.append(pair)
        size += length
    if part:
        yield part


def engine_logprobs(part: Sequence[Pair]) -> Tensor:
    return torch.tensor([value for _, completion in part for value in completion.engine_logprobs], dtype=torch.float64)


@torch.no_grad()
def trainer_logprobs(model: PolicyModel, part: Sequence[Pair], temperature: float, dtype: torch.dtype) -> Tensor:
    """Log-probabilities of the tokens of all completions, concatenated."""
    device = model.device
    ids = torch.tensor([token for prompt, c in part for token in (*prompt, *c.token_ids)], device=device)
    sampled = [mark for prompt, c in part for mark in ([False] * len(prompt) + [True] * len(c.token_ids))]
    lengths = [len(prompt) + len(c.token_ids) for prompt, c in part]
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        return token_logprobs(model, ids, lengths, torch.tensor(sampled, device=device), temperature)[0]


# Kernel times of a decode step

PROFILED_STEPS = 256  # at most
OTHER = "other"
# The first category whose pattern matches a kernel's name counts its time.
KERNELS = {
    "attention": r"attn|attention|attend|flash|fmha|paged|kv_?cache|store_?kv|write_?kv|^_merge",
    "matmul": r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|wgmma|split_?k|mm_kernel",
    "sampling": r"sampl|draw|forbid|statistics|truncat|softmax|sort|top_?[kp]|argmax|gumbel|noise|scan|cumsum|search",
    "norm_rope_activation": r"norm(?!al)|rms|rope|rotar|rotate|silu|swiglu|gelu|activation|start_step",
}


def kernel_times_per_step(engine: Engine, requests: Sequence[Request], batch: int) -> dict[str, float]:
    """Milliseconds of kernels per decode step with `batch` sequences, by category: the mean of a short run.

    The time of a run with one new token is subtracted: prefill and set-up of the batch.
    """
    new = min(max(request.params.max_new_tokens for request in requests), PROFILED_STEPS)
    if new < 2:
        return {}
    short, long = (kernel_times(engine, full_batch(requests, batch, length)) for length in (1, new))
    times = {name: max(long[name] - short[name], 0.0) / (new - 1) for name in (*KERNELS, OTHER)}
    return {name: round(ms, 4) for name, ms in {**times, "total": sum(times.values())}.items()}


def full_batch(requests: Sequence[Request], batch: int, new: int) -> list[Request]:
    """The first requests, with `batch` samples in all and `new` tokens each."""
    chosen: list[Request] = []
    for request in requests:
        n = min(request.params.n, batch)
        if n:
            chosen.append(replace(request, params=replace(request.params, n=n, max_new_tokens=new)))
        batch -= n
    return chosen


def kernel_times(engine: Engine, requests: Sequence[Request]) -> Counter[str]:
    """Milliseconds of GPU kernels in a run, by category."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        generate(engine, requests)
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiled.key_averages():
        if event.device_type == DeviceType.CUDA:
            times[kernel_category(event.key)] += event.self_device_time_total / 1000
    return times


def kernel_category(kernel: str) -> str:
    return next((category for category, pattern in KERNELS.items() if re.search(pattern, kernel, re.I)), OTHER)


# Start-up: from starting Python to the first generated token

FIRST_TOKEN = "first token"  # printed by the started process
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def print_first_token(work: Workload, options: Options) -> None:
    """The started process: generate until the first token arrives."""
    model, engine, _, _ = build(work, options)
    ids = [engine.add(replace(request, stream=True)) for request in work.make_requests(model.vocab_size, run=0)]
    event = engine.step()[0]
    if isinstance(event, Failed):
        raise UserError(event.error)
    print(FIRST_TOKEN, flush=True)
    engine.abort(ids)


def measure_startup(work: Workload, options: Options, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Start a process twice with one cache of compiled kernels, which is empty at first."""
    words = ["bench", "engine", *command_options(work, options)]
    with tempfile.TemporaryDirectory(prefix="assay-startup-") as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        cold, warm = (seconds_to_first_token([*words, "--first-token"], caches) for _ in range(2))
    row = {
        "id": row_id(f"startup-{work.label}", options.device, options.dtype),
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
        start, command = time.perf_counter(), [sys.executable, "-m", "assay", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(command, env=os.environ | environment, **pipes) as process:
            assert process.stdout is not None
            printed = any(line.strip() == FIRST_TOKEN for line in process.stdout)
            seconds = time.perf_counter() - start
            process.communicate()
        if printed:
            return seconds
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise UserError(f"the started process generated no token: {reason.removeprefix('assay: ')}")


# Episodes

MODES = ("rounds", "own-pace")
MAX_LENGTH = 1024  # tokens per episode
WEIGHTS_SEED = 3


class Chatter(Env):
    """Answers every action with "go on". Nine letters are stop strings, so that random actions differ in length."""

    name = "chatter"
    max_steps = 8
    stop = tuple("adgjmpsvy")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.seed = 0, seed or 0
        return f"begin {seed}", {}

    def step(self, action: str) -> Any:
        self.steps += 1
        return "go on", 0.1, self.steps > self.seed % self.max_steps, False, {}


class Rounds:
    """An engine in lockstep: `step` returns when all requests have finished."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.add, self.abort, self.release = engine, engine.add, engine.abort, engine.release

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def step(self, wait: bool = True) -> list[Event]:
        events: list[Event] = []
        while new := self.engine.step():
            events += new
        return events


def measure_episodes(work: Episodes, options: EpisodeOptions, progress: Progress | None = None) -> list[dict[str, Any]]:
    """A row for each mode; the modes alternate. The second row counts trajectories equal to the first."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    renderer = Renderer(char_tokenizer())
    policy = make_policy(work.shape, renderer.tokenizer.vocab_size, device)
    engine: Any = make_engine(
        "native", policy, device=device, dtype=dtype, max_batch=work.max_batch, decode=renderer.decode
    )
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    rollouts: dict[str, list[Rollout]] = {}
    facts: dict[str, dict[str, Any]] = {}
    shown = RunProgress(progress, options.repeat)
    for shown.run in range(1 + options.repeat):
        for mode, served in zip(MODES, (Rounds(engine), engine), strict=True):
            engine.reset_prefix_cache()
            engine.reset_stats()
            start = now(device)
            rollouts[mode] = play(work, served, renderer, mode, shown)
            seconds[mode].append(now(device) - start)
            facts[mode] = count(engine, rollouts[mode])
    facts[MODES[1]]["same_as_in_rounds"] = sum(
        first.token_ids == second.token_ids for first, second in zip(*rollouts.values(), strict=True)
    )
    settings = {**asdict(work), **device_settings(device, dtype), "repeat": options.repeat}
    words = ["assay", "bench", "episodes", *command_options(work, options)]
    return [
        {
            "id": f"{row_id(work.id, options.device, options.dtype)}-{mode}",
            "system": "assay",
            **summarize("seconds", "first_run_s", seconds[mode], digits=3),
            **facts[mode],
            **settings,
            "command": shlex.join(words),
        }
        for mode in MODES
    ]


def make_policy(shape: str, vocab_size: int, device: torch.device) -> PolicyModel:
    if shape == NANO:
        return build_preset(shape, vocab_size, MAX_LENGTH, WEIGHTS_SEED)
    return random_model(replace(SHAPES[shape](), vocab_size=vocab_size, max_length=MAX_LENGTH), device, WEIGHTS_SEED)


def play(work: Episodes, engine: Any, renderer: Renderer, mode: str, progress: Progress) -> list[Rollout]:
    env, limits = Chatter(), Limits(0, work.step_tokens)
    collector = Collector(engine, renderer, JudgePool(env.judge(), 0), env=env, limits=limits, progress=progress)
    params = SamplingParams(n=work.samples, max_new_tokens=env.max_steps * work.step_tokens)
    prompts = env.prompts("train")[: work.episodes // work.samples]
    groups = collector.collect(prompts, params, (work.seed, 0), what=f"episodes, {mode}")
    return [rollout for group in groups for rollout in group.rollouts]


def count(engine: Any, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    stats, lengths = engine.stats, sorted(len(turn.completion.token_ids) for r in rollouts for turn in r.turns)
    return {
        "actions": len(lengths),
        "action_tokens_median": lengths[len(lengths) // 2],
        "action_tokens_max": lengths[-1],
        "decoded_tokens": stats.decoded_tokens,
        "decode_steps": stats.decode_steps,
        "rows_a_step": round(stats.decoded_tokens / stats.decode_steps, 1),
    }
