"""After how many steps a broken weight sync is detected, at the learning rate of a shipped config.

    python bench/sync.py configs/demo.toml --json bench/results/sync-cpu.json

Trains the config. Besides the engine of the run there is one more engine per defect, dtype and method of verification,
whose weight updates are broken in that way (tests/broken_sync.py), and healthy ones that must not be reported. All of
them get the weights of every step. With --lora.rank, one defect is that adapters are not merged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from broken_sync import KINDS, break_sync  # noqa: E402

from assay.bench.results import describe_machine, describe_versions  # noqa: E402
from assay.config import TrainConfig  # noqa: E402
from assay.config.settings import load_settings, parse_overrides  # noqa: E402
from assay.engine import make_engine  # noqa: E402
from assay.runs.console import Console  # noqa: E402
from assay.train.build import new_run  # noqa: E402
from assay.train.run import TrainingRun  # noqa: E402
from assay.train.sync import PROBE_PROMPTS, SyncError, WeightSync, probe_sequences  # noqa: E402

HEALTHY = "none"
PRODUCTS = {F.linear, F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm, torch.Tensor.addmm_}


class Bfloat16Products(TorchFunctionMode):
    """Computes products of bfloat16 tensors in float32 and rounds the result, as GPUs do.

    PyTorch does the same on CPUs that support bfloat16; on others it is a hundred times slower.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return function(*args, **kwargs)
        exact = [one.float() if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
        result = function(*exact, **kwargs)
        return args[0].copy_(result) if function is torch.Tensor.addmm_ else result.bfloat16()


@dataclass
class Case:
    """One engine with one defect."""

    kind: str
    dtype: str
    method: str
    weight_sync: WeightSync
    detected: int | None = None  # step
    error: str = ""
    gaps: list[float] = field(default_factory=list)  # in units of the limit
    seconds: list[float] = field(default_factory=list)

    def sync(self, step: int) -> None:
        if self.detected is not None:
            return
        weight_sync = self.weight_sync
        weight_sync.engine.update_weights(weight_sync.updater.policy, step)
        started = time.perf_counter()
        try:
            with Bfloat16Products() if weight_sync.mesh.device.type == "cpu" else nullcontext():
                metrics = weight_sync.verify(step)
            if "sync/probe_gap" in metrics:
                self.gaps.append(metrics["sync/probe_gap"] / metrics["sync/probe_limit"])
        except SyncError as error:
            self.detected, self.error = step, str(error)
        self.seconds.append(time.perf_counter() - started)

    def row(self) -> dict[str, Any]:
        row = {"defect": self.kind, "dtype": self.dtype, "method": self.method, "detected_at_step": self.detected}
        largest = {"largest_gap_over_limit": round(max(self.gaps), 3)} if self.gaps else {}
        return row | largest | {"verify_s": round(median(self.seconds), 4), "error": self.error}


def make_cases(run: TrainingRun, dtypes: list[str], kinds: list[str]) -> list[Case]:
    learner, renderer = run.learner, run.collector.renderer
    policy, cases = learner.policy, []
    prompts = renderer.all_prompt_ids(run.source.prompts.next(PROBE_PROMPTS))
    run.source.prompts.cursor = 0
    length = min(policy.max_length, run.collector.engine.info.max_length)
    sequences = probe_sequences(prompts, min(run.tokenizer.vocab_size, policy.vocab_size), length, run.cfg.seed)
    for dtype in dtypes:
        for kind in (HEALTHY, *kinds):
            if kind == "unmerged" and policy.lora is None:
                continue
            for method in ("fingerprint", "probe"):
                options = {"device": run.mesh.device, "dtype": getattr(torch, dtype), "max_batch": 1}
                engine = make_engine("auto", policy, max_length=length, memory=0.05, **options)
                weight_sync = WeightSync(learner.updater, engine, method, sequences=sequences)  # type: ignore[arg-type]
                with Bfloat16Products() if run.mesh.device.type == "cpu" else nullcontext():
                    weight_sync.verify(0)
                if kind != HEALTHY:
                    break_sync(engine, policy, kind)
                cases.append(Case(kind, dtype, method, weight_sync))
    return cases


def measure(cfg: TrainConfig, dtypes: list[str], kinds: list[str], limit: int) -> dict[str, Any]:
    run = new_run(cfg, Console())
    times = []
    with run.active():
        run.begin()
        cases = make_cases(run, dtypes, kinds)
        while not run.done() and run.state.step < limit:
            started = time.perf_counter()
            sampled = run.source.next(run.state)
            metrics = run.learner.credit(sampled.groups)
            metrics |= run.learner.update(sampled.groups, run.state)
            metrics |= run.sync()
            times.append(time.perf_counter() - started)
            for case in cases:
                case.sync(run.state.step)
            print(f"step {run.state.step}:", sum(case.detected is not None for case in cases), "detected", flush=True)
    return {
        "model": cfg.model.source,
        "parameters": sum(weight.numel() for weight in run.learner.policy.parameters()),
        "lora_rank": cfg.lora.rank,
        "lr": cfg.optim.lr,
        "steps": run.state.step,
        "step_s": round(median(times), 3),
        "cases": [case.row() for case in cases],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--defects", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--limit", type=int, default=30, help="number of steps; the schedule is that of the config")
    parser.add_argument("--json", type=Path, help="file to which the result is added")
    options, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        cfg = load_settings(TrainConfig, options.config, {**parse_overrides(words), "runs_dir": folder})
        row = {"config": options.config, "command": shlex.join(["python", *sys.argv])} | measure(
            cfg, options.dtypes, options.defects, options.limit
        )
    for case in row["cases"]:
        print(*(f"{case[key]!s:>12}" for key in ("dtype", "method", "defect", "detected_at_step", "verify_s")))
    if options.json is not None:
        content = {"machine": describe_machine(), "versions": describe_versions(), "rows": []}
        if options.json.exists():
            content["rows"] = json.loads(options.json.read_text())["rows"]
        content["rows"].append(row)
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
