"""Kernels of a decoding step beside their rooflines: products in 16 and 8 bits, attention, sampling, and the rest.

    python bench/decode_kernels.py --shape 7b --rows 1024 256 --length 256 --json kernels.json

Each kernel runs in a CUDA graph, on several copies of its data in turn, so that weights come from memory and not from a
cache. The roofline of a kernel is the larger of two times: its bytes at the published bandwidth of the GPU, and its
operations at the published peak of dense products (in 8 bits twice that of 16 bits).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from assay.bench.workload import SHAPES
from assay.build.plan import GPUS, Gpu
from assay.engine.native.kernels import attention, layers, sampling
from assay.engine.sampler import Rows
from assay.engine.sequence import BLOCK_SIZE, Column, RowState
from assay.models import ModelSpec
from assay.models.fp8 import Scaled

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
CACHE_BYTES = 256 * 2**20  # more than the caches of a GPU hold
REPEATS = 5


@dataclass
class Kernel:
    name: str
    per_step: int  # how often a decoding step runs it
    make: Callable[[], Callable[[], Any]]  # new data, and the call on it
    size: int  # bytes that it reads and writes
    operations: float = 0.0  # floating-point operations
    speedup: int = 1  # of products over those in 16 bits


def seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Of one call, on average."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(20 // len(calls), 1)
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / rounds / len(calls))
    return median(times)


def products(spec: ModelSpec, rows: int) -> list[Kernel]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {
        "qkv": (queries + 2 * keys, spec.hidden, spec.layers),
        "out": (spec.hidden, queries, spec.layers),
        "gate_up": (2 * spec.intermediate, spec.hidden, spec.layers),
        "down": (spec.hidden, spec.intermediate, spec.layers),
        "head": (spec.vocab_size, spec.hidden, 1),
    }
    kernels = []
    for name, (outputs, inputs, count) in sizes.items():
        operations = 2.0 * rows * outputs * inputs

        def plain(outputs: int = outputs, inputs: int = inputs) -> Callable[[], Any]:
            x, weight = new(rows, inputs), new(outputs, inputs)
            out = new(rows, outputs)
            return lambda: torch.mm(x, weight.t(), out=out)

        def eight_bits(outputs: int = outputs, inputs: int = inputs) -> Callable[[], Any]:
            codes, weight = (new(size, inputs).to(torch.float8_e4m3fn) for size in (rows, outputs))
            one = torch.ones((), device=DEVICE)
            return lambda: torch._scaled_mm(codes, weight.t(), one, one, out_dtype=DTYPE, use_fast_accum=True)

        moved = (rows + outputs) * inputs
        kernels.append(Kernel(name, count, plain, 2 * (moved + rows * outputs), operations))
        if name != "head" and rows >= 16:
            size = moved + 2 * rows * outputs
            kernels.append(Kernel(f"{name}, fp8", count, eight_bits, size, operations, 2))
    return kernels


def others(spec: ModelSpec, rows: int, length: int) -> list[Kernel]:
    hidden, inner, heads, kv_heads, d = spec.hidden, spec.intermediate, spec.heads, spec.kv_heads, spec.head_dim
    blocks = -(-length // BLOCK_SIZE)

    def attend() -> Callable[[], Any]:
        kv = torch.randn(2, kv_heads, rows * blocks, BLOCK_SIZE, d, device=DEVICE, dtype=DTYPE)
        tables = torch.randperm(rows * blocks, device=DEVICE).view(rows, blocks).int()
        lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
        q = new(rows, heads, d)
        counters = torch.zeros(rows, kv_heads, dtype=torch.int32, device=DEVICE)
        order = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        splits = attention.default_splits(rows, kv_heads, length)
        return lambda: attention.decode_attention(q, kv, tables, lengths, splits=splits, counters=counters, order=order)

    def norm() -> Callable[[], Any]:
        x, weight = new(rows, hidden), new(hidden)
        return lambda: layers.rms_norm(x, weight, 1e-6)

    def activate() -> Callable[[], Any]:
        x = new(rows, 2 * inner)
        return lambda: layers.gated(x)

    def rotate() -> Callable[[], Any]:
        qkv = new(rows, (heads + 2 * kv_heads) * d)
        kv = torch.zeros(2, kv_heads, rows + 1, BLOCK_SIZE, d, device=DEVICE, dtype=DTYPE)
        places = torch.arange(rows, device=DEVICE)
        rotations = torch.randn(rows, d, device=DEVICE)
        return lambda: layers.rope_store(qkv, places, places, rotations, None, None, 1e-6, kv)

    def product(size: int) -> Scaled:
        one = torch.ones(rows, device=DEVICE)
        return Scaled(new(rows, size), one, one[:1], [size], None)

    def quantized_norm() -> Callable[[], Any]:
        x, y, weight = new(rows, hidden), product(hidden), new(hidden)
        return lambda: layers.quantized_norm(x, y, weight, 1e-6)

    def quantized_activation() -> Callable[[], Any]:
        gate_up = product(2 * inner)
        return lambda: layers.quantized_activation(gate_up)

    def quantized() -> Callable[[], Any]:
        x = new(rows, heads * d)
        return lambda: layers.quantized_norm(x, None, None, 1e-6)

    def draw() -> Callable[[], Any]:
        table = Rows(rows, 8, DEVICE, DTYPE)
        table.ints[:, Column.STATE] = int(RowState.RUNNING)
        table.ints[:, Column.LIMIT], table.ints[:, Column.STOPS :] = 1 << 40, -1
        table.floats[:, 0], table.floats[:, 1] = 1.0, 1.0
        scratch, logits = sampling.Scratch(rows, spec.vocab_size, DEVICE), new(rows, spec.vocab_size)
        return lambda: sampling.sample(
            *(logits, table.ints, table.floats, table.forbidden, table.step, table.log_tokens, table.log_scores),
            scratch,
        )

    cache = 2 * rows * blocks * BLOCK_SIZE * kv_heads * d * 2
    width = (heads + 2 * kv_heads) * d
    return [
        Kernel(f"attention over {length} tokens", spec.layers, attend, cache, 4.0 * rows * heads * d * length),
        Kernel("norm", 2 * spec.layers + 1, norm, 4 * rows * hidden),
        Kernel("activation", spec.layers, activate, 6 * rows * inner),
        Kernel("rotation and store", spec.layers, rotate, 4 * rows * width),
        Kernel("addition and norm, fp8", 2 * spec.layers, quantized_norm, 7 * rows * hidden),
        Kernel("activation, fp8", spec.layers, quantized_activation, 5 * rows * inner),
        Kernel("quantized results of attention", spec.layers, quantized, 3 * rows * heads * d),
        Kernel("sampling", 1, draw, 2 * rows * spec.vocab_size),
    ]


def new(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def measured(kernel: Kernel, gpu: Gpu) -> dict[str, Any]:
    copies = max(min(CACHE_BYTES // max(kernel.size, 1), 20), 1)
    return row_of(kernel, seconds([kernel.make() for _ in range(copies)]), gpu)


def row_of(kernel: Kernel, taken: float, gpu: Gpu) -> dict[str, Any]:
    bound = {"memory": kernel.size / gpu.bandwidth, "products": kernel.operations / (gpu.flops * kernel.speedup)}
    roofline = max(bound.values())
    return {
        "kernel": kernel.name,
        "us": round(taken * 1e6, 2),
        "roofline_us": round(roofline * 1e6, 2),
        "share_of_roofline": round(roofline / taken, 3),
        "bound": max(bound, key=lambda name: bound[name]),
        "per_step": kernel.per_step,
        "ms_per_step": round(taken * kernel.per_step * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1024])
    parser.add_argument("--length", type=int, default=256, help="tokens in the KV cache of each row")
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS), help="whose published peaks are the roofline")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec, gpu = SHAPES[args.shape](), GPUS[args.gpu]
    tables = []
    for rows in args.rows:
        print(f"{args.shape}, {rows} rows, {args.length} tokens")
        table = []
        for kernel in [*products(spec, rows), *others(spec, rows, args.length)]:
            row = measured(kernel, gpu)
            torch.cuda.empty_cache()
            table.append(row)
            print(f"  {row['kernel']:36} {row['us']:9.2f} us {row['roofline_us']:9.2f} {row['share_of_roofline']:7.1%}"
                  f" {row['bound']:9} {row['ms_per_step']:8.3f} ms per step")  # fmt: skip
        tables.append({"shape": args.shape, "rows": rows, "length": args.length, "kernels": table})
    if args.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "peaks": asdict(gpu)}
        args.json.write_text(json.dumps({**facts, "tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
