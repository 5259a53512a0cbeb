"""Compare the simulator of asynchronous runs with real pipelines.

    python bench/simulation.py --json bench/results/simulation-cpu.json
    python bench/simulation.py --run configs/demo.toml --json bench/results/simulation-cpu.json

First command: the real source of asynchronous training, judge, HTTP client and weight updates, with 1 to 8 servers that
sleep instead of decoding, and a learner that sleeps. Their durations are given, so the simulator must find the seconds
per step. `--run`: a run with one real server, whose durations are measured in a run before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from assay.bench.results import describe_machine, describe_versions
from assay.build.cost import Line
from assay.build.simulate import Decoding, Pipeline, drawn_lengths, simulate

LENGTHS = drawn_lengths(40, 120, 97)
STUB = Pipeline(
    engines=1,
    max_batch=16,
    decoding=Decoding(fixed=0.02, row=0.001, context=5e-6),
    prefill=Line(0.0, 5e-5),
    prompts=8,
    samples=4,
    prompt_tokens=40,
    lengths=LENGTHS,
    update=Line(0.3, 4e-4),
    sync=0.3,
    recomputes=True,
)
VOCABULARY = 300


class StubServer:
    """Answers as vLLM does. Decodes by sleeping: one token of each running sequence per position."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.rows: dict[int, list[Any]] = {}  # number: remaining tokens, tokens of context, future
        self.slots = asyncio.Semaphore(pipeline.max_batch)
        self.changed = asyncio.Event()
        self.paused, self.stall, self.number = False, 0.0, 0
        self.computed: set[bytes] = set()  # prompts since the last weights
        self.task = asyncio.ensure_future(self.decode())

    async def decode(self) -> None:
        at = time.perf_counter()
        while True:
            if self.paused or not self.rows:
                self.changed.clear()
                await self.changed.wait()
                at = time.perf_counter()
                continue
            at += self.stall + self.pipeline.decoding.at(len(self.rows), sum(row[1] for row in self.rows.values()))
            self.stall = 0.0
            await asyncio.sleep(max(at - time.perf_counter(), 0))
            if self.paused:
                continue
            for number, row in list(self.rows.items()):
                row[0], row[1] = row[0] - 1, row[1] + 1
                if not row[0]:
                    del self.rows[number]
                    row[2].set_result("stop")

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, lengths = body["prompt"], self.pipeline.lengths
        done = max(lengths) - body["max_tokens"]  # tokens from before a pause; the first of them tells the length
        kind = prompt[-done] if done else body["seed"] % len(lengths)
        async with self.slots:
            while self.paused:
                self.changed.clear()
                await asyncio.sleep(0.005)
            if (key := bytes(token % 256 for token in prompt)) not in self.computed:
                self.computed.add(key)
                self.stall += self.pipeline.prefill.at(len(prompt))
            end = asyncio.get_running_loop().create_future()
            row = [lengths[kind] - done, len(prompt), end]
            self.number += 1
            number = self.number
            self.rows[number] = row
            self.changed.set()
            try:
                reason = await end
            finally:
                self.rows.pop(number, None)
        sampled = lengths[kind] - done - row[0]
        ids = [kind] * sampled
        return {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * sampled}, "finish_reason": reason}

    async def respond(self, path: str, body: Any) -> Any:
        match path:
            case "/v1/models":
                return {"data": [{"id": "policy", "max_model_len": 1024}]}
            case "/server_info":
                model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "enable_sleep_mode": False}
                parallel = {"tensor_parallel_size": 1, "worker_extension_cls": ""}
                return {"vllm_config": {"model_config": model, "parallel_config": parallel, "device_config": {}}}
            case "/v1/completions":
                if body["max_tokens"] == 1 and "seed" not in body:  # a test of the vocabulary
                    return {
                        "choices": [
                            {"token_ids": [0], "logprobs": {"token_logprobs": [0.0]}, "finish_reason": "length"}
                        ]
                    }
                return {"choices": [await self.complete(body)]}
            case "/is_sleeping":
                return {"is_sleeping": False}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/pause":
                self.paused = True
                for row in list(self.rows.values()):
                    row[2].set_result("abort")
                self.rows.clear()
                self.computed.clear()
            case "/resume":
                self.paused = False
                self.changed.set()
            case "/collective_rpc":
                await asyncio.sleep(self.pipeline.sync)
                return {"results": [None]}
        return {}


def serve(pipeline: Pipeline, ports: Any) -> None:
    """Run all stub servers, in one process."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def main() -> None:
        servers = []
        for _ in range(pipeline.engines):
            stub = StubServer(pipeline)

            async def answer(request: Request, stub: StubServer = stub) -> JSONResponse:
                body = await request.body()
                task = asyncio.ensure_future(stub.respond(request.url.path, json.loads(body) if body else None))
                gone = asyncio.ensure_future(disconnected(request))
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
                if not task.done():
                    task.cancel()
                    return JSONResponse({}, 499)
                return JSONResponse(task.result())

            app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
            servers.append(uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical")))
        tasks = [asyncio.ensure_future(server.serve()) for server in servers]
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        ports.send([server.servers[0].sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*tasks)

    asyncio.run(main())


async def disconnected(request: Any) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.02)


def measured(pipeline: Pipeline, steps: int, warm: int = 2) -> dict[str, float]:
    """Seconds per step of the real pipeline with stub servers, and what it says about itself."""
    import torch

    from assay.algos import make_algorithm
    from assay.bench.step import number_renderer
    from assay.config import TrainConfig, VLLMConfig
    from assay.engine import make_engine
    from assay.models import build_preset
    from assay.rewards import JudgePool
    from assay.rollout import Collector
    from assay.training.async_source import AsyncSource
    from assay.training.progress import RunState, Schedule
    from assay.training.sources import PromptStream
    from assay.types import Prompt, Status, Verdict

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(pipeline, theirs), daemon=True)
    process.start()
    urls = [f"http://127.0.0.1:{port}" for port in ours.recv()]
    policy, renderer = build_preset("nano", VOCABULARY, 1024, seed=0), number_renderer(VOCABULARY)
    cfg = TrainConfig.model_validate(
        {
            "source": {"name": "async", "max_staleness": pipeline.staleness},
            "train": {"prompts": pipeline.prompts, "samples": pipeline.samples, "steps": 10_000},
            "sampling": {"max_new_tokens": max(pipeline.lengths)},
        }
    )
    options = {"device": "cpu", "dtype": torch.float32, "max_length": 1024, "decode": renderer.decode}
    engine = make_engine("vllm", policy, {"settings": VLLMConfig(urls=urls)}, max_batch=10_000, **options)
    rng = random.Random(0)

    def words() -> str:
        return " ".join(str(rng.randrange(10, VOCABULARY)) for _ in range(pipeline.prompt_tokens))

    prompts = [Prompt(str(index), ({"role": "user", "content": words()},)) for index in range(5000)]
    collector = Collector(engine, renderer, JudgePool(lambda *_: Verdict(0.0, Status.WRONG), 0, 5.0))
    schedule = Schedule(10_000, pipeline.prompts)
    source = AsyncSource(cfg, make_algorithm("grpo"), collector, PromptStream(prompts, 0), schedule)
    state, trained, rows, syncs, began = RunState(), [0], [], [], 0.0
    try:
        for step in range(warm + steps):
            if step == warm:
                began = time.perf_counter()
            sampled = source.next(state)
            rows.append(sampled.metrics)
            tokens = state.tokens - trained[-1] + pipeline.prompts * pipeline.prompt_tokens
            trained.append(state.tokens)
            time.sleep(pipeline.update.at(tokens))
            state.step += 1
            updated = time.perf_counter()
            engine.update_weights(policy, state.step)
            syncs.append(time.perf_counter() - updated)
        seconds = (time.perf_counter() - began) / steps
    finally:
        source.close()
        engine.close()
        process.kill()
    means = {name: fmean(row[f"async/{name}"] for row in rows[warm:]) for name in ("staleness", "restarted")}
    return {"step_s": seconds, "sync_s": fmean(syncs[warm:]), **means}


def compared(pipeline: Pipeline, steps: int) -> dict[str, Any]:
    actual = measured(pipeline, steps)
    seeds = [simulate(replace(pipeline, sync=actual["sync_s"], seed=seed), steps) for seed in range(5)]
    row = {
        "id": f"stub-{pipeline.engines}-staleness{pipeline.staleness}",
        "steps": steps,
        "sync_s": round(actual["sync_s"], 3),  # the servers sleep for `Pipeline.sync` of it
        **both("step_s", actual["step_s"], fmean(found.step for found in seeds)),
        **both("staleness", actual["staleness"], fmean(found.staleness for found in seeds)),
        **both("restarted", actual["restarted"], fmean(found.restarted for found in seeds)),
        "bottleneck": seeds[0].bottleneck,
    }
    print(json.dumps(row), flush=True)
    return row


def both(name: str, measured: float, simulated: float) -> dict[str, Any]:
    row: dict[str, Any] = {name: {"measured": round(measured, 3), "simulated": round(simulated, 3)}}
    return row | ({"ratio": round(simulated / measured, 3)} if name == "step_s" else {})


def real_run(config: str, options: list[str]) -> dict[str, Any]:
    """Measure the speeds of a run with one server, run it, and simulate it with the lengths of its answers."""
    from assay.build.dry_run import measure
    from assay.build.models import model_source
    from assay.build.run import assemble
    from assay.config import TrainConfig
    from assay.config.settings import load_settings
    from assay.runs.console import Console
    from assay.runs.rollouts import read_rollouts, rollout_steps
    from assay.training.parallel import start_mesh

    overrides = dict(option.removeprefix("--").split("=", 1) for option in options)
    cfg = load_settings(TrainConfig, config, overrides)
    run = assemble(cfg, Console(), model_source(cfg.model, cfg.runs_dir), start_mesh(cfg), 0.0)
    with run.collector:
        speeds, work = measure(run, run.source.prompts.next(cfg.train.prompts), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "assay", "train", config, *options, f"--runs_dir={folder}", "--name=run"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        path = Path(folder) / "run"
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        groups = [group for step in rollout_steps(path) for group in read_rollouts(path, step)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trained = sum(rollout.length for rollout in rollouts if rollout.learns)
    share = trained / sum(rollout.length for rollout in rollouts)  # others are left out of the update
    steps = [row for row in rows if "async/staleness" in row and "eval/accuracy" not in row][2:]
    pipeline = Pipeline(
        engines=1,
        max_batch=work.max_batch,
        decoding=Decoding(speeds.position.fixed, speeds.position.slope),
        prefill=Line(0.0, speeds.prompt_token),
        prompts=cfg.train.prompts,
        samples=cfg.train.samples,
        prompt_tokens=round(work.prompt_tokens),
        lengths=[rollout.length for rollout in rollouts],
        update=replace(speeds.update, slope=share * speeds.update.slope),
        sync=speeds.sync,
        staleness=cfg.source.max_staleness,
        judge=speeds.judge.slope,
    )
    found = simulate(pipeline, 20)
    return {
        "id": f"run-{Path(config).stem}-{cfg.engine.name}",
        "options": shlex.join(options),
        "steps": len(steps),
        **both("step_s", median(row["time/step"] for row in steps), found.step),
        **both("staleness", fmean(row["async/staleness"] for row in steps), found.staleness),
        "bottleneck": found.bottleneck,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--run", metavar="CONFIG", help="compare a run of this config instead")
    parser.add_argument("--set", default="", help='its options, as "--source=async --train.steps=9"')
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    args = parser.parse_args()
    if args.run:
        rows = [real_run(args.run, shlex.split(args.set))]
        print(json.dumps(rows[0]))
    else:
        kinds = [(engines, staleness) for engines in args.servers for staleness in args.staleness]
        rows = [compared(replace(STUB, engines=one, staleness=age), args.steps) for one, age in kinds]
    if args.json:
        earlier = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        known = {row["id"] for row in rows}
        content = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "command": "python bench/simulation.py; python bench/simulation.py --run CONFIG --set OPTIONS",
            "stub": {**asdict(STUB), "lengths": f"{len(LENGTHS)} from {min(LENGTHS)} to {max(LENGTHS)}"},
            "rows": [row for row in earlier if row["id"] not in known] + rows,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
