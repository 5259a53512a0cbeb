"""The workflow of each seed project: the commands of its section in docs/evidence/five-projects.md, run in order.

The commands run as a user types them, those of assay in this process, in a folder where small models and a few
problems have the names of the real ones, and where the recipe's config has small sizes. Only the numbers in `NUMBERS`
are replaced.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_parts import BLOCK, ROOT
from safetensors.torch import load_file
from small_run import preset_folder

from assay.cli.main import main
from assay.config import TrainConfig
from assay.config.settings import load_settings, to_toml
from assay.rewards.expressions import calculate
from assay.runs.rollouts import read_lines, read_rollouts
from assay.text import char_tokenizer
from assay.training.sources import ReplayBuffer
from assay.types import Rollout
from tests.test_seed_recipes import gsm8k_rows

pytestmark = pytest.mark.slow  # test_docs.py parses the commands, without running them

NEEDS_A_SERVER = re.compile(r"--engine (vllm|sglang)")  # tests/real_vllm and tests/real_sglang use real servers
NUMBERS = {
    r"nproc_per_node=\d+": "nproc_per_node=2",
    "step-000100": "step-000001",
    "test500": "test9",
    "simple@60": "simple@1",
    "--train.steps 30": "--train.steps 4",
    "--train.steps 60": "--train.steps 2",
    "--train.epochs 3": "--train.steps 1",
    r"--sft.steps \d+": "--sft.steps 60",
}
SMALL: dict[str, object] = {  # the models are taught the form of the answers first
    "device": "cpu",
    "sft": {"steps": 60, "batch": 16, "lr": 1e-2},
    "train.epochs": 0,
    "train.steps": 2,
    "train.prompts": 4,
    "train.samples": 4,
    "eval.examples": 4,
    "eval.final_examples": 4,
    "reward.workers": 0,
}
SIZES: dict[str, dict[str, object]] = {
    "tapes": {"train.steps": 1, "sampling.max_new_tokens": 36, "eval.every": 1, "optim.lr": 1e-2},
    "single_file": {"sft.steps": 0, "sampling.max_new_tokens": 16, "train.samples": 2, "optim.lr": 1e-3},
    "dr_grpo": {"prompt.template": "{question}", "sampling.max_new_tokens": 24, "eval.max_new_tokens": 24},
    "gym_reinforce": {
        **{"prompt.few_shot": 0, "prompt.system": "", "sampling.max_new_tokens": 48, "eval.max_new_tokens": 48},
        **{"train.prompts": 12, "train.samples": 1, "replay.groups": 6, "eval.examples": 2, "save.keep": 9},
        "optim.lr": 1e-4,
    },
    "simple": {"sft.steps": 0, "sampling.max_new_tokens": 24, "train.prompts": 3, "train.samples": 6, "save.every": 1},
}


class Workflow:
    """A folder with everything that the commands of a section name, and the runs that they leave there."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
        self.folder, self.runs, self.patch, self.capsys = folder, folder / "runs", patch, capsys
        _, _, rest = (ROOT / "docs" / "evidence" / "five-projects.md").read_text().partition(f"\n## {name}\n")
        self.blocks = BLOCK.findall(rest.partition("\n## ")[0])
        self.lines = [line for kind, code in self.blocks if kind == "bash" for line in code.splitlines()]
        cfg = load_settings(TrainConfig, ROOT / "configs" / "seeds" / f"{name}.toml", SMALL | SIZES[name])
        self.write(f"configs/seeds/{name}.toml", to_toml(cfg))
        for code in (code for kind, code in self.blocks if kind == "python"):
            self.write(code.split()[1], code)  # "# name.py" is its first line
        gsm8k_rows(folder / "openai" / "gsm8k")
        (folder / "examples").symlink_to(ROOT / "examples")

    def line(self, start: str) -> str:
        """The only command that starts with this text, without its comment."""
        (found,) = [line for line in self.lines if line.startswith(start)]
        return found.partition(" #")[0]

    def write(self, file: str, text: str) -> None:
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / file).write_text(text)

    def model(self, name: str, preset: str = "nano") -> None:
        preset_folder(self.folder / name, context=1024, seed=len(name), preset=preset)

    def __call__(self, typed: str = "") -> str:
        """Run the commands, with this text as standard input. Returns what they print."""
        script = "\n".join(line for line in self.lines if not NEEDS_A_SERVER.search(line)).replace("\\\n", " ")
        for number, small in NUMBERS.items():
            script = re.sub(number, small, script)
        self.patch.setattr(sys, "stdin", io.StringIO(typed))
        printed = ""
        for words in (shlex.split(line, comments=True) for line in script.splitlines()):
            if words[0] == "assay":
                code = main(words[1:])
                shown = self.capsys.readouterr()
                printed += shown.out
                assert code == 0, f"{words}\n{shown.out}\n{shown.err}"[-3000:]
            else:  # python or torchrun
                command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
                done = subprocess.run(
                    command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
        return printed

    def rollouts(self, run: str, *steps: int) -> list[Rollout]:
        groups = [group for step in steps for group in read_rollouts(self.runs / run, step)]
        return [rollout for group in groups for rollout in group.rollouts]

    def metrics(self, run: str, key: str) -> list[Any]:
        lines = [json.loads(line) for line in (self.runs / run / "metrics.jsonl").read_text().splitlines()]
        return [line[key] for line in lines if key in line]

    def weights(self, run: str, step: int, part: str = "model/model") -> dict[str, torch.Tensor]:
        return load_file(self.runs / run / "checkpoints" / f"step-{step:06d}" / f"{part}.safetensors")


@pytest.fixture
def workflow_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_curves: None
) -> Callable[[str], Workflow]:
    monkeypatch.chdir(tmp_path)
    return partial(Workflow, tmp_path, monkeypatch, capsys)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def group_means_are_subtracted(run: Path, step: int) -> bool:
    for group in read_rollouts(run, step):
        mean = sum(group.rewards) / len(group.rewards)
        assert [r.advantage for r in group.rollouts] == pytest.approx([reward - mean for reward in group.rewards])
    return True


def test_tapes(tmp_path: Path, workflow_of: Callable[[str], Workflow]) -> None:
    workflow = workflow_of("tapes")
    workflow.model("meta-llama/Llama-3.2-1B-Instruct")
    workflow.model("meta-llama/Llama-3.1-8B-Instruct", "tiny")  # the reference: larger, with the same tokenizer
    printed = workflow()
    assert names(workflow.runs) == ["tapes", "tapes-2", "tapes-3"]  # the last one on two processes, as one run
    tapes = workflow.rollouts("tapes", 1)
    assert len(tapes) == 4 * 4 and all(tape.prompt.id.startswith("gsm8k/train/") for tape in tapes)
    assert all(len(tape.engine_logprobs) == len(tape.token_ids) == len(tape.loss_mask) for tape in tapes)
    rewards = {"ok": 1, "wrong": 0, "no_answer": -1, "unparsable": -1}
    assert all(tape.verdict and tape.reward == rewards[tape.verdict.status] for tape in tapes)
    assert len({tape.reward for tape in tapes}) > 1
    for run in names(workflow.runs):  # the reference is another model, so the KL term is not zero
        assert workflow.metrics(run, "policy/kl")[0] > 0 and workflow.metrics(run, "optim/grad_norm")[0] > 0
    assert len(read_lines(workflow.runs / "tapes", 1, "eval", "eval-test")) == 4  # periodic, on the test split
    judged = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert [row["verdict"]["reward"] for row in judged] == [tape.reward for tape in tapes]
    assert json.loads((workflow.runs / "tapes-2" / "summary.json").read_text())["algorithm"] == "reinforce"
    assert printed.count("6 and 2?") == 1 and "\\boxed{" in printed.partition("6 and 2?")[2]  # test question 3


def test_single_file(workflow_of: Callable[[str], Workflow]) -> None:
    workflow = workflow_of("single_file")
    workflow.model("Qwen/Qwen2.5-3B-Instruct")
    workflow.model("Qwen/Qwen2.5-3B")
    rows = [{"messages": [{"role": "user", "content": f"Reach {n + 2}."}], "nums": [n, 2]} for n in range(1, 41)]
    workflow.write("countdown.jsonl", "".join(json.dumps({**row, "target": row["nums"][0] + 2}) + "\n" for row in rows))
    workflow()
    assert names(workflow.runs) == ["single_file", "single_file-2", "single_file-3"]
    shards = workflow.runs / "single_file" / "checkpoints" / "step-000002" / "optimizer"
    assert len(list(shards.iterdir())) == 2  # of two tensor-parallel processes
    for run in names(workflow.runs):
        first = workflow.rollouts(run, 1)[0]
        asked = char_tokenizer().decode(first.turns[0].context_ids)
        nums, target = first.prompt.fields["nums"], first.prompt.fields["target"]
        assert f"Make {target} from the numbers {nums}" in asked and asked.endswith("Step by step:\n<think>")
        entropy, bonus = workflow.metrics(run, "policy/entropy"), workflow.metrics(run, "loss/entropy")
        assert bonus == pytest.approx([-0.001 * nats for nats in entropy], rel=1e-3)
        assert all(norm > 0 for norm in workflow.metrics(run, "optim/grad_norm"))
    assert {rollout.reward for rollout in workflow.rollouts("single_file-2", 1)} == {0.01}  # all alike: only the bonus
    assert {rollout.reward for rollout in workflow.rollouts("single_file-3", 1)} == {0.0}  # of my_reward.py


def test_dr_grpo(tmp_path: Path, workflow_of: Callable[[str], Workflow]) -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    workflow, tokenizer, old = workflow_of("dr_grpo"), char_tokenizer(), "EleutherAI/gpt-neo-2.7B"
    workflow.model("Qwen/Qwen2.5-3B-Instruct")
    workflow.model("Qwen/Qwen2.5-7B-Instruct", "tiny")
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    config = GPTNeoConfig(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_ids[0], **sizes)
    GPTNeoForCausalLM(config).save_pretrained(tmp_path / old)
    tokenizer.save(tmp_path / old)
    printed = workflow("4 and 2?\n")
    assert len((tmp_path / "data" / "gsm8k-hash" / "test9.jsonl").read_text().splitlines()) == 9
    assert names(workflow.runs) == ["dr_grpo", "slurm"]  # the folder for logs
    for step in (1, 2):
        assert group_means_are_subtracted(workflow.runs / "dr_grpo", step)
    for verdict in (rollout.verdict for rollout in workflow.rollouts("dr_grpo", 1, 2)):
        accuracy, form, brief = (verdict.parts[part] for part in ("accuracy", "format", "length"))
        assert verdict.reward == pytest.approx(accuracy + 0.4 * form - 0.5 * brief) and accuracy in (-1, 1)
    assert any(workflow.metrics("dr_grpo", "optim/grad_norm"))
    assert subprocess.run(["bash", "-n", "dr_grpo.sbatch"], cwd=tmp_path).returncode == 0
    evaluated = [line.split()[0] for line in printed.splitlines() if " % to " in line]  # rows of both tables
    trained = "run:dr_grpo@last"
    assert evaluated == ["Qwen/Qwen2.5-7B-Instruct", old, "Qwen/Qwen2.5-3B-Instruct", trained]
    answer = printed.partition(f"[{trained}]")[2]  # of the chat: the trained model answers in the form
    assert "####" in answer


def test_gym_reinforce(workflow_of: Callable[[str], Workflow]) -> None:
    workflow, run = workflow_of("gym_reinforce"), "gym_reinforce"
    workflow.model("meta-llama/Llama-3.2-1B-Instruct")
    for split, numbers in (("train", range(1, 7)), ("test", range(7, 9))):
        sums = [(a, b) for a in numbers for b in range(1, 7)]
        rows = [{"problem": f"What is ${a}+{b}$?", "solution": f"{a}+{b}=\\boxed{{{a + b}}}"} for a, b in sums]
        workflow.write(f"data/math/{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    printed = workflow("It is <<2+3=\n#### 5\n")
    assert "5>>" in printed  # of the calculator, for the player of the environment
    played = workflow.rollouts(run, 1, 2, 3, 4)
    assert all(rollout.prompt.id.startswith("gsm8k/train/") for rollout in played)  # never the test split
    assert any("\n" in turn.text for rollout in played for turn in rollout.turns[:-1])  # lines are steps
    assert any(turn.context_ids for rollout in played for turn in rollout.turns[1:])  # and the calculator answers
    for rollout in played:  # the discounted return itself, and no baseline
        last = len(rollout.turns) - 1
        discounts = [0.997 ** (last - i) for i, turn in enumerate(rollout.turns) for _ in turn.completion.token_ids]
        assert rollout.token_advantages == pytest.approx([rollout.reward * discount for discount in discounts])
    assert workflow.metrics(run, "replay/size") == [0, 12, 24, 36]  # steps 3 and 4 after --resume
    assert workflow.metrics(run, "replay/share") == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])

    def optimizer_steps(step: int) -> set[float]:
        moments = workflow.weights(run, step, "optimizer")
        return {float(value) for name, value in moments.items() if name.endswith("|step")}

    # Mini-batches of 6 episodes: the first batch has 12, later ones 18 with those replayed.
    updates, skipped = workflow.metrics(run, "optim/updates"), workflow.metrics(run, "optim/skipped")
    assert updates == [2, 3, 3, 3] and workflow.metrics(run, "optim/non_finite") == [0] * 4
    totals = accumulate(made - left_out for made, left_out in zip(updates, skipped, strict=True))
    assert [optimizer_steps(step) for step in range(1, 5)] == [{total} - {0} for total in totals]

    def same(one: tuple[int, str], other: tuple[int, str]) -> bool:
        left, right = (workflow.weights(run, step, f"{part}/model") for step, part in (one, other))
        return all(left[name].equal(right[name]) for name in left)

    assert same((1, "reference"), (0, "model"))
    assert same((2, "reference"), (2, "model")) and same((3, "reference"), (2, "model"))  # refreshed every other step
    assert same((4, "reference"), (4, "model")) and not same((4, "model"), (2, "model"))

    actions = workflow.rollouts("math_loop", 1)
    asked = char_tokenizer().decode(actions[-1].turns[0].context_ids)
    assert len(actions) >= 12 and all(len(action.turns) == 1 for action in actions)
    assert "the sum of $3$ and $4$" in asked  # the example that the policy of the program adds
    sampled = sum(len(workflow.rollouts(name, 1, 2)) for name in ("math_loop", "math_loop-2"))
    assert len(ReplayBuffer.load(workflow.runs / "math_buffer")) == sampled  # the second run started with the first's


def test_simple(workflow_of: Callable[[str], Workflow]) -> None:
    workflow = workflow_of("simple")
    for name in ("my-base-model", "Qwen/Qwen2.5-0.5B-Instruct"):
        workflow.model(name)
    printed = workflow()
    assert names(workflow.runs) == ["abacus-chat", "chat", "my-rl-run", "simple", "simple-2", "simple-3"]
    assert group_means_are_subtracted(workflow.runs / "simple", 1)
    rollouts = workflow.rollouts("simple", 1)
    assert any(turn.context_ids for rollout in rollouts for turn in rollout.turns[1:])  # the calculator was called,
    assert all(sum(r.loss_mask) == r.length <= len(r.token_ids) for r in rollouts)  # and its output is not trained on
    for run in ("simple", "my-rl-run"):  # linear to 0
        lr, steps = workflow.metrics(run, "optim/lr"), len(workflow.metrics(run, "optim/lr"))
        assert lr == pytest.approx([0.05 * 0.004 * (1 - step / steps) for step in range(steps)])
    assert all(workflow.metrics("simple", f"eval/pass@{k}") for k in range(1, 9))
    moments = workflow.weights("simple", 2, "optimizer")
    assert any("momentum" in name for name in moments) and any("exp_avg" in name for name in moments)  # Muon and AdamW
    chat = printed.partition("[run:simple@1]")[2].partition("simple-2")[0]
    calls = re.findall(r"<<([^<>=]+)=([^<>]+)>>", chat)
    assert calls and all(calculate(expression) == calculate(value) for expression, value in calls)
