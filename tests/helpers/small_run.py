"""Helpers for whole runs that take about a second: a nano model, a few problems, and a reward that varies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from assay.cli.main import main
from assay.models import build_preset, fingerprint, load_model, save_model
from assay.runs import checkpoints
from assay.runs.rollouts import read_rollouts
from assay.text import Tokenizer, char_tokenizer, word_tokenizer

# Random models solve nothing. This reward depends on the letters, so that rewards differ within every group.
REWARD = """
def reward(completion, answer):
    return {"reward": sum(map(ord, completion)) % 4 / 3, "parsed": completion}

def raises(completion, answer):
    raise ZeroDivisionError("cannot judge")

def not_a_number(completion, answer):
    return float("nan")
"""

CONFIG = """
model = "preset:nano"
device = "cpu"
[task]
name = "abacus"
args = {{train_size = 24, eval_size = 10}}
[sampling]
max_new_tokens = 8
[train]
steps = 2
prompts = 3
samples = 3
[optim]
lr = 1e-3
[eval]
examples = 4
final_examples = 5
[reward]
workers = 0
function = "{folder}/reward.py:reward"
"""


class SmallRuns:
    """Runs `assay` in this process, in a folder for its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.config = folder / "small.toml"
        (folder / "reward.py").write_text(REWARD)
        self.config.write_text(CONFIG.format(folder=folder))

    def train(self, *words: object, config: object = None) -> int:
        return self("train", config or self.config, *words)

    def __call__(self, command: str, *words: object) -> int:
        return main([command, *map(str, words), "--runs_dir", str(self.runs)])

    def resume(self, name: str, *words: object) -> int:
        return self("train", "--resume", name, *words)

    def summary(self, name: str = "small") -> dict[str, Any]:
        return json.loads((self.runs / name / "summary.json").read_text())

    def lose_summary(self, name: str = "small") -> None:
        """Leave the run as if its process had died before it wrote its summary."""
        (self.runs / name / "summary.json").unlink()

    def metrics(self, name: str = "small") -> list[dict[str, Any]]:
        lines = (self.runs / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def last_metrics(self, name: str = "small") -> dict[str, Any]:
        """Of the last step of a run in progress; empty if there is none yet."""
        with suppress(OSError, IndexError, ValueError):
            return json.loads((self.runs / name / "metrics.jsonl").read_text().splitlines()[-1])
        return {}

    def timeless(self, name: str = "small") -> list[dict[str, Any]]:
        """Metrics without times and memory, which are equal for runs with the same seed."""
        changing = ("time/", "memory/")
        return [{k: v for k, v in row.items() if not k.startswith(changing)} for row in self.metrics(name)]

    def timeless_summary(self, name: str = "small") -> dict[str, Any]:
        """The summary without times, and without what other processes on the machine can cause."""
        summary = {k: v for k, v in self.summary(name).items() if k not in ("run", "wall_s", "train_s", "sft")}
        of_the_machine = ("memory_full", "slow", "starving")
        causes = [cause for cause in summary.pop("diagnosis", ()) if cause["name"] not in of_the_machine]
        return summary | {"diagnosis": causes}

    def checkpoint(self, step: int, name: str = "small") -> Path:
        return self.runs / name / "checkpoints" / f"step-{step:06d}"

    def same_run(self, one: str, other: str, steps: int) -> None:
        """Assert that weights, optimizer state, metrics, rollouts and results of two runs are equal."""
        first, second = (self.checkpoint(steps, name) for name in (one, other))
        parts = ["model/model.safetensors", "optimizer.safetensors"]
        parts += ["critic.safetensors"] if (first / "critic.safetensors").exists() else []
        for part in parts:
            left, right = load_file(first / part), load_file(second / part)
            assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)
        left_model, right_model = (load_model(str(folder / "model")) for folder in (first, second))
        assert fingerprint(left_model.weights()) == fingerprint(right_model.weights())
        assert self.timeless(one) == self.timeless(other)
        assert sum(row.get("optim/grad_norm", 0) > 0 for row in self.metrics(one)) > 1  # both runs have trained
        for step in range(1, steps + 1):
            assert read_rollouts(self.runs / one, step) == read_rollouts(self.runs / other, step)
        for folder in ("rollouts", "evals"):
            files = [{file.name for file in (self.runs / name / folder).iterdir()} for name in (one, other)]
            assert files[0] == files[1]
        for file in (self.runs / one / "evals").iterdir():
            assert file.read_bytes() == (self.runs / other / "evals" / file.name).read_bytes()
        assert self.timeless_summary(one) == self.timeless_summary(other)
        assert checkpoints.read_best(self.runs / one) == checkpoints.read_best(self.runs / other)
        assert checkpoints.steps(self.runs / one) == checkpoints.steps(self.runs / other)

    def process(self, *words: object) -> subprocess.Popen[str]:
        """Start the command line in another process."""
        return self._start(["-m", "assay"], words)

    def launch(self, count: int, *words: object) -> subprocess.Popen[str]:
        """Start the command line on several processes with torchrun."""
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        return self._start([*run, "-m", "assay"], words)

    def _start(self, program: list[str], words: Iterable[object]) -> subprocess.Popen[str]:
        command = [sys.executable, *program, *map(str, words), "--runs_dir", str(self.runs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=self.folder
        )

    def files(self) -> dict[str, bytes]:
        """The content of all files, by path."""
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}


def mostly_slow(cases: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters of a test of whole runs: all of them are slow but the `quick` ones."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def inject(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, action: Callable[[], None]) -> None:
    """Run `action` at the beginning of the `call`th call (from 1) of the function `name` of a module or class."""
    original, calls = getattr(owner, name), []

    def injected(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            action()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, injected)


def preset_folder(
    folder: Path, tokenizer: Tokenizer | None = None, context: int = 64, seed: int = 0, preset: str = "nano"
) -> Path:
    """A random model of a preset with a tokenizer, by default of characters, as `assay export` writes it."""
    tokenizer = tokenizer or char_tokenizer()
    model = build_preset(preset, tokenizer.vocab_size, context, seed)
    save_model(model, folder, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    tokenizer.save(folder)
    return folder


def gpt2_folder(folder: Path, chat: bool = True) -> Path:
    """A random GPT-2 with a tokenizer of abacus words, as transformers saves them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = word_tokenizer(abacus_words())
    if not chat:
        tokenizer.hf.chat_template = None
    sizes = {"vocab_size": tokenizer.vocab_size, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96}
    config = GPT2Config(**sizes, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def llama_folder(folder: Path, hidden: int, words: list[str], padding: int = 0, positions: int = 512) -> Path:
    """A random model as transformers saves it, with a tokenizer of these words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = word_tokenizer(words)
    torch.manual_seed(hidden)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": hidden // 16}
    sizes |= {"vocab_size": tokenizer.vocab_size + padding, "max_position_embeddings": positions}
    config = LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3, eos_token_id=tokenizer.eos_id)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def abacus_words() -> list[str]:
    from assay.tasks import make_task

    return list(make_task("abacus").words())  # type: ignore[attr-defined]
