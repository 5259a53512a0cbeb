"""What the exchange of commands costs in a tensor-parallel engine with a leader.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/tensor_parallel.py --json bench/results/tp-cpu.json

Times a step boundary (one exchange) without commands and with one request of 64 tokens, and the sum over the ranks of a
layer's output for comparison: a decoding step has two of them per layer. Then engines in lockstep and with a leader
serve the same requests in turns. CPU processes on gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from assay.bench.results import describe_machine, describe_versions
from assay.bench.workload import SHAPES
from assay.engine import Engine, NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.native.tensor_parallel import (
    Link,
    TensorParallelLeader,
    follow,
    new_cpu_group,
)
from assay.mesh import init_mesh
from assay.models.decoder import Decoder


def microseconds(work: Callable[[], object], group: dist.ProcessGroup, count: int = 5000) -> dict[str, float]:
    """Per call. Every 100 calls the ranks meet, so that the leader cannot be far ahead."""
    times = []
    for _ in range(count // 100):
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(100):
            work()
        dist.barrier(group=group)
        times.append((time.perf_counter() - start) * 1e4)
    return {"median": round(median(times), 1), "least": round(min(times), 1)}


def tokens_per_s(engine: Engine, requests: Sequence[Request]) -> float:
    start = time.perf_counter()
    groups = generate(engine, requests)
    return sum(len(done.token_ids) for group in groups for done in group) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny-llama", choices=SHAPES)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = init_mesh(tp=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = Decoder(SHAPES[options.shape]())
    assert mesh.tp_group is not None
    cpu_group = new_cpu_group(mesh.tp_group)

    def new_engine() -> NativeEngine:
        engine = make_engine("native", model, device="cpu", dtype=torch.float32, group=mesh.tp_group)
        assert isinstance(engine, NativeEngine)
        return engine

    engine, link = new_engine(), Link(new_engine(), cpu_group)
    params = SamplingParams(n=options.samples, max_new_tokens=options.new)
    requests = [Request(list(range(i, i + 64)), params, seed=i) for i in range(8)]
    one_request = [("add", 0, requests[0])] if link.leads else []
    layer_output = torch.zeros(8 * options.samples, SHAPES[options.shape]().hidden)
    row: dict[str, object] = {
        "shape": options.shape,
        "ranks": mesh.tp_size,
        "empty_boundary_us": microseconds(link.exchange, cpu_group),
        "request_boundary_us": microseconds(lambda: link.exchange(commands=one_request), cpu_group),
        "all_reduce_us": microseconds(lambda: dist.all_reduce(layer_output, group=mesh.tp_group), cpu_group),
    }
    rates: dict[str, list[float]] = {"lockstep": [], "leader": []}
    for _ in range(options.repeat + 1):  # the first is not counted
        rates["lockstep"].append(tokens_per_s(engine, requests))
        engine.reset_prefix_cache()
        if mesh.rank:
            follow(new_engine(), cpu_group)
        else:
            leader = TensorParallelLeader(new_engine(), cpu_group)
            rates["leader"].append(tokens_per_s(leader, requests))
            leader.close()
    row |= {f"{name}_tokens_per_s": round(median(values[1:])) for name, values in rates.items() if values}
    row |= {f"{name}_runs": [round(value) for value in values[1:]] for name, values in rates.items()}
    if mesh.is_main:
        command = " ".join(["torchrun", "--nproc-per-node", str(mesh.tp_size), *sys.argv])
        load = {"load_average": [round(load, 1) for load in os.getloadavg()]}  # of other processes, too
        content = {
            "machine": describe_machine() | load,
            "versions": describe_versions(),
            "command": command,
            "rows": [row],
        }
        print(json.dumps(content, indent=2))
        if options.json is not None:
            options.json.write_text(json.dumps(content, indent=2) + "\n")
    mesh.close()


if __name__ == "__main__":
    main()
