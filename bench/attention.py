"""Times of the Triton kernels for attention in training, and of torch's flash attention for the same sequences.

    python bench/attention.py --cases group-64 long --key-gradients 64,64,4,2 64,128,8,2

Each tuning in --forward, --query-gradients and --key-gradients (queries and keys per tile, warps, stages) is tried with
the defaults of the other kernels, and printed on a line. Times are those of the kernels on the GPU, without the host.
TFLOP/s count the products that attention needs (two forward, five backward) for the keys that each query sees.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from assay.models import attention, attention_kernels
from assay.models.attention import PackedCausal
from assay.models.attention_kernels import TUNINGS, Tuning


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int  # of a head
    prompt: int  # tokens; 0: nothing is shared
    answers: int
    tokens: int  # of an answer

    def layout(self) -> PackedCausal:
        lengths = [self.prompt + self.tokens] * self.answers
        return PackedCausal(lengths, "cuda", [0] + [self.prompt] * (self.answers - 1))

    def pairs(self) -> int:
        """Number of queries and keys that see each other."""
        own = self.tokens * (self.tokens + 1) // 2
        return self.answers * (own + self.tokens * self.prompt) + self.prompt * (self.prompt + 1) // 2


CASES = {
    "group-64": Case(14, 2, 64, 128, 64, 256),
    "long-answers": Case(12, 2, 128, 256, 8, 2048),
    "group-16": Case(28, 4, 128, 128, 16, 256),
    "long": Case(16, 8, 128, 0, 1, 16384),
}
FIELDS = {"forward": "forward", "query_gradients": "queries", "key_gradients": "keys"}  # of `Tunings`


def kernel_times(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Milliseconds of each kernel per call."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        times[event.key] += event.self_device_time_total / 1000 / repeats
    return times


def inputs_of(case: Case, layout: PackedCausal) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result."""
    count = len(layout.positions)
    generator = torch.Generator("cuda").manual_seed(0)
    numbers = case.heads, case.kv_heads, case.kv_heads, case.heads
    return [torch.randn(count, n, case.size, generator=generator, device="cuda", dtype=torch.bfloat16) for n in numbers]


def with_kernels(case: Case) -> Callable[[], tuple[Tensor, ...]]:
    layout = case.layout()
    *leaves, up = inputs_of(case, layout)
    for x in leaves:
        x.requires_grad_()
    return lambda: torch.autograd.grad(layout(*leaves), leaves, up)


def with_flash(case: Case) -> Callable[[], None]:
    """Two passes, over the segments and over the prefix, without what combines their results."""
    layout = case.layout()
    q, k, v, up = inputs_of(case, layout)
    lengths = layout.segments.lengths
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    passes = [((q, k, v), up, (starts, starts, max(lengths), max(lengths)), True)]
    if case.prompt:
        rest = len(q) - case.prompt
        bounds = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (rest, case.prompt)]
        suffixes = q[case.prompt :], k[: case.prompt], v[: case.prompt]
        passes.append((suffixes, up[case.prompt :], (*bounds, rest, case.prompt), False))

    def work() -> None:
        for rows, grad, bounds, causal in passes:
            forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
            out, sums, seed, unused = forward(*rows, *bounds, 0.0, causal, False)[:4]
            backward(grad, *rows, out, sums, *bounds, 0.0, causal, seed, unused)

    return work


def report(name: str, label: str, times: dict[str, float]) -> None:
    """One line: total, TFLOP/s, and the kernels that take the most time."""
    total = sum(times.values())
    case = CASES[name]
    speed = 14 * case.pairs() * case.heads * case.size / total / 1e9
    most = sorted(times.items(), key=lambda item: -item[1])[:5]
    parts = "  ".join(f"{kernel[:44]} {time:.3f}" for kernel, time in most)
    print(f"{name:13} {label:44} {total:8.3f} ms {speed:6.0f} TFLOP/s  {parts}", flush=True)


def try_tunings(name: str, kernel: str, tunings: list[Tuning], repeats: int) -> None:
    case = CASES[name]
    size = max(attention_kernels.padded_size(case.size), min(TUNINGS))
    default = TUNINGS[size]
    for tuning in tunings:
        TUNINGS[size] = default._replace(**{FIELDS[kernel]: tuning})
        attention_kernels.tunings_for.cache_clear()
        label = f"{kernel} {','.join(map(str, tuning))}"
        try:
            report(name, label, kernel_times(with_kernels(case), repeats))
        except Exception as error:  # too large for the GPU: the others are still tried
            print(f"{name:13} {label:44} {type(error).__name__}: {str(error)[:100]}", flush=True)
    TUNINGS[size] = default
    attention_kernels.tunings_for.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cudnn", action="store_true", help="compute long segments by cuDNN, as training does")
    parser.add_argument("--programs", type=int, default=attention_kernels.PROGRAMS, help="for gradients of keys")
    parser.add_argument("--chunk", type=int, default=attention_kernels.CHUNK, help="least number of queries of these")
    for kernel in FIELDS:
        parser.add_argument(f"--{kernel.replace('_', '-')}", nargs="*", default=[], metavar="QUERIES,KEYS,WARPS,STAGES")
    args = parser.parse_args()
    attention_kernels.PROGRAMS, attention_kernels.CHUNK = args.programs, args.chunk
    if not args.cudnn:
        attention.LONG = 1 << 60
    for name in args.cases:
        case = CASES[name]
        report(name, "flash", kernel_times(with_flash(case), args.repeats))
        work = with_kernels(case)
        report(name, "kernels", kernel_times(work, args.repeats))
        first, second = work(), work()
        equal = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        print(f"{name:13} two backward passes are {'equal' if equal else 'NOT EQUAL'}", flush=True)
        for kernel in FIELDS:
            tunings = [Tuning(*map(int, words.split(","))) for words in getattr(args, kernel)]
            try_tunings(name, kernel, tunings, args.repeats)


if __name__ == "__main__":
    main()
