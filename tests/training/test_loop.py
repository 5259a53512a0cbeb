"""Whole runs on a nano model: recipes, filters, schedules, checkpoints, rollout files, and refused settings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_run import SmallRuns, abacus_words, gpt2_folder, llama_folder, mostly_slow

from assay.algos.recipes import RECIPES
from assay.runs import checkpoints
from assay.runs.rollouts import read_lines, read_rollouts
from assay.training.recorder import RunEvaluator

pytestmark = pytest.mark.usefixtures("no_curves")


def changed(small: SmallRuns, name: str = "small", steps: int = 2) -> bool:
    """Whether training moved the weights."""
    first, last = (load_file(small.checkpoint(step, name) / "model/model.safetensors") for step in (0, steps))
    return any(not first[key].equal(last[key]) for key in first)


def own_reward(small: SmallRuns, value: str) -> tuple[str, str]:
    (small.folder / "own.py").write_text(f"def reward(completion, answer):\n    return {value}\n")
    return "--reward.function", f"{small.folder}/own.py:reward"


def test_answers_longer_than_the_kv_cache_are_truncated(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.train("--engine.kv_cache_gib", 3e-5, "--sampling.max_new_tokens", 60) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("engine.kv_cache_gib holds keys and values of") == 1
    held = int(said.partition("keys and values of ")[2].split()[0])
    answers = [rollout for group in read_rollouts(small.runs / "small", 1) for rollout in group.rollouts]
    assert max(len(rollout.token_ids) for rollout in answers) == held + 1
    assert all(rollout.truncated for rollout in answers if len(rollout.token_ids) == held + 1)


@pytest.mark.parametrize("recipe", mostly_slow(["ppo", "gspo", "bnpo", "dr_grpo"], quick=["ppo", "gspo"]))
def test_every_recipe_trains(small: SmallRuns, recipe: str) -> None:
    assert small.train("--algo.recipe", recipe) == 0
    assert small.summary()["algorithm"] == recipe and small.summary()["steps"] == 2
    assert changed(small)
    steps = [row for row in small.metrics() if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(np.isfinite(row["loss/total"]) and row["optim/grad_norm"] > 0 for row in steps)
    # The first update after a rollout compares trainer and engine on the same weights.
    on_policy = RECIPES[recipe].get("updates", 1) == 1
    assert not on_policy or max(row["mismatch/logprob_abs_diff_max"] for row in steps) < 1e-4


def test_a_step_in_which_every_group_is_dropped_is_skipped(small: SmallRuns) -> None:
    assert small.train("--algo.recipe", "dapo", *own_reward(small, "0.5"), "--algo.resample", 1) == 0
    assert not changed(small)
    rows = [row for row in small.metrics() if "groups/dropped" in row]
    assert [row["groups/dropped"] for row in rows] == [6.0, 6.0] and all(row["optim/skipped"] for row in rows)


def test_remax_samples_a_greedy_baseline_per_prompt(small: SmallRuns) -> None:
    assert small.train("--algo.recipe", "remax", "--train.samples", 2) == 0
    tokens = 0
    for step, row in enumerate([row for row in small.metrics() if "reward/greedy" in row], 1):
        groups = read_rollouts(small.runs / "small", step)
        assert [len(group.rollouts) for group in groups] == [2, 2, 2]  # the greedy answer is not among them
        baselines = [{round(r.reward - r.advantage, 6) for r in group.rollouts} for group in groups]
        assert all(len(one) == 1 for one in baselines)
        assert row["reward/greedy"] == pytest.approx(sum(sum(one) for one in baselines) / 3, abs=1e-6)
        tokens += sum(r.length for group in groups for r in group.rollouts)
    assert small.summary()["tokens"] > tokens > 0


def test_prompts_with_a_high_pass_rate_are_skipped(small: SmallRuns) -> None:
    picky = own_reward(small, "1.0 if int(answer) % 2 else sum(map(ord, completion)) % 2 / 2")
    words = ("--train.steps", 4, "--algo.pass_rate_high", 0.9)
    assert small.train(*picky, *words, "--train.max_train_prompts", 6) == 0
    groups = [group for step in range(1, 5) for group in read_rollouts(small.runs / "small", step)]
    solved = {group.prompt.id for group in groups if min(group.rewards) == 1}
    times = Counter(group.prompt.id for group in groups)
    assert len(times) == 6 and 0 < len(solved) < 6 and len(groups) == 12
    assert all((times[prompt] == 1) == (prompt in solved) for prompt in times)
    state = json.loads((small.checkpoint(4) / "state.json").read_text())
    assert {prompt for prompt, (rate, _) in state["algorithm"]["pass_rate"]["rates"].items() if rate > 0.9} == solved
    last = small.metrics()[-2]
    assert (last["prompts/known"], last["prompts/within_reach"]) == (6, pytest.approx(1 - len(solved) / 6))


def test_training_continues_if_every_prompt_is_too_easy(small: SmallRuns) -> None:
    words = ("--algo.pass_rate_high", 0.5, "--train.max_train_prompts", 4, "--train.steps", 3)
    assert small.train(*own_reward(small, "1.0"), *words) == 0
    assert small.summary()["steps"] == 3


def test_mean_log_probabilities_of_sampled_and_of_trained_tokens_are_logged(small: SmallRuns) -> None:
    """Against the rollout files; with an entropy bonus every answer is trained on, so both metrics cover all tokens."""
    assert small.train("--algo.entropy_coef", 1e-9) == 0
    for step, row in enumerate([row for row in small.metrics() if "sampling/logprob" in row], 1):
        rollouts = [r for group in read_rollouts(small.runs / "small", step) for r in group.rollouts]
        logprobs = [p for r in rollouts for p, mask in zip(r.engine_logprobs, r.loss_mask, strict=True) if mask]
        assert len(logprobs) > len(rollouts) and row["sampling/logprob"] < 0
        assert row["sampling/logprob"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-6)
        assert row["policy/logprob"] == pytest.approx(row["sampling/logprob"], abs=1e-4)


def test_entropy_control_works_without_any_advantage(small: SmallRuns) -> None:
    """A collapsed policy: every answer to a prompt gets the same reward, and the coefficient begins with 0."""
    assert small.train("--train.steps", 3, *own_reward(small, "0.7"), "--algo.entropy_target", 99) == 0
    rows = [row for row in small.metrics() if "reward/mean" in row]
    assert [row["policy/entropy_coef"] for row in rows] == pytest.approx([0.0, 0.005, 0.01])
    assert [row["optim/skipped"] for row in rows] == [1.0, 0.0, 0.0]
    assert rows[0]["optim/grad_norm"] == 0 < rows[1]["optim/grad_norm"]
    assert all(row["groups/zero_variance"] == 1 for row in rows) and changed(small, steps=3)


def test_the_soft_overlong_penalty_uses_the_context_limit(small: SmallRuns) -> None:
    """Where the context leaves less room than sampling.max_new_tokens, that is the limit of an answer."""
    words = ("--algo.soft_overlong_buffer", 0.9, "--sampling.max_new_tokens", 40, "--model.max_length", 40)
    assert small.train("--train.steps", 1, *words) == 0
    rollouts = [rollout for group in read_rollouts(small.runs / "small", 1) for rollout in group.rollouts]
    for rollout in rollouts:
        limit = 40 - len(rollout.turns[0].context_ids)
        last = round(0.9 * limit)
        punishment = min(max(rollout.length - (limit - last), 0) / last, 1.0)
        assert rollout.reward == pytest.approx(rollout.verdict.reward - punishment)
        assert punishment == 1.0 or not rollout.truncated
    assert any(rollout.truncated for rollout in rollouts)


@pytest.mark.slow
def test_a_fallback_model_is_trained_and_exported(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from assay.cli.main import main

    folder = gpt2_folder(small.folder / "gpt2")
    assert small.train("--model", folder) == 0
    assert changed(small)
    rows = [row for row in small.metrics() if "mismatch/logprob_abs_diff_max" in row]
    assert max(row["mismatch/logprob_abs_diff_max"] for row in rows) < 1e-3
    assert small("eval", folder, "run:small@last", "--task", "abacus", "--eval.final_examples", 3) == 0
    assert "vs. the first" in capsys.readouterr().out
    exported = small.folder / "exported"
    assert main(["export", "run:small@last", str(exported), "--dir", str(small.runs)]) == 0
    hf: Any = AutoModelForCausalLM.from_pretrained(exported)
    kept = load_file(small.checkpoint(2) / "model/model.safetensors")
    assert hf.transformer.wte.weight.equal(kept["transformer.wte.weight"])
    assert AutoTokenizer.from_pretrained(exported).chat_template
    assert small.resume("small", "--train.steps", 3) == 0


@pytest.mark.parametrize(
    ("block", "temperature", "settings"),
    [
        pytest.param(
            *(float(np.finfo(np.float32).min), 0.6, ("--algo.entropy_coef", 0.01, "--algo.kl_coef", 0.1)),
            marks=pytest.mark.slow,
        ),
        (-np.inf, 0.6, ("--algo.recipe", "gspo", "--algo.reward_kl_coef", 0.1, "--sampling.top_p", 0.9)),
    ],
)
def test_a_model_with_a_blocked_token_is_trained(
    small: SmallRuns, block: float, temperature: float, settings: tuple[object, ...]
) -> None:
    """Its head has a bias, which is -inf (or the least number there is) for one token."""
    from transformers import PhiConfig, PhiForCausalLM

    folder = gpt2_folder(small.folder / "phi")  # for its tokenizer
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = PhiForCausalLM(PhiConfig(vocab_size=size, max_position_embeddings=96, **shape))
    blocked = size - 2
    model.lm_head.bias.data[blocked] = block
    model.save_pretrained(folder)
    assert small.train("--model", folder, "--sampling.temperature", temperature, *settings) == 0
    assert changed(small)
    rows = [row for row in small.metrics() if "reward/mean" in row]
    for row in rows:
        assert row["optim/non_finite"] == 0 and row["optim/grad_norm"] > 0
        assert np.isfinite(row["loss/total"]) and 0 < row["policy/entropy"] <= np.log(size - 1)
    assert rows[0]["policy/entropy"] == pytest.approx(rows[0]["sampling/entropy"], abs=0.05)
    written = [turn for g in read_rollouts(small.runs / "small", 1) for r in g.rollouts for turn in r.turns]
    assert not any(blocked in turn.completion.token_ids for turn in written)


def test_a_model_without_a_chat_template_gets_raw_prompts(small: SmallRuns) -> None:
    folder = gpt2_folder(small.folder / "gpt2", chat=False)
    words = ("--model", folder, "--prompt.style", "raw", "--prompt.template", "{question} :")
    assert small.train(*words) == 0
    context = read_lines(small.runs / "small", 1)[0]["messages"][-1]["content"]
    first = read_rollouts(small.runs / "small", 1)[0].rollouts[0]
    assert len(first.turns[0].context_ids) == len(context.split()) + 1


@pytest.mark.slow
def test_a_new_best_checkpoint_is_saved_at_once_and_kept(small: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, path = RunEvaluator.measure, small.runs / "small"
    accuracies = {1: 0.2, 2: 0.2, 3: 0.6, 4: 0.5, 5: 0.6, 6: 0.1}

    def scripted(self: RunEvaluator, label: str, step: int) -> dict[str, float]:
        found = measured(self, label, step)
        return found | {"eval/accuracy": accuracies[step]} if label == "eval" else found

    monkeypatch.setattr(RunEvaluator, "measure", scripted)
    assert small.train("--train.steps", 6, "--save.every", 4, "--save.keep", 1, "--eval.every", 1) == 0
    assert checkpoints.read_best(path) == {"step": 3, "value": 0.6}  # a later one with the same value is not better
    assert checkpoints.steps(path) == [0, 3, 6]
    assert small.train("--model", "run:small@best", "--name", "from-best", "--train.steps", 1) == 0
    start, best = (
        folder / "model/model.safetensors" for folder in (small.checkpoint(0, "from-best"), small.checkpoint(3))
    )
    assert start.read_bytes() == best.read_bytes()
    words = ("--train.steps", 6, "--save.every", 4, "--eval.every", 1, "--save.best", "false", "--name", "regular")
    assert small.train(*words) == 0
    path = small.runs / "regular"
    assert checkpoints.steps(path) == [0, 4, 6]
    assert checkpoints.read_best(path) == {"step": 4, "value": 0.5}  # of those that were saved


def test_the_test_split_never_chooses_the_best_checkpoint(small: SmallRuns) -> None:
    assert small.train("--eval.split", "test", "--eval.every", 1, "--save.every", 1) == 0
    assert any("eval/accuracy" in row for row in small.metrics())
    assert checkpoints.read_best(small.runs / "small") is None


def test_old_rollouts_are_deleted(small: SmallRuns) -> None:
    assert small.train("--train.steps", 3, "--save.rollouts", 1) == 0
    assert small.train("--train.steps", 1, "--save.rollouts", 0, "--name", "none") == 0
    files = sorted(file.name for file in (small.runs / "small" / "rollouts").iterdir())
    assert files == ["step-000003.jsonl", "step-000003.npz"]
    assert not list((small.runs / "none").glob("rollouts/*"))


def test_a_budget_counts_every_answer_and_drives_the_schedule(small: SmallRuns) -> None:
    words = ("--train.budget", 36, "--optim.schedule", "linear")  # 9 answers per step, unless groups are replaced
    assert small.train(*words, "--name", "plain", "--algo.recipe", "grpo") == 0
    steps = [row for row in small.metrics("plain") if "reward/mean" in row]
    assert [row["sampling/answers"] for row in steps] == [9, 18, 27, 36]
    assert [row["optim/lr"] for row in steps] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert small.summary("plain")["answers"] == 36 and small.summary("plain")["steps"] == 4

    picky = own_reward(small, "len(completion) > 20")
    assert small.train(*words, *picky, "--name", "dapo", "--algo.recipe", "dapo") == 0
    steps = [row for row in small.metrics("dapo") if "reward/mean" in row]
    assert sum(row["groups/dropped"] for row in steps) > 0 and len(steps) < 4
    assert 36 <= small.summary("dapo")["answers"] < 36 + 9  # replaced groups count as well
    assert all(0 < row["optim/lr"] <= 1e-3 for row in steps) and "after/accuracy" in small.metrics("dapo")[-1]


KL = ("--algo.kl_coef", 0.1)
POLICY = ("--model", "models/policy", *KL, "--algo.reference")
SERVER = (*KL, "--reference.url", "http://127.0.0.1:9")
NF4 = ("--lora.quantize", "nf4", "--lora.rank", 2)
SEPARATE, CRITIC = ("--train.process", "separate"), ("--algo.critic", "true")
REFUSED: list[tuple[tuple[object, ...], str]] = [  # options, and what the error names
    (("--algo.recipe", "reinforce", "--replay.groups", 2), "importance ratio"),
    (("--algo.recipe", "gspo", "--replay.groups", 2), "recompute_logprobs"),
    (("--algo.reference_ema", 0.9), "algo.kl_coef"),
    ((*KL, "--algo.reference_ema", 0.9, "--algo.refresh_reference", 2), "algo.refresh_reference"),
    ((*KL, "--algo.reference", "preset:tiny"), "untrained"),
    ((*POLICY, "models/other-words"), "tokenizer"),
    ((*POLICY, "models/fewer-words"), "tokenizer"),
    ((*POLICY, "models/short-context"), "model.max_length = 100"),
    ((*POLICY, "models/larger", "--algo.refresh_reference", 2), "must have the shape"),
    ((*SERVER, "--reference.server", "vllm", "--sampling.temperature", 0.7), "temperature"),
    ((*SERVER, "--algo.reference", "run:small@0"), "algo.reference"),
    ((*SERVER, "--algo.reference_ema", 0.9), "algo.reference_ema"),
    ((*NF4, "--train.compile", "on"), "train.compile"),
    (("--lora.rank", 2, "--model", "models/gpt2"), "all-linear"),
    (("--source", "async", "--algo", "reinforce"), "source.max_staleness"),
    (("--source", "async", "--engine", "hf", "--model", "models/gpt2"), "cannot update weights while it generates"),
    ((*SEPARATE, "--train.compile", "on"), "would compile again in every step"),
    ((*CRITIC, "--lora.rank", 2), "critic cannot be combined with adapters: set lora.rank = 0"),
    ((*CRITIC, "--replay.groups", 2), "replay.groups = 0"),
    ((*CRITIC, *SEPARATE), "critic cannot be combined with train.process = 'separate'"),
    ((*CRITIC, "--algo.step_credit", "true"), "step_credit"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("refused"), abacus_words()
    models = folder / "models"
    gpt2_folder(models / "gpt2")
    llama_folder(models / "policy", 32, words)
    llama_folder(models / "larger", 64, words)
    llama_folder(models / "other-words", 64, words[::-1])
    llama_folder(models / "fewer-words", 64, words[:-1])
    llama_folder(models / "short-context", 64, words, positions=100)
    return folder


@pytest.mark.parametrize(("words", "named"), REFUSED)
def test_contradictory_settings_are_refused_before_the_run_starts(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    named: str,
) -> None:
    monkeypatch.chdir(folder)
    small = SmallRuns(folder)
    capsys.readouterr()
    assert small.train(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("assay: ") and named in error and error.count("\n") == 1 and not small.runs.exists()
