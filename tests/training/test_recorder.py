"""Evaluations of a run, rollout files with log-probabilities of trainer and reference, and metrics of sampling."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import SmallRuns, gpt2_folder
from train_parts import make_groups, tiny_decoder
from transformers import AutoModelForCausalLM

from assay.build.problems import build_algorithm
from assay.cli.main import main
from assay.config import TrainConfig
from assay.engine import SamplingParams, make_engine
from assay.models import build_preset
from assay.rewards import JudgePool
from assay.rollout import Collector
from assay.runs.rollouts import read_arrays, read_lines, read_rollouts
from assay.tasks import make_task
from assay.text import Renderer, word_tokenizer
from assay.training.recorder import rollout_metrics, task_metrics
from assay.training.sources import SampledGroups
from assay.types import TASK_LABEL, Prompt, Status, Verdict


def test_every_evaluation_writes_its_answers_and_several_samples_give_pass_at_k(small: SmallRuns) -> None:
    assert small.train("--eval.every", 1, "--eval.samples", 3, "--eval.temperature", 1) == 0
    path = small.runs / "small"
    assert len(read_lines(path, 0, "eval", "before-test")) == 15
    assert len(read_lines(path, 1, "eval", "eval-validation")) == 12
    right = sum(line["verdict"]["status"] == "ok" for line in read_lines(path, 2, "eval", "after-test"))
    after = small.summary()["after"]
    assert after["accuracy"] == pytest.approx(right / 15) == pytest.approx(after["pass_at_k"]["1"])
    assert after["samples"] == 3 and set(after["pass_at_k"]) == {"1", "2", "3"} == set(after["majority_at_k"])
    assert after["pass_at_k"]["1"] <= after["pass_at_k"]["2"] <= after["pass_at_k"]["3"]
    assert any("eval/pass@3" in row for row in small.metrics())
    assert json.loads((path / "environment.json").read_text())["versions"]["torch"]


@pytest.mark.slow
def test_only_periodic_evaluations_need_validation_problems(
    small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small.folder / "data"
    assert main(["data", "prepare", "abacus", "--out", str(data), "--train-size", "6", "--val-size", "0"]) == 0
    words = ("--task", "jsonl", "--task.path", data, "--model.tokenizer", "characters", "--train.steps", 1)
    assert small.train(*words, "--eval.every", 0) == 0
    capsys.readouterr()
    assert small.train(*words, "--eval.every", 1, "--name", "periodic") == 2
    assert "no validation problems" in (error := capsys.readouterr().err) and "eval.every = 0" in error
    assert error.count("\n") == 1


def test_a_pretrained_model_is_also_evaluated_before_its_warm_start(small: SmallRuns) -> None:
    warm = ("--sft.steps", 60, "--sft.batch", 8, "--sft.lr", 1e-2)
    warm = (*warm, "--reward.function", "", "--sampling.max_new_tokens", 30)
    assert small.train(*warm, "--sft.steps", 1, "--train.steps", 0, "--name", "fresh") == 0
    assert "before" not in small.summary("fresh")["sft"]  # of a fresh model there is nothing to know
    folder = gpt2_folder(small.folder / "gpt2")
    assert small.train(*warm, "--model", folder) == 0
    summary, rows = small.summary(), small.metrics()
    start, before = (next(row for row in rows if f"{label}/accuracy" in row) for label in ("start", "before"))
    assert rows.index(start) < next(i for i, row in enumerate(rows) if "sft/loss" in row) < rows.index(before)
    assert summary["sft"]["before"]["n"] == summary["before"]["n"] == 5
    assert summary["sft"]["before"]["accuracy"] == start["start/accuracy"] and start["start/format"] == 0
    assert before["before/format"] > 0  # the warm start taught the form
    assert summary["sft"]["paired"]["gained"] - summary["sft"]["paired"]["lost"] == round(5 * before["before/accuracy"])
    assert len(read_lines(small.runs / "small", 0, "eval", "start-test")) == 5


TEMPERATURE = 0.7
TASK = make_task("abacus", eval_size=8)
RANK = """
def rank(prompts, completions, **kwargs):
    return [sum(len(other) < len(one) for other in completions) for one in completions]
"""


def expected_scores(model_folder: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies of all tokens by transformers; NaN where the mask is 0."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected, entropies = np.full((2, len(arrays["token_ids"])), np.nan, np.float32)
    for start, end in zip(arrays["offsets"], arrays["offsets"][1:], strict=False):
        ids = torch.from_numpy(arrays["token_ids"][start:end]).long()
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected[start + 1 : end] = logprobs.gather(1, ids[1:, None]).squeeze(1)
        entropies[start + 1 : end] = torch.distributions.Categorical(logits=logprobs).entropy()
    for values in (expected, entropies):
        values[arrays["loss_mask"] == 0] = np.nan
    return expected, entropies


@pytest.mark.parametrize(
    "changes, reference",
    [
        (["--algo.kl_coef", 0.1], True),  # computed in the loss
        (["--algo.reward_kl_coef", 0.1, "--algo.recompute_logprobs", "true", "--algo.updates", 2], True),
        (["--train.token_budget", 30], False),  # several micro-batches
    ],
)
@pytest.mark.usefixtures("no_curves")
def test_rollout_files_hold_logprobs_and_entropies_of_the_weights_before_the_step(
    small: SmallRuns, changes: list[object], reference: bool
) -> None:
    every_step = ("--save.every", 1, "--save.keep", 9, "--sampling.temperature", TEMPERATURE)
    assert small.train(*every_step, *changes) == 0
    for step in (1, 2):
        arrays = read_arrays(small.runs / "small", step)
        expected, entropies = expected_scores(small.checkpoint(step - 1) / "model", arrays)
        trained = ~np.isnan(arrays["trainer_logprobs"])
        in_mask = arrays["loss_mask"] == 1
        with_gradient = in_mask & (arrays["advantages"] != 0).repeat(np.diff(arrays["offsets"]))
        assert with_gradient.any() and trained[with_gradient].all() and not trained[~in_mask].any()
        np.testing.assert_allclose(arrays["trainer_logprobs"][trained], expected[trained], atol=2e-5)
        np.testing.assert_array_equal(np.isnan(arrays["entropies"]), ~trained)
        # With two updates, those of the second one are of weights that the first one has changed.
        first = slice(arrays["offsets"][3]) if "--algo.updates" in changes else slice(None)
        np.testing.assert_allclose(arrays["entropies"][first], np.where(trained, entropies, np.nan)[first], atol=2e-5)
        assert ("ref_logprobs" in arrays) == reference
        if reference:
            known = ~np.isnan(arrays["ref_logprobs"])
            expected, _ = expected_scores(small.checkpoint(0) / "model", arrays)
            np.testing.assert_allclose(arrays["ref_logprobs"][known], expected[known], atol=2e-5)
            assert (known >= trained).all()
        rollouts = [rollout for group in read_rollouts(small.runs / "small", step) for rollout in group.rollouts]
        stored = [value for r in rollouts if r.trainer_logprobs is not None for value in r.trainer_logprobs]
        assert stored == arrays["trainer_logprobs"][trained].tolist()
        stored = [value for r in rollouts if r.entropies is not None for value in r.entropies]
        assert stored == arrays["entropies"][trained].tolist()


@pytest.mark.parametrize("top_k", [0, 3])
def test_truncation_kl_is_the_mean_log_of_the_kept_mass_and_absent_without_truncation(top_k: int) -> None:
    tokenizer = word_tokenizer(TASK.words())  # type: ignore[attr-defined]
    policy, renderer = build_preset("nano", tokenizer.vocab_size, 64, seed=3), Renderer(tokenizer)
    engine = make_engine("native", policy, device="cpu", dtype=torch.float32, decode=renderer.decode)
    collector = Collector(engine, renderer, JudgePool(TASK.judge(), 0, 5.0))
    groups = collector.collect(TASK.prompts("test")[:3], SamplingParams(n=2, max_new_tokens=6, top_k=top_k), (0, 0))
    metrics = rollout_metrics(SampledGroups(groups), build_algorithm(TrainConfig()), engine.info.capabilities)
    if not top_k:
        assert "sampling/truncation_kl" not in metrics and metrics["sampling/kept_mass"] == 1.0
        return
    logs = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        ids = torch.tensor(rollout.token_ids)
        with torch.no_grad():
            logits = policy.unembed(policy.hidden(ids, [len(ids)])).double()
        kept = logits.softmax(-1).topk(top_k, dim=-1).values.sum(-1)
        logs += (-kept[len(rollout.turns[0].context_ids) - 1 : -1].log()).tolist()
    assert metrics["sampling/truncation_kl"] == pytest.approx(sum(logs) / len(logs), abs=1e-4)


def test_each_part_of_the_reward_is_a_metric_and_in_the_rollout_files(small: SmallRuns) -> None:
    """One function sees all answers to a prompt: it counts how many are shorter than each."""
    (small.folder / "rank.py").write_text(RANK)
    functions = f'["{small.folder}/reward.py:reward", "{small.folder}/rank.py:rank"]'
    words = ("--reward.function", "", "--reward.functions", functions, "--reward.weights", "[1.0, 0.5]")
    assert small.train(*words) == 0
    for step, row in enumerate((row for row in small.metrics() if "reward/mean" in row), 1):
        groups = read_rollouts(small.runs / "small", step)
        for group in groups:
            lengths = [len(rollout.text) for rollout in group.rollouts]
            verdicts = [rollout.verdict for rollout in group.rollouts if rollout.verdict]
            assert [v.parts["rank"] for v in verdicts] == [sum(m < n for m in lengths) for n in lengths]
            assert all(v.reward == v.parts["reward"] + 0.5 * v.parts["rank"] for v in verdicts)
        ranks = [r.verdict.parts["rank"] for group in groups for r in group.rollouts if r.verdict]
        assert row["parts/rank"] == pytest.approx(sum(ranks) / len(ranks))
        assert row["reward/mean"] == pytest.approx(row["parts/reward"] + 0.5 * row["parts/rank"])


MIX = """
[task]
name = "mix"
[[task.args.tasks]]
name = "abacus"
weight = 2
args = {train_size = 24, eval_size = 10}
[[task.args.tasks]]
name = "abacus"
label = "harder"
args = {min_steps = 3, train_size = 24, eval_size = 10}
"""


def test_mixed_tasks_have_metrics_of_their_own_and_evaluations_by_task(
    small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = small.config.read_text().split("[task]")
    small.config.write_text(before + MIX + after.partition("\n[sampling]")[1] + after.partition("\n[sampling]")[2])
    assert small.train("--eval.every", 1, "--eval.final_examples", 6) == 0
    rows = [row for row in small.metrics() if "reward/mean" in row]
    for step, row in enumerate(rows, 1):
        groups = read_rollouts(small.runs / "small", step)
        assert [group.prompt.fields["task_label"] for group in groups].count("abacus") == 2
        own = [r.reward for group in groups if group.prompt.id.startswith("harder/") for r in group.rollouts]
        assert row["task/harder/reward"] == pytest.approx(sum(own) / len(own)) and "task/abacus/correct" in row
        assert {"eval/accuracy/abacus", "eval/accuracy/harder"} <= row.keys()
    by_task = small.summary()["after"]["by_task"]
    assert {label: part["n"] for label, part in by_task.items()} == {"abacus": 4, "harder": 2}
    table = capsys.readouterr().out.partition("95 % interval")[2].splitlines()[1:7]
    parts = ["- abacus", "- harder"]
    assert [re.split(r"  +", line)[0] for line in table] == ["before", *parts, "after", *parts]
    assert small("eval", "run:small@last", "--eval.final_examples", 6) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("- abacus", "- harder")) for line in lines) == 2


def test_rewards_of_a_task_are_those_of_judged_answers() -> None:
    (group,) = make_groups(tiny_decoder(), groups=1, samples=3)
    prompt = Prompt("a/1", (), fields={TASK_LABEL: "a"})
    verdicts = Verdict(1.0, Status.OK), Verdict(0.5, Status.WRONG), Verdict(0.0, Status.ERROR)
    for rollout, verdict in zip(group.rollouts, verdicts, strict=True):
        rollout.prompt, rollout.reward, rollout.verdict = prompt, verdict.reward, verdict
    assert task_metrics(group.rollouts) == {"task/a/reward": 0.75, "task/a/correct": pytest.approx(1 / 3)}


def test_long_prompts_are_dropped_with_their_number(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = word_tokenizer(make_task("abacus").words())  # type: ignore[attr-defined]
    prompts = make_task("abacus", train_size=24, eval_size=10).prompts("train")
    lengths = sorted(map(len, Renderer(tokenizer).all_prompt_ids(prompts)))
    limit = lengths[12]
    assert small.train("--train.max_prompt_tokens", limit) == 0
    output = capsys.readouterr()
    assert f"dropped {sum(n > limit for n in lengths)} of 24 train prompts" in output.out + output.err
    used = [group.prompt for step in (1, 2) for group in read_rollouts(small.runs / "small", step)]
    assert max(map(len, Renderer(tokenizer).all_prompt_ids(used))) <= limit
    assert small.train("--train.max_prompt_tokens", 1) == 2
    assert "all 24 train prompts" in capsys.readouterr().err


def test_long_prompts_of_an_endless_split_are_replaced_and_counted(small: SmallRuns) -> None:
    tokenizer = word_tokenizer(make_task("abacus").words())  # type: ignore[attr-defined]
    lengths = sorted(map(len, Renderer(tokenizer).all_prompt_ids(make_task("abacus").prompts("train")[:200])))
    limit = lengths[100]
    words = ("--task.args", "{eval_size = 10}", "--train.max_prompt_tokens", limit, "--sft.steps", 2, "--sft.batch", 4)
    assert small.train(*words, "--train.steps", 4) == 0
    used = [group.prompt for step in range(1, 5) for group in read_rollouts(small.runs / "small", step)]
    assert max(map(len, Renderer(tokenizer).all_prompt_ids(used))) <= limit and len({p.id for p in used}) == 12
    counts = [row.get("prompts/too_long", 0) for row in small.metrics() if "reward/mean" in row]
    replaced = sum(int(prompt.id.rpartition("/")[2]) > 10**6 for prompt in used)
    assert 0 < replaced <= sum(counts)
