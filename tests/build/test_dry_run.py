"""Checks before a run: settings, worked solutions, unknown words, the environment, and a trial of the user's code.

What the microbenchmark measures, on a real run: work that equals that of the run, and usable speeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import SmallRuns, mostly_slow

from assay.build import dry_run
from assay.build.cost import Answers, Line, Speeds, Work, predict
from assay.build.dry_run import describe_cost, diagnose_config, group_tokens, measure, try_update
from assay.build.problems import check_demonstrations, unknown_prompt_words
from assay.build.run import assemble
from assay.checks import Diagnosis
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.engine.base import SamplingParams
from assay.models import fingerprint
from assay.runs.console import Console
from assay.runs.directory import read_metrics
from assay.runs.rollouts import read_rollouts
from assay.tasks import make_task
from assay.text import Renderer, char_tokenizer, word_tokenizer
from assay.training.learner.pack import Row, pack
from assay.training.parallel import start_mesh
from assay.training.run import TrainingRun
from assay.types import Message, Prompt, UserError


def config(tmp_path: Path, **changes: Any) -> TrainConfig:
    small = SmallRuns(tmp_path)
    settings = {"reward.function": "", "train.prompts": 16, "train.samples": 16, **changes}
    return load_settings(TrainConfig, small.config, settings)


def names(causes: list[Diagnosis]) -> list[tuple[str, str]]:
    return [(cause.name, cause.severity) for cause in causes]


def test_a_config_that_can_train_has_no_causes(tmp_path: Path) -> None:
    assert diagnose_config(config(tmp_path)) == []


CASES: dict[str, tuple[dict[str, Any], list[tuple[str, str]], str]] = {  # overrides, causes, part of the first one
    "one sample": ({"train.samples": 1}, [("zero_loss", "error")], "batch_mean"),
    "no reward": ({"reward.accuracy": 0.0}, [("zero_loss", "error")], "reward.accuracy"),
    "high rate": ({"optim.lr": 5.0}, [("learning_rate_high", "warning")], "0.3M parameters"),
    "nothing is trained": ({"lora.quantize": "nf4"}, [("refused", "error")], "lora.rank"),
    "unknown task": ({"task.name": "abacas"}, [("refused", "error")], "abacus"),
    "unknown model": ({"model.source": "preset:nanoo"}, [("refused", "error")], "nano"),
    "truncated sampling": ({"sampling.top_k": 5}, [("risky_setting", "note")], "top_k"),
    "no effect": ({"env.max_steps": 5}, [("unused_setting", "note")], "env.max_steps"),
    "two": (
        {"optim.lr": 1e-12, "train.steps": 5, "optim.warmup": 9},
        [("learning_rate_low", "warning")],
        "optim.lr = 1e-12 is below",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_that_cannot_train_or_do_harm_are_named(name: str, tmp_path: Path) -> None:
    changes, expected, text = CASES[name]
    causes = diagnose_config(config(tmp_path, **changes))
    assert names(causes) == expected and text in str(causes[0])


def test_problems_in_both_splits_and_a_broken_judge_are_found(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    for split, part in (("train", rows), ("validation", rows[:3]), ("test", [*rows[:4], rows[0] | {"question": "x"}])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    given = {"task.name": "jsonl", "task.path": str(tmp_path), "task.args": {}}
    (tmp_path / "code.py").write_text("def broken(completion, answer):\n    raise ValueError('no')\n")
    causes = diagnose_config(config(tmp_path, **given, **{"reward.function": f"{tmp_path}/code.py:broken"}))
    assert [cause.name for cause in causes] == ["judge_fails", "leakage"]
    assert "4 of the 5 test problems" in causes[1].evidence and "3 of the 3 validation" in causes[1].evidence


def test_a_model_that_does_not_fit_into_memory_is_found_without_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    monkeypatch.setattr(dry_run, "free_memory", lambda device: 64 * 2**30)
    (cause,) = diagnose_config(config(tmp_path, **{"model.source": str(folder), "optim.lr": 1e-6}))
    # 6.7 billion weights: 16 bytes for training, 4 for the engine in float32.
    assert cause.name == "memory_full" and "64.0 GiB are free" in cause.evidence and "125.8 GiB" in cause.evidence
    assert "lora.rank (now 0)" in cause.remedy
    assert not diagnose_config(config(tmp_path, **{"model.source": str(folder), "optim.lr": 1e-6, "lora.rank": 8}))


CODE = """
import torch
from assay.envs import Env

def floats(rewards):
    return [float(r.mean()) for r in rewards]

def zeros(rewards):
    return [0 * r for r in rewards]

def misspelled(rewards):
    return rewrads

def mean_loss(logprobs, behaviour, advantages, low, high):
    return -(advantages * logprobs).mean(), {}

def detached(logprobs, behaviour, advantages, low, high):
    return -advantages * logprobs.detach(), {}

def wrong_signature(logprobs, advantages):
    return -advantages * logprobs, {}

def infinite(logprobs, behaviour, advantages, low, high):
    return logprobs / 0, {}

class Broken(Env):
    name = "broken"

    def reset(self, *, seed=None, options=None):
        return f"state {seed}", {}

    def step(self, action):
        return 1 / 0

class Fine(Broken):
    name = "fine"

    def step(self, action):
        return "", 1.0, True, False, {}
"""


def problem(name: str, solution: str | None, question: str = "1 + 1 ?") -> Prompt:
    return Prompt(name, (Message(role="user", content=question),), "2", solution)


def warnings_of(solutions: Sequence[str | None], max_length: int = 64) -> list[str]:
    prompts = [problem(f"p{number}", solution) for number, solution in enumerate(solutions)]
    return list(check_demonstrations(prompts, Renderer(char_tokenizer()), max_length))


def test_solutions_that_are_too_long_empty_or_unreadable_are_counted() -> None:
    assert not warnings_of(["2", "it is 2"])
    long, empty, unknown = warnings_of(["2", "2" * 80, "", " ", "2", "two é"])
    assert "1 of 6 worked solutions" in long and "(e.g. p1)" in long and "model.max_length" in long
    assert "2 of 6 worked solutions are empty (e.g. p2)" in empty
    assert "1 of 6 worked solutions" in unknown and "'é' in p5" in unknown and "model.tokenizer" in unknown


def test_missing_solutions_and_full_contexts_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 of 3 problems have no worked solution.*p1.*sft.steps"):
        warnings_of(["2", None, None])
    with pytest.raises(UserError, match=r"fill the context of 9 tokens.*model.max_length"):
        warnings_of(["2"], max_length=9)


def test_prompts_with_words_unknown_to_a_word_tokenizer_are_counted() -> None:
    renderer = Renderer(word_tokenizer(["1", "+", "?"]))
    prompts = [problem("a", None), problem("b", None, "1 plus 1 ?")]
    (warning,) = unknown_prompt_words("train", prompts, renderer)
    assert "1 of 2 train prompts" in warning and "'plus' in b" in warning


def test_rows_of_a_file_beyond_the_first_are_checked_for_solutions_and_space() -> None:
    renderer = Renderer(char_tokenizer())
    rows = [problem(f"p{number}", "2") for number in range(1500)]
    rows[1400] = problem("late", None)
    with pytest.raises(UserError, match=r"1 of 1,500 problems have no worked solution.*late"):
        list(check_demonstrations(rows, renderer, 64, limit=1000))
    rows[1400] = problem("long", "2", question="1 + 1 ? " * 20)
    with pytest.raises(UserError, match=r"1 of 1,500 prompts fill the context of 64 tokens.*long"):
        list(check_demonstrations(rows, renderer, 64, limit=1000))
    assert not list(check_demonstrations(rows, renderer, 512, limit=1000))


def test_only_rows_that_could_fill_the_context_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, tokenized = Renderer(char_tokenizer()), []
    worked_example = Renderer.worked_example

    def counted(self: Renderer, prompt: Prompt) -> tuple[list[int], list[int]]:
        tokenized.append(prompt.id)
        return worked_example(self, prompt)

    monkeypatch.setattr(Renderer, "worked_example", counted)
    rows = [problem(f"p{number}", "2") for number in range(30)] + [problem("longer", "2", "1 + 1 ? " * 20)]
    assert not list(check_demonstrations(rows, renderer, 180, limit=10))
    assert tokenized == [*(f"p{number}" for number in range(10)), "longer"]


def test_rows_of_files_in_a_mix_are_all_checked(tmp_path: Path) -> None:
    rows = [{"question": f"{n} ?", "answer": n, "solution": f"{n}"} for n in range(40)]
    del rows[33]["solution"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parts = [{"name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "args": {"val_size": 0}}, {"name": "abacus"}]
    prompts = make_task("mix", tasks=parts).prompts("train")
    with pytest.raises(UserError, match="1 of 40 problems have no worked solution"):
        list(check_demonstrations(prompts, Renderer(char_tokenizer()), 512, limit=4))


def test_a_dry_run_and_an_evaluation_warn_of_unknown_words_in_evaluation_prompts(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    data = small.folder / "data"
    data.mkdir()
    for split, words in (("train", "a b"), ("validation", "a c"), ("test", "a é")):
        rows = [{"question": f"{n} {words}", "answer": n} for n in range(20)]
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = ("--task", "jsonl", "--task.path", data, "--task.args", "{}", "--model.tokenizer", "characters")
    (line,) = [line for line in stdout_of(small.train(*own, "--dry-run")).splitlines() if "does not know" in line]
    assert "5 of 5 test prompts" in line and "'é' in " in line
    assert small.train(*own, "--train.steps", 1) == 0
    capsys.readouterr()
    assert small("eval", "run:small@last", "--eval.final_examples", 3) == 0
    assert "3 of 3 test prompts contain words that the tokenizer does not know" in capsys.readouterr().out


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> SmallRuns:
    (tmp_path / "code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return SmallRuns(tmp_path)


FAILURES: dict[str, tuple[list[object], str]] = {
    "an advantage that returns floats": (["--algo.advantage", "code.py:floats"], "one finite number per reward"),
    "an advantage that raises": (["--algo.advantage", "code.py:misspelled"], "NameError"),
    "a loss that returns a mean": (["--algo.policy_loss", "code.py:mean_loss"], "one value per token"),
    "a loss without gradient": (["--algo.policy_loss", "code.py:detached"], "no gradient"),
    "a loss with another signature": (["--algo.policy_loss", "code.py:wrong_signature"], "TypeError"),
    "a loss that is not finite": (["--algo.policy_loss", "code.py:infinite"], "is not finite for invented answers"),
    "an environment whose step raises": (["--env", "code.py:Broken"], "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_dry_run_fails_where_a_run_would(name: str, small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = FAILURES[name]
    env = ["--task.args", "{}", "--task", "", "--model.tokenizer", "characters"] if "--env" in words else []
    assert small.train("--dry-run", *words, *env) == 2
    result = capsys.readouterr()
    assert message in result.err and result.err.count("\n") == 1 and "Traceback" not in result.out + result.err
    assert not small.runs.exists()


def test_a_dry_run_warns_if_there_is_no_gradient(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.train("--dry-run", "--algo.advantage", "code.py:zeros") == 0
    assert "no gradient: check algo.advantage" in capsys.readouterr().out


def test_a_dry_run_steps_an_environment(small: SmallRuns, stdout_of: Callable[..., str]) -> None:
    words = ("--env", "code.py:Fine", "--task", "", "--task.args", "{}", "--model.tokenizer", "characters")
    output = stdout_of(small.train("--dry-run", *words))
    assert "advantage and loss work" in output and "task code.py:Fine: an endless train split; 2 steps" in output


SETTINGS: dict[str, list[object]] = {
    "ppo": ["--algo.recipe", "ppo"],
    "remax": ["--algo.recipe", "remax"],
    "lora": ["--lora.rank", 2, "--algo.kl_coef", 0.1],
    "long answers only": ["--sampling.min_new_tokens", 8, "--algo.mask_overlong", "true"],
}


@pytest.mark.parametrize("name", mostly_slow(SETTINGS, quick=["ppo"]))
def test_the_trial_update_works_with_all_kinds_of_algorithms(
    name: str, small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small.train("--dry-run", *SETTINGS[name]) == 0, capsys.readouterr().err
    assert "advantage and loss work" in capsys.readouterr().out and not small.runs.exists()


def test_the_trial_update_changes_no_weight(small: SmallRuns) -> None:
    from assay.config import TrainConfig
    from assay.config.settings import load_settings

    cfg = load_settings(TrainConfig, small.config, {"optim.weight_decay": 0.1})
    run = assemble(cfg, Console(quiet=True), "preset:nano", start_mesh(cfg), 0.0)
    before = fingerprint(run.learner.policy.named_parameters())
    with run.collector:
        line = try_update(cfg, run.collector, run.learner, run.source.prompts.next(2))
    assert "gradient norm" in line
    assert fingerprint(run.learner.policy.named_parameters()) == before


def test_the_time_of_the_start_is_part_of_the_prediction() -> None:
    line = Line(0.0, 0.0)
    work = Work(steps=10, prompts=4, samples=8, prompt_tokens=100, answers=Answers.of([5], 0, 8), max_batch=64)
    lines = [*describe_cost(work, Speeds(line, 0.0, line, line, 0.0, 20.0), "abacus", torch.device("cpu"))]
    assert "(start 20s)" in lines[1]


# The microbenchmark


def built(folder: Path, settings: Mapping[str, Any]) -> TrainingRun:
    cfg = load_settings(TrainConfig, SmallRuns(folder).config, settings)
    return assemble(cfg, Console(quiet=True), "preset:nano", start_mesh(cfg), 0.0)


def measured(run: TrainingRun) -> tuple[Speeds, Work]:
    with run.collector:
        return measure(run, run.source.prompts.next(4), start_s=1.5)


def test_a_measurement_changes_no_weights_and_predicts_a_positive_time(tmp_path: Path) -> None:
    run = built(tmp_path, {})
    before = fingerprint(run.learner.policy.named_parameters())
    speeds, work = measured(run)
    assert fingerprint(run.learner.policy.named_parameters()) == before == run.collector.engine.fingerprint()
    assert min(speeds.position.at(1), speeds.judge.at(1), speeds.update.at(1), speeds.sync) > 0
    cost = predict(work, speeds)
    assert 0 < cost.step < 60 and cost.total > 1.5 + work.steps * cost.step


def test_the_work_is_that_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers always reach their limit here. The run says how many evaluations and tokens it had."""
    settings = {"train.steps": 4, "eval.every": 2, "save.every": 2, "save.keep": 1, "save.best": False}
    _, work = measured(built(tmp_path, settings))
    small = SmallRuns(tmp_path)
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value).lower())]
    assert small.train("--name", "run", *words) == 0, capsys.readouterr().err
    path = small.runs / "run"
    assert work.steps * work.prompts * work.samples == 4 * len(read_rollouts(path, 1)) * 3
    evaluations = sum(part.times for part in work.evaluations)
    assert evaluations == sum("time/eval" in row for row in read_metrics(path))
    assert {part.problems for part in work.evaluations} == {4, 5}
    assert work.kept == len(list((path / "checkpoints").glob("step-*")))
    weights = (path / "checkpoints" / "step-000004" / "model" / "model.safetensors").stat().st_size
    assert work.checkpoint_bytes == pytest.approx(3 * weights, rel=0.05)  # and two moments


def test_tokens_of_an_update_are_those_of_its_packed_rows(tmp_path: Path) -> None:
    """The trainer computes the shared prompt of a group once."""
    run = built(tmp_path, {"train.samples": 3})
    with run.collector:
        params = SamplingParams(n=3, max_new_tokens=6)
        (group,) = run.collector.collect(run.source.prompts.next(1), params, (0, 0))
    rows = [Row.of(rollout, 1.0, ()) for rollout in group.rollouts]
    batch = pack(rows, "cpu")
    assert sum(batch.shared) > 0 and group_tokens(group) == sum(batch.lengths) - sum(batch.shared)


def test_observations_of_an_environment_are_counted(tmp_path: Path) -> None:
    settings = {"task.name": "", "env.name": "guess", "env.args.high": 4, "env.args.tries": 2, "env.max_tokens": 1}
    _, work = measured(built(tmp_path, {**settings, "reward.function": ""}))
    assert work.observed > 0 and work.answers.mean <= 2
