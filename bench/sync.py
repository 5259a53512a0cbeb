"""After how many steps a broken weight sync is detected, at the learning rate of a shipped config.

    python bench/sync.py configs/demo.toml --engines native assay --json bench/results/sync-cpu.json

Trains the config with its own engine. Besides, there is one more engine per name in --engines and dtype in --dtypes.
After each step it gets the weights with one defect after the other (tests/helpers/broken_sync.py), and without a
defect, and each time it is verified by fingerprint and by probe. The engines assay, vllm and sglang are real servers;
vllm needs --vllm.python, and sglang --sglang.python. The engine hf serves other models than the config's: without
--model, a random GPT-2 is trained. With --lora.rank, one defect is that adapters are not merged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "train")]

from broken_sync import KINDS, BrokenWeights  # noqa: E402
from small_run import gpt2_folder  # noqa: E402

from assay.bench.results import describe_machine, describe_versions  # noqa: E402
from assay.build.run import new_run  # noqa: E402
from assay.config import TrainConfig  # noqa: E402
from assay.config.settings import load_settings, parse_overrides  # noqa: E402
from assay.engine import Engine, make_engine  # noqa: E402
from assay.runs.console import Console  # noqa: E402
from assay.training.run import TrainingRun  # noqa: E402
from assay.training.sync import PROBE_PROMPTS, SyncError, WeightSync, probe_sequences  # noqa: E402

HEALTHY = "none"
METHODS = ("fingerprint", "probe")
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


def fast_products(device: torch.device) -> AbstractContextManager[Any]:
    return Bfloat16Products() if device.type == "cpu" else nullcontext()


class SharedScores(WeightSync):
    """All cases of an engine compare with the same scores of the trainer, which are computed once per step."""

    scores: dict[torch.dtype, tuple[np.ndarray, float]] = {}  # noqa: RUF012  of the current step, by dtype of the engine

    def _trainer_scores(self) -> tuple[np.ndarray, float]:
        dtype = self.engine.info.dtype
        if dtype not in self.scores:
            self.scores[dtype] = super()._trainer_scores()
        return self.scores[dtype]


@dataclass
class Case:
    """One defect of the weight sync, found by one method."""

    kind: str
    method: str
    weight_sync: WeightSync
    detected: int | None = None  # step
    error: str = ""
    gaps: list[float] = field(default_factory=list)  # in units of the limit
    seconds: list[float] = field(default_factory=list)

    def verify(self, step: int) -> None:
        started = time.perf_counter()
        try:
            metrics = self.weight_sync.verify(step)
            if "sync/probe_gap" in metrics:
                self.gaps.append(metrics["sync/probe_gap"] / metrics["sync/probe_limit"])
        except SyncError as error:
            self.detected, self.error = step, str(error)
        self.seconds.append(time.perf_counter() - started)

    def row(self) -> dict[str, Any]:
        row = {"defect": self.kind, "method": self.method, "detected_at_step": self.detected}
        largest = {"largest_gap_over_limit": round(max(self.gaps), 3)} if self.gaps else {}
        return row | largest | {"verify_s": round(median(self.seconds), 4), "error": self.error}


class TestedEngine:
    """An engine that gets the weights with one defect after the other."""

    def __init__(self, name: str, engine: Engine, run: TrainingRun, sequences: list[list[int]], kinds: list[str]):
        self.name, self.engine, self.run = name, engine, run
        self.sources: dict[str, BrokenWeights] = {}
        self.cases: list[Case] = []
        with fast_products(run.mesh.device):
            for kind in (HEALTHY, *kinds):
                for method in METHODS:
                    if method == "fingerprint" and not engine.info.capabilities.fingerprint:
                        continue
                    weight_sync = SharedScores(run.learner.updater, engine, method, sequences=sequences)  # type: ignore[arg-type]
                    self.cases.append(Case(kind, method, weight_sync))
            for method in METHODS:
                self._start([case.weight_sync for case in self.cases if case.method == method])

    @staticmethod
    def _start(syncs: list[WeightSync]) -> None:
        """All cases of a method start alike: one verifies the weights before training."""
        for other in syncs:
            if other is syncs[0]:
                other.verify(0)
            other.start, other.fingerprint = syncs[0].start, syncs[0].fingerprint

    def break_syncs(self, first: dict[str, Tensor]) -> None:
        """From now on, syncs are broken; `first`: a copy of the current weights."""
        policy = self.run.learner.policy
        kinds = {case.kind for case in self.cases} - {HEALTHY}
        self.sources = {kind: BrokenWeights(policy, kind, first=first) for kind in kinds}

    def sync(self, step: int) -> None:
        policy = self.run.learner.policy
        with fast_products(self.run.mesh.device):
            for kind in dict.fromkeys(case.kind for case in self.cases if case.detected is None):
                source = self.sources[kind].update(policy) if kind in self.sources else policy
                self.engine.update_weights(source, step)
                for case in self.cases:
                    if case.kind == kind and case.detected is None:
                        case.verify(step)

    def rows(self) -> list[dict[str, Any]]:
        dtype = str(self.engine.info.dtype).removeprefix("torch.")
        return [{"engine": self.name, "dtype": dtype} | case.row() for case in self.cases]


@contextmanager
def tested_engines(
    run: TrainingRun, names: list[str], dtypes: list[str], kinds: list[str]
) -> Iterator[list[TestedEngine]]:
    cfg, renderer, policy = run.cfg, run.collector.renderer, run.learner.policy
    prompts = renderer.all_prompt_ids(run.source.prompts.next(PROBE_PROMPTS))
    run.source.prompts.cursor = 0
    length = min(policy.max_length, run.collector.engine.info.max_length)
    sequences = probe_sequences(prompts, min(run.tokenizer.vocab_size, policy.vocab_size), length, cfg.seed)
    sections = {"assay": cfg.server, "vllm": cfg.vllm, "sglang": cfg.sglang}
    tested = []
    try:
        for name in names:
            for dtype in dtypes:
                own = {"settings": sections[name], "save_tokenizer": run.tokenizer.save} if name in sections else {}
                options = {"device": run.mesh.device, "dtype": getattr(torch, dtype), "max_length": length}
                engine = make_engine(name, policy, own, max_batch=4, kv_cache_gib=0.05, **options)
                tested.append(TestedEngine(name, engine, run, sequences, kinds))
        yield tested
    finally:
        for one in tested:
            one.engine.close()


def measure(cfg: TrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    run = new_run(cfg, Console())
    times = []
    kinds = [kind for kind in options.defects if kind != "unmerged" or cfg.lora.rank]
    with run.active():
        run.begin()
        policy = run.learner.policy
        with tested_engines(run, options.engines, options.dtypes, kinds) as engines:
            while not run.done() and run.state.step < options.limit:
                if run.state.step == options.begin:
                    first = BrokenWeights.copy(policy)
                    for one in engines:
                        one.break_syncs(first)
                started = time.perf_counter()
                sampled = run.source.next(run.state)
                run.learner.credit(sampled.groups)
                run.learner.update(sampled.groups, run.state)
                run.sync()
                times.append(time.perf_counter() - started)
                SharedScores.scores.clear()
                for one in engines:
                    one.sync(run.state.step)
                found = sum(case.detected is not None for one in engines for case in one.cases)
                print(f"step {run.state.step}: {found} detected", flush=True)
        rows = [row for one in engines for row in one.rows()]
    return {
        "model": cfg.model.source,
        "parameters": sum(weight.numel() for weight in policy.parameters()),
        "lora_rank": cfg.lora.rank,
        "lr": cfg.optim.lr,
        "broken_after_step": options.begin,
        "steps": run.state.step,
        "step_s": round(median(times), 3),
        "cases": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--engines", nargs="+", default=["native"], choices=["native", "hf", "assay", "vllm", "sglang"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--defects", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--begin", type=int, default=0, help="number of healthy syncs before the defect")
    parser.add_argument("--limit", type=int, default=25, help="number of steps; the schedule is that of the config")
    parser.add_argument("--json", type=Path, help="file to which the result is added")
    options, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = {**parse_overrides(words), "runs_dir": folder}
        if "hf" in options.engines and "model" not in overrides:
            torch.manual_seed(0)
            overrides["model"] = str(gpt2_folder(Path(folder) / "gpt2"))
        cfg = load_settings(TrainConfig, options.config, overrides)
        row = {"config": options.config, "command": shlex.join(["python", *sys.argv])} | measure(cfg, options)
    for case in row["cases"]:
        keys = ("engine", "dtype", "method", "defect", "detected_at_step", "largest_gap_over_limit", "verify_s")
        print(*(f"{case.get(key, '')!s:>12}" for key in keys))
    if options.json is not None:
        content: dict[str, Any] = {"machine": describe_machine(), "versions": describe_versions(), "rows": []}
        if options.json.exists():
            content["rows"] = json.loads(options.json.read_text())["rows"]
        content["rows"].append(row)
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
