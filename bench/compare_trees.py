"""Compare the speed of two source trees of assay on one machine: two resident processes, which take turns.

    git worktree add /tmp/before COMMIT
    python bench/compare_trees.py --before /tmp/before/src --after src --runs 5 --rows engine-0.5b step-0.5b

Each process builds its model and engine once and is timed in turns with the other, so that what else happens on the
machine affects both. Prints one JSON row per workload with all times, the medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

ENGINE_ROWS: dict[str, dict[str, Any]] = {
    "engine-0.5b": {},
    "engine-1.5b": {"shape": "1.5b"},
    "engine-0.5b-longtail": {"lengths": "longtail", "prompts": 64, "new": 1024},
    "engine-tiny": {"shape": "tiny-llama", "prompts": 8, "samples": 16, "prompt_tokens": 64, "new": 128},
    "engine-tiny-longtail": {
        "shape": "tiny-llama", "lengths": "longtail", "prompts": 16, "requests": 256, "prompt_tokens": 64, "new": 256
    },
}  # fmt: skip
STEP_ROWS: dict[str, dict[str, Any]] = {
    "step-0.5b": {},
    "step-tiny": {"shape": "tiny-llama", "prompts": 2, "samples": 8, "prompt_tokens": 64, "new": 64},
}
EPISODE_ROWS: dict[str, dict[str, Any]] = {
    "episodes-0.5b": {"shape": "0.5b"},
    "episodes-nano": {"episodes": 256, "max_batch": 64},
}
SERVE_ROWS: dict[str, dict[str, Any]] = {  # requests per client; `clients` at once
    "serve-1": {"clients": 1, "rounds": 4},
    "serve-64": {"clients": 64, "rounds": 2},
    "serve-1024": {"clients": 1024, "rounds": 1},
    "serve-tiny-8": {"clients": 8, "rounds": 2, "shape": "tiny-llama", "prompt": 32, "new": 32},
}


class Worker:
    """One tree, in this process. It runs a workload each time it reads a line."""

    def __init__(self, row: str, device: str) -> None:
        import torch

        self.torch, self.device, self.stack = torch, device, ExitStack()
        kinds = (
            (ENGINE_ROWS, self.engine_row), (STEP_ROWS, self.step_row),
            (EPISODE_ROWS, self.episodes_row), (SERVE_ROWS, self.serve_row),
        )  # fmt: skip
        self.run = next(make(rows[row]) for rows, make in kinds if row in rows)

    def engine_row(self, settings: dict[str, Any]) -> Callable[[int], float]:
        from assay import engine as package
        from assay.bench.engine import Options, build, timed
        from assay.bench.workload import Workload

        work = Workload(**settings)
        model, engine, device, _ = build(work, Options(device=self.device))
        model.to("cpu")

        def generate(requests: Any) -> Any:
            return package.generate(engine, requests) if hasattr(package, "generate") else engine.generate(requests)

        def run(number: int) -> float:
            completions, seconds = timed(generate, work.make_requests(model.vocab_size, number), device)
            assert [len(c.token_ids) for group in completions for c in group] == work.new_tokens
            return seconds

        return run

    def step_row(self, settings: dict[str, Any]) -> Callable[[int], float]:
        from assay.bench import step
        from assay.bench.workload import Workload

        work = Workload(**settings)
        if not hasattr(step, "step_benchmark"):
            return self.earlier_step_row(work)
        bench = self.stack.enter_context(step.step_benchmark(work, step.StepOptions(device=self.device)))

        def run(number: int) -> float:
            bench.step()
            return bench.seconds[-1]

        return run

    def earlier_step_row(self, work: Any) -> Callable[[int], float]:
        """For commits in which the components of a step were built by `assay.bench.trainer`."""
        from assay.bench.shapes import float32_model  # type: ignore[import-not-found]

        from assay.bench import step, trainer  # type: ignore[attr-defined]
        from assay.models.device import pick_device

        steps = step.Steps()  # type: ignore[attr-defined]
        policy = float32_model(work.shape, work.model, pick_device(self.device), work.seed)
        make_run = getattr(trainer, "benched_run", None) or trainer.training_parts
        parts = self.stack.enter_context(make_run(policy, work, trainer.StepOptions(device=self.device)))

        def run(number: int) -> float:
            step.one_step(parts, steps)  # type: ignore[attr-defined]
            return steps.seconds[-1]

        return run

    def episodes_row(self, settings: dict[str, Any]) -> Callable[[int], float]:
        from assay.bench import RunProgress
        from assay.bench import engine as episodes
        from assay.bench.engine import now
        from assay.bench.workload import Episodes
        from assay.engine import make_engine
        from assay.models.device import pick_device, pick_dtype
        from assay.text import Renderer, char_tokenizer

        if not hasattr(episodes, "play"):  # earlier commits
            from assay.bench import episodes  # type: ignore[attr-defined,no-redef]

        work, device = Episodes(**settings), pick_device(self.device)
        renderer = Renderer(char_tokenizer())
        policy = episodes.make_policy(work.shape, renderer.tokenizer.vocab_size, device)
        dtype = pick_dtype("auto", device)
        engine: Any = make_engine(
            "native", policy, device=device, dtype=dtype, max_batch=work.max_batch, decode=renderer.decode
        )

        def run(number: int) -> float:
            engine.reset_prefix_cache()
            start = now(device)
            episodes.play(work, engine, renderer, "own-pace", RunProgress(None, 0))
            return now(device) - start

        return run

    def serve_row(self, settings: dict[str, Any]) -> Callable[[int], float]:
        import serve  # bench/serve.py

        values = {"shape": "0.5b", "prompt": 128, "new": 256} | settings
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        serve.make_model(argparse.Namespace(shape=values["shape"], folder=folder, seed=0))
        vocabulary = min(json.loads((folder / "config.json").read_text())["vocab_size"] - 1, 151_000)
        words = [sys.executable, "-m", "assay", "serve", str(folder), "--name", "bench", "--port", "0"]
        server = subprocess.Popen([*words, "--device", self.device], stderr=subprocess.PIPE, text=True)
        self.stack.callback(server.wait)
        self.stack.callback(server.terminate)
        assert server.stderr is not None
        line, found = "", None
        for line in server.stderr:
            if found := re.search(r"at (http://\S+)/v1", line):
                break
        if not found:
            sys.exit(f"the server did not start: {line}")
        url = found[1]
        threading.Thread(target=server.stderr.read, daemon=True).start()  # or the server blocks when the pipe is full
        clients, new, rounds = values["clients"], values["new"], values["rounds"]

        def run(number: int) -> float:
            load = serve.Load(url, "bench", values["prompt"], new, rounds, vocabulary, number)
            outcome = serve.measure(load, clients, min(6, os.cpu_count() or 1))
            assert not outcome.errors and outcome.tokens == clients * rounds * new, outcome.errors[:1]
            return outcome.ended - outcome.begun

        return run

    def serve(self) -> None:
        with self.stack:
            for line in sys.stdin:
                print(json.dumps({"seconds": self.run(int(line))}), flush=True)


def started(tree: str, row: str, device: str) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "--worker", row, "--device", device]
    path = os.pathsep.join([str(Path(tree).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def start_run(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()


def wait_for_run(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"seconds"'):
            return json.loads(line)["seconds"]
    raise SystemExit(f"the process of {process.args} ended")


def compare(row: str, trees: dict[str, str], runs: int, device: str) -> dict[str, Any]:
    processes = {name: started(tree, row, device) for name, tree in trees.items()}
    times: dict[str, list[float]] = {name: [] for name in trees}
    try:
        for process in processes.values():  # warm up at the same time
            start_run(process, 0)
        for process in processes.values():
            wait_for_run(process)
        for number in range(runs):
            order = list(processes)[:: 1 if number % 2 else -1]
            for name in order:
                start_run(processes[name], number + 1)
                times[name].append(wait_for_run(processes[name]))
    finally:
        for process in processes.values():
            process.communicate()  # ends its input
    medians = {name: median(values) for name, values in times.items()}
    return {
        "row": row,
        **{f"{name}_s": round(value, 4) for name, value in medians.items()},
        "after_over_before": round(medians["after"] / medians["before"], 4),
        "runs": {name: [round(value, 4) for value in values] for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="folder that holds the package assay of the commit to compare with")
    parser.add_argument("--after", default="src")
    parser.add_argument("--rows", nargs="+", default=["engine-tiny", "engine-tiny-longtail", "step-tiny"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        Worker(args.worker, args.device).serve()
        return
    if not args.before:
        parser.error("--before is needed: the src folder of the commit to compare with")
    for row in args.rows:
        started_at = time.time()
        result = compare(row, {"before": args.before, "after": args.after}, args.runs, args.device)
        print(json.dumps(result | {"wall_s": round(time.time() - started_at, 1)}), flush=True)


if __name__ == "__main__":
    main()
