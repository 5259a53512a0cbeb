"""The five seed recipes (configs/seeds): judges, prompts and algorithms. test_seed_workflows.py runs them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_endpoint import stub_endpoint

from assay.algos import LossBatch
from assay.build.models import build_renderer
from assay.build.problems import build_algorithm, build_problems
from assay.cli.main import main
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.tasks import make_task
from assay.tasks.registry import build_judge
from assay.text import char_tokenizer
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

ROOT = Path(__file__).resolve().parent.parent
SEEDS = ("tapes", "single_file", "dr_grpo", "gym_reinforce", "simple")


def gsm8k_rows(folder: Path) -> Path:
    """Problems in the format of GSM8K that can be learned in a few seconds; one gold answer has a comma."""
    sums = [(a, b) for a in range(1, 7) for b in range(1, 7)]
    worked = [(f"{a} and {b}?", f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}") for a, b in sums]
    parts = {"train": worked[:28], "test": [*worked[28:], ("A dozen hundreds?", "12*100=1200\n#### 1,200")]}
    folder.mkdir(parents=True)
    for split, part in parts.items():
        lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in part]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return gsm8k_rows(tmp_path / "gsm8k")


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


def test_recipes_without_a_reference_normalise_as_documented() -> None:
    single_file, dr_grpo, simple = (build_algorithm(settings(name)) for name in ("single_file", "dr_grpo", "simple"))
    own = single_file.settings
    assert (own.advantage, own.aggregate, own.updates, own.recompute_logprobs) == ("group_norm", "sequence", 4, True)
    assert dr_grpo.token_weights(torch.tensor([3, 300])).tolist() == pytest.approx([1 / (2 * 512)] * 2)
    own = simple.settings
    assert (own.policy_loss, own.aggregate, own.updates) == ("reinforce", "token", 1)
    assert single_file.needs.entropy_gradient and dr_grpo.settings.updates == 1
    assert not any(algo.needs.reference for algo in (single_file, dr_grpo, simple))


def test_gym_reinforce_shows_how_to_call_the_calculator(data: Path) -> None:
    cfg = settings("gym_reinforce", **{"task.path": str(data)})
    problems = build_problems(cfg.task, cfg.env)
    renderer = build_renderer(cfg.prompt, char_tokenizer(), problems)
    asked = renderer.prompt_text(problems.prompts("test")[0])
    assert asked.startswith("<system>Solve the problem in steps")
    assert asked.count("<assistant>") == 6 and asked.endswith("<assistant>")  # five worked examples, and the reply
    assert asked.count("####") == 5 + 2 and asked.count("<<") == 5 + 2  # the system message has its own
