"""The five seed recipes (configs/seeds): each config is loaded, and a small run checks what is specific to it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stub_endpoint import stub_endpoint

from assay.algos import LossBatch
from assay.cli.main import main
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.models import build_preset, save_model
from assay.process.spawn import RemoteWorker
from assay.runs.rollouts import read_lines, read_rollouts
from assay.tasks import make_task
from assay.tasks.judging import build_judge
from assay.text import char_tokenizer
from assay.train import run
from assay.train.components import build_algorithm, build_problems, build_renderer
from assay.train.learner.subprocess_updater import SubprocessUpdater
from assay.train.sources import ReplayBuffer
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

ROOT = Path(__file__).resolve().parent.parent
SEEDS = ("tapes", "single_file", "dr_grpo", "gym_reinforce", "simple")
SMALL: dict[str, object] = {  # a nano model that spells, taught the form of the answers first
    "device": "cpu",
    "model": "preset:nano",
    "model.tokenizer": "characters",
    "sft.steps": 60,
    "sft.batch": 16,
    "sft.lr": 1e-2,
    "train.epochs": 0,
    "train.steps": 2,
    "train.prompts": 4,
    "train.samples": 4,
    "eval.examples": 4,
    "eval.final_examples": 4,
    "reward.workers": 0,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, which is fastest for tiny models, and no curves.png."""
    monkeypatch.setattr(run, "draw_curves", lambda path: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(folder: Path) -> Path:
    """Problems in the format of GSM8K that can be learned in a few seconds; one gold answer has a comma."""
    sums = [(a, b) for a in range(1, 7) for b in range(1, 7)]
    worked = [(f"{a} and {b}?", f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}") for a, b in sums]
    parts = {"train": worked[:28], "test": [*worked[28:], ("A dozen hundreds?", "12*100=1200\n#### 1,200")]}
    (folder / "gsm8k").mkdir()
    for split, part in parts.items():
        lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in part]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(lines))
    return folder / "gsm8k"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return rows(tmp_path)


class Seed:
    """A small run of a recipe: its config with overrides, as on the command line."""

    def __init__(self, recipe: str, folder: Path, **words: object) -> None:
        self.recipe, self.path = recipe, folder / "runs" / recipe
        self.words = SMALL | {"runs_dir": folder / "runs"} | words

    def __call__(self, command: str = "train", **more: object) -> int:
        words = [f"--{key}={value}" for key, value in (self.words | more).items()]
        return main([command, str(ROOT / "configs" / "seeds" / f"{self.recipe}.toml"), *words])

    def rollouts(self, step: int) -> list[Rollout]:
        return [rollout for group in read_rollouts(self.path, step) for rollout in group.rollouts]

    def metrics(self, key: str) -> list[Any]:
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return [row[key] for row in rows if key in row]


def settings(name: str, **changes: object) -> TrainConfig:
    return load_settings(TrainConfig, ROOT / "configs" / "seeds" / f"{name}.toml", changes)


def test_there_is_one_config_per_seed_recipe() -> None:
    assert {file.stem for file in (ROOT / "configs" / "seeds").glob("*.toml")} == set(SEEDS)


@pytest.mark.parametrize("name", SEEDS)
def test_seed_recipes_load_and_judge_gold_answers_as_correct(name: str, data: Path) -> None:
    cfg = settings(name, **({} if name == "single_file" else {"task.path": str(data)}))
    build_algorithm(cfg)
    problems = build_problems(cfg.task, cfg.env)
    judge = build_judge(cfg.reward, problems)
    for prompt in problems.prompts("test")[:9]:  # gold answers score full, the one with a comma too
        verdict = judge(problems.gold_completion(prompt), prompt.answer, prompt.fields)
        assert verdict.status is Status.OK and verdict.parts["accuracy"] == cfg.reward.correct


def verdicts(name: str, texts: list[str], prompt: dict[str, Any]) -> list[tuple[float, str]]:
    """(reward, status) of each text by the judge of a recipe."""
    cfg = settings(name)
    judge = build_judge(cfg.reward, make_task(cfg.task.name, path=None, **cfg.task.args))
    found = [judge(text, prompt["answer"], prompt.get("fields", {})) for text in texts]
    return [(round(verdict.reward, 6), str(verdict.status)) for verdict in found]


def test_tapes_judges_strictly() -> None:
    found = verdicts("tapes", ["\\boxed{1,200}", "\\boxed{7}", "it is 1200", "\\boxed{"], {"answer": "1200"})
    assert found == [(1, "ok"), (0, "wrong"), (-1, "no_answer"), (-1, "unparsable")]


@pytest.mark.slow
def test_tapes_trains_in_a_separate_process_with_a_larger_reference(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, larger = char_tokenizer(), tmp_path / "larger"
    save_model(build_preset("tiny", tokenizer.vocab_size, 512, seed=5), larger)
    tokenizer.save(larger)
    started: list[RemoteWorker] = []
    start = SubprocessUpdater._next_worker
    monkeypatch.setattr(SubprocessUpdater, "_next_worker", lambda self: started.append(start(self)) or started[-1])
    words = {"sft.steps": 0, "train.steps": 1, "sampling.max_new_tokens": 12, "eval.every": 1}
    seed = Seed("tapes", tmp_path, **words, **{"task.path": data, "algo.reference": larger, "optim.lr": 1e-2})
    assert seed() == 0
    assert len(started) == 1 and started[0].process.pid != os.getpid() and not started[0].running
    assert seed.metrics("policy/kl")[0] > 0 and seed.metrics("optim/grad_norm")[0] > 0  # it is another model
    tapes = seed.rollouts(1)
    assert len(tapes) == 4 * 4 and all(tape.prompt.id.startswith("gsm8k/train/") for tape in tapes)
    assert all(len(tape.engine_logprobs) == len(tape.token_ids) == len(tape.loss_mask) for tape in tapes)
    assert {tape.reward for tape in tapes} == {-1.0}  # untaught, it has nothing to say that could be read
    assert len(read_lines(seed.path, 1, "eval", "eval-test")) == 4  # the test split is measured on the way
    capsys.readouterr()
    out = tmp_path / "judged.jsonl"
    lines = seed.path / "rollouts" / "step-000001.jsonl"
    assert main(["score", str(lines), "--task", "gsm8k", "--unparsable", "-1", "--out", str(out)]) == 0
    assert [json.loads(line)["verdict"]["reward"] for line in out.read_text().splitlines()] == [-1.0] * 16


def test_tapes_with_reinforce_keeps_group_normalised_advantages_and_limits_the_kl() -> None:
    algo = build_algorithm(settings("tapes", **{"algo.recipe": "reinforce"}))
    assert (algo.settings.policy_loss, algo.settings.advantage, algo.settings.aggregate) == (
        "reinforce",
        "group_norm",
        "token",
    )
    group = Group(Prompt("p", ()), [rollout(reward) for reward in (1.0, 0.0, -1.0, 0.0)])
    algo.credit([group])
    spread = (2 / 3) ** 0.5 + 1e-4  # of 1, 0, -1, 0
    assert [r.advantage for r in group.rollouts] == pytest.approx([1 / spread, 0, -1 / spread, 0])
    logprobs = torch.tensor([-1.0, -30.0, -15.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, -8.0], dtype=torch.float64)
    behaviour, nothing = logprobs.detach(), torch.zeros(3, dtype=torch.float64)
    out = algo.loss(LossBatch(logprobs, behaviour, nothing, torch.ones_like(nothing), ref_logprobs=reference))
    limited = [-1.0, 10.0, 7.0]  # log(reference / policy), the second one being 29
    assert float(out.total.detach()) == pytest.approx(0.01 * sum(math.expm1(gap) - gap for gap in limited))
    out.total.backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def rollout(reward: float) -> Rollout:
    completion = Completion([1, 2], [-1.0, -1.0], [-1.0, -1.0], Finish.STOP)
    return Rollout(Prompt("p", ()), 0, [Turn([0], completion, "")], Verdict(reward, Status.WRONG))


def test_gym_reinforce_keeps_the_size_of_a_mini_batch_and_not_the_number_of_updates() -> None:
    """About 32 lines per optimizer step at five lines per solution, for any number of episodes."""
    cfg = settings("gym_reinforce")
    algo = build_algorithm(cfg)
    for episodes in (cfg.train.prompts, cfg.train.prompts + cfg.replay.groups):
        assert 25 <= 5 * episodes / algo.update_count(episodes) <= 32
    assert algo.update_count(cfg.train.prompts + cfg.replay.groups) == 134 and cfg.train.passes == 1


def test_single_file_requires_exactly_the_given_numbers() -> None:
    texts = ["<answer>1 + 2 = 3</answer>", "<answer>1 * 2</answer>", "<answer>1 + 1 + 1</answer>", "3", "<answer>x"]
    found = verdicts("single_file", texts, {"answer": "3", "fields": {"nums": [1, 2], "target": 3}})
    assert found == [(1.01, "ok"), (0.02, "wrong"), (0.02, "wrong"), (0.01, "no_answer"), (0.01, "unparsable")]
    found = verdicts(
        "single_file", ["<answer>1 + 1</answer>"], {"answer": "2", "fields": {"nums": [1, 2], "target": 2}}
    )
    assert found == [(0.02, "wrong")]  # as many numbers, all of them given, and yet not those


SINGLE_FILE = {"sft.steps": 0, "sampling.max_new_tokens": 16, "model.max_length": 640, "optim.lr": 1e-3}


@pytest.mark.slow
def test_single_file_uses_raw_prompts_and_an_entropy_bonus(tmp_path: Path) -> None:
    seed = Seed("single_file", tmp_path, **SINGLE_FILE, **{"parallel.tp": 1, "train.samples": 2})
    assert seed() == 0
    first = seed.rollouts(1)[0]
    asked = char_tokenizer().decode(first.turns[0].context_ids)
    nums, target = first.prompt.fields["nums"], first.prompt.fields["target"]
    assert f"Make {target} from the numbers {nums}" in asked and asked.endswith("Step by step:\n<think>")
    algo = build_algorithm(settings("single_file"))
    own = algo.settings
    assert (own.advantage, own.aggregate, own.updates, own.recompute_logprobs) == ("group_norm", "sequence", 4, True)
    assert algo.needs.entropy_gradient and not algo.needs.reference
    entropy, bonus = seed.metrics("policy/entropy"), seed.metrics("loss/entropy")
    assert bonus == pytest.approx([-0.001 * nats for nats in entropy], rel=1e-3)
    assert {rollout.reward for rollout in seed.rollouts(1)} == {0.01}  # all alike: the bonus is all that moves it
    assert all(norm > 0 for norm in seed.metrics("optim/grad_norm"))


@pytest.mark.slow
def test_single_file_runs_with_tensor_parallelism(tmp_path: Path) -> None:
    seed = Seed("single_file", tmp_path, **SINGLE_FILE)
    words = [f"--{key}={value}" for key, value in seed.words.items()]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "assay", "train"]
    command = [sys.executable, *launch, str(ROOT / "configs" / "seeds" / "single_file.toml"), *words]
    run = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(seed.rollouts(2)) == 16 and all(norm > 0 for norm in seed.metrics("optim/grad_norm"))


def test_dr_grpo_rewards_accuracy_format_and_length() -> None:
    long = "We add and add until we are there. "
    texts = [f"{long}#### 1,200", f"{long}It is 1,200", f"{long}#### 1", "1200", "#### 1200"]
    found = verdicts(
        "dr_grpo", texts, {"answer": "1200"}
    )  # 0.4 for the form; up to -0.5 for an answer that is too brief
    assert found == [(1.4, "ok"), (1.0, "ok"), (-0.6, "wrong"), (0.5, "ok"), (0.9, "ok")]


def test_dr_grpo_evaluates_other_models_with_its_prompt_and_judge(tmp_path: Path, data: Path) -> None:
    prepared, out = tmp_path / "gsm8k-hash", tmp_path / "out.json"
    form = ["--arg", "solution_style=hash", "--arg", "instruction=", "--eval-size", "6"]
    assert main(["data", "prepare", "gsm8k", "--path", str(data), "--out", str(prepared), *form]) == 0
    problems = [json.loads(line) for line in (prepared / "test6.jsonl").read_text().splitlines()]
    config = ["--config", str(ROOT / "configs" / "seeds" / "dr_grpo.toml")]

    def solve(body: dict[str, Any]) -> str:
        return next(f"It is {row['answer']}." for row in problems if row["question"] in body["prompt"])

    for source in (["--data", str(prepared / "test6.jsonl")], ["--task.path", str(prepared)]):
        with stub_endpoint(solve) as server:
            words = [*config, *source, "--openai.url", server.url, "--openai.api=completions", "--reward.workers=0"]
            assert main(["eval", "baseline", "--engine", "openai", *words, "--json", str(out)]) == 0
        asked = sorted(body["prompt"] for body in server.requests)
        template = settings("dr_grpo").prompt.template
        assert asked == sorted(template.replace("{question}", problem["question"]) for problem in problems)
        assert all("####" in text for text in asked)
        (result,) = json.loads(out.read_text())
        assert (result["n"], result["accuracy"], result["settings"]["max_new_tokens"]) == (6, 1.0, 1024)  # not strict
        out.unlink()


@pytest.mark.slow
def test_dr_grpo_divides_neither_by_the_std_nor_by_lengths(tmp_path: Path, data: Path) -> None:
    words = {"task.path": data, "prompt.template": "{question}", "sampling.max_new_tokens": 24}
    seed = Seed("dr_grpo", tmp_path, **words, **{"sampling.temperature": 1.5, "optim.lr": 1e-3})
    assert seed() == 0
    spread = set()
    for step in (1, 2):
        for group in read_rollouts(seed.path, step):
            mean = sum(group.rewards) / len(group.rewards)
            assert [r.advantage for r in group.rollouts] == pytest.approx([reward - mean for reward in group.rewards])
            spread |= {round(reward - mean, 6) for reward in group.rewards}
        for verdict in (rollout.verdict for rollout in seed.rollouts(step)):
            assert verdict is not None
            accuracy, form, brief = (verdict.parts[part] for part in ("accuracy", "format", "length"))
            assert verdict.reward == pytest.approx(accuracy + 0.4 * form - 0.5 * brief) and accuracy in (-1, 1)
    assert len(spread) > 2 and any(seed.metrics("optim/grad_norm"))
    algo = build_algorithm(settings("dr_grpo"))
    assert algo.token_weights(torch.tensor([3, 300])).tolist() == pytest.approx([1 / (2 * 512)] * 2)
    assert not algo.needs.reference and algo.settings.updates == 1


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `chat`: a warm start that answers in the format of GSM8K and calls the calculator."""
    folder = tmp_path_factory.mktemp("chat")
    seed = Seed("simple", folder, **{"task.path": rows(folder), "name": "chat", "eval.samples": 1})
    assert seed("sft") == 0
    return folder


def with_chat(name: str, chat: Path, **words: object) -> Seed:
    seed = Seed(name, chat, **{"task.path": chat / "gsm8k", "model": "run:chat@last", "sft.steps": 0}, **words)
    del seed.words["model.tokenizer"]
    return seed


@pytest.mark.slow
def test_simple_continues_from_a_warm_start_with_muon(chat: Path) -> None:
    seed = with_chat("simple", chat, **{"sampling.max_new_tokens": 24, "train.prompts": 3, "train.samples": 6})
    del seed.words["model"]  # the recipe's own: run:chat@last
    assert seed() == 0
    for group in read_rollouts(seed.path, 1):
        mean = sum(group.rewards) / len(group.rewards)
        assert [r.advantage for r in group.rollouts] == pytest.approx([reward - mean for reward in group.rewards])
    called = [turn for rollout in seed.rollouts(1) for turn in rollout.turns[1:] if turn.context_ids]
    assert called  # what the calculator put in is not trained on
    assert all(sum(r.loss_mask) == r.length < len(r.token_ids) for r in seed.rollouts(1))
    assert seed.metrics("optim/lr") == pytest.approx([0.05 * 0.004, 0.5 * 0.05 * 0.004])  # linear to 0
    assert all(seed.metrics(f"eval/pass@{k}") for k in range(1, 9))
    moments = load_file(seed.path / "checkpoints" / "step-000002" / "optimizer.safetensors")
    assert any("momentum" in name for name in moments) and any("exp_avg" in name for name in moments)
    algo = build_algorithm(settings("simple"))
    own = algo.settings
    assert (own.policy_loss, own.aggregate, own.updates) == ("reinforce", "token", 1) and not algo.needs.reference


def test_gym_reinforce_shows_how_to_call_the_calculator(data: Path) -> None:
    cfg = settings("gym_reinforce", **{"task.path": str(data)})
    problems = build_problems(cfg.task, cfg.env)
    renderer = build_renderer(cfg.prompt, char_tokenizer(), problems)
    asked = renderer.prompt_text(problems.prompts("test")[0])
    assert asked.startswith("<system>Solve the problem in steps")
    assert asked.count("<assistant>") == 6 and asked.endswith("<assistant>")  # five worked examples, and the reply
    assert asked.count("####") == 5 + 2 and asked.count("<<") == 5 + 2  # the system message has its own


@pytest.mark.slow
def test_gym_reinforce_steps_replays_and_refreshes_its_reference(chat: Path) -> None:
    words = {"prompt.few_shot": 0, "prompt.system": "", "sampling.max_new_tokens": 48, "eval.max_new_tokens": 48}
    few = {"train.steps": 4, "train.prompts": 12, "train.samples": 1, "replay.groups": 6}
    seed = with_chat("gym_reinforce", chat, **words, **few, **{"optim.lr": 1e-4, "save.keep": 9, "eval.examples": 2})
    assert seed() == 0
    played = [rollout for step in range(1, 5) for rollout in seed.rollouts(step)]
    assert all(rollout.prompt.id.startswith("gsm8k/train/") for rollout in played)  # never the test split
    assert any("\n" in turn.text for rollout in played for turn in rollout.turns[:-1])  # lines are steps
    assert any(turn.context_ids for rollout in played for turn in rollout.turns[1:])  # and the calculator answers
    solved = [rollout for rollout in played if rollout.reward == 1 and len(rollout.turns) > 1]
    assert solved
    for rollout in solved:  # the discounted return itself, and no baseline
        later = [
            0.997 ** (len(rollout.turns) - 1 - i) for i, t in enumerate(rollout.turns) for _ in t.completion.token_ids
        ]
        assert rollout.token_advantages == pytest.approx(later)
    assert seed.metrics("replay/size") == [0, 12, 24, 36]
    assert seed.metrics("replay/share") == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert len(ReplayBuffer.load(seed.path / "checkpoints" / "step-000004" / "replay")) == 48

    def optimizer_steps(step: int) -> set[float]:
        moments = load_file(seed.path / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors")
        return {float(value) for name, value in moments.items() if name.endswith("|step")}

    # Mini-batches of 6 episodes: the first batch has 12, later ones 18 with those replayed.
    updates, skipped = seed.metrics("optim/updates"), seed.metrics("optim/skipped")
    assert updates == [2, 3, 3, 3] and seed.metrics("optim/non_finite") == [0] * 4
    # The gradient is 0, and the update is skipped, if no episode is solved while the policy equals the reference: at
    # the beginning of steps 1 and 3.
    assert skipped[0] == (not any(rollout.reward for rollout in seed.rollouts(1)[:6])) and skipped[1] == skipped[3] == 0
    totals = accumulate(made - left_out for made, left_out in zip(updates, skipped, strict=True))
    assert [optimizer_steps(step) for step in range(1, 5)] == [{total} for total in totals]

    def weights(step: int, part: str) -> dict[str, torch.Tensor]:
        return load_file(seed.path / "checkpoints" / f"step-{step:06d}" / part / "model.safetensors")

    def same(one: tuple[int, str], other: tuple[int, str]) -> bool:
        left, right = weights(*one), weights(*other)
        return all(left[name].equal(right[name]) for name in left)

    assert same((1, "reference"), (0, "model")) and not same((1, "model"), (0, "model"))
    assert same((2, "reference"), (2, "model")) and same((3, "reference"), (2, "model"))  # refreshed every other step
    assert same((4, "reference"), (4, "model")) and not same((4, "model"), (2, "model"))
