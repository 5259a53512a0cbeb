"""Where the time of a decode step goes on a GPU: its kernels, by what they are for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from assay.engine import Engine, Request, generate

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
