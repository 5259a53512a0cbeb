"""`assay.train` with objects of a program: data, rewards, models, parts of the algorithm, callbacks; and what the saved
run shows, as text and as html, in a notebook too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import SmallRuns

import assay
from assay.api.arguments import SHORT, in_python_words, lora_settings, overrides_of, python_errors, task_settings
from assay.api.session import console_warnings
from assay.config import TrainConfig
from assay.rewards import JudgePool, functions
from assay.rewards.functions import FunctionJudge
from assay.runs.console import Console
from assay.tasks import make_task
from assay.types import Message, Prompt, Status, UserError, Verdict

ROWS = [{"question": f"{a} + {b} = ", "answer": str(a + b)} for a in range(6) for b in range(5)]
SMALL: dict[str, Any] = {
    "model": {"source": "preset:nano", "tokenizer": "characters"},
    "steps": 1,
    "prompts": 2,
    "samples": 2,
    "max_new_tokens": 4,
    "quiet": True,
    "eval": {"final_examples": 2},
}


@pytest.fixture
def small(tmp_path: Path, no_curves: None) -> dict[str, Any]:
    """Arguments of a small run, which judges in this process: worker processes take longer to start than it takes."""
    return {**SMALL, "runs_dir": str(tmp_path / "runs"), "data": ROWS, "reward.workers": 0}


def rewards_of(run: assay.SavedRun) -> set[float]:
    return {rollout.reward for group in run.rollouts() for rollout in group.rollouts}


def test_functions_of_the_program_are_rewards(small: dict[str, Any]) -> None:
    bonus = 0.25

    def trl(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        assert len(answer) == len(completions)
        return [0.5 for _ in completions]

    async def verl(solution_str: str, ground_truth: str, data_source: str) -> float:
        await asyncio.sleep(0)
        return float(int(ground_truth) >= 0)

    run = assay.train(**small, reward=[(lambda completion, answer: bonus, 2.0), trl, (verl, 4)])
    assert rewards_of(run) == {2 * 0.25 + 0.5 + 4.0}
    row = next(row for row in run.metrics if "reward/mean" in row)
    assert row["parts/lambda"] == 0.25 and row["parts/trl"] == 0.5 and row["parts/verl"] == 1.0
    assert run.config["reward"]["functions"][1].endswith(":trl") and run.summary["data"].startswith("24 rows")


def test_functions_run_in_judge_processes_unless_they_cannot_be_sent_there(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    del small["reward.workers"]
    seen: list[str] = []
    lock = threading.Lock()

    def sent(completion: str, answer: str) -> float:
        seen.append(completion)
        return float(len(seen) > 0)

    def kept(completion: str, answer: str) -> float:
        with lock:
            seen.append(completion)
        return 1.0

    assert rewards_of(assay.train(**small, reward=sent)) == {1.0} and not seen
    run = assay.train(**{**small, "quiet": False}, reward=kept)
    assert len(seen) > 4 and "kept runs in this process" in capsys.readouterr().out
    assert run.config["reward"]["workers"] == 0
    with pytest.raises(UserError, match="worker processes"):
        assay.train(**small, reward=kept, **{"reward.workers": 1})


def test_a_function_that_hangs_in_this_process_causes_a_warning() -> None:
    judge = FunctionJudge.of(lambda completion, answer: time.sleep(0.5) or 1.0)
    with JudgePool(judge, workers=0, timeout_s=0.1) as pool, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pool.judge([("a", "b", {})])[0].reward == 1.0
    assert len(caught) == 1 and "0.1 s per answer" in str(caught[0].message)


class Shown(Console):
    """A console that keeps its warnings."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


class FirstIsBetter:
    """A judge that compares the answers to a prompt."""

    sees_group = True

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return self.judge_group([completion], answer, fields)[0]

    def judge_group(self, completions: list[str], answer: str, fields: Mapping[str, Any]) -> list[Verdict]:
        return [Verdict(0.1 + 0.1 * (i == 0), Status.WRONG) for i, _ in enumerate(completions)]


class Echo(assay.Task):
    name = "echo"

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}/{i}", (Message(role="user", content=split[: i + 1]),), "x") for i in range(4)]


class Steps(assay.Env):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "t", {}

    def step(self, action: str) -> Any:
        return "", 0.75, True, False, {}


def test_judges_tasks_and_environments_are_objects(small: dict[str, Any]) -> None:
    assert rewards_of(assay.train(**{**small, "data": Echo()}, reward=FirstIsBetter())) == {0.1, 0.2}
    del small["data"]
    assert rewards_of(assay.train(**small, env=Steps)) == {0.75}


def test_parts_of_the_algorithm_are_functions_and_classes(small: dict[str, Any]) -> None:
    class Push(assay.LossTerm[Any]):
        name = "push"

        def per_token(self, batch: Any) -> Any:
            from assay.algos import TermOutput

            return TermOutput(0.0 * batch.logprobs + 1.0)

    def constant(groups: Any) -> Any:
        return [[3.0] * len(group) for group in groups]

    run = assay.train(
        **small, reward=lambda completion, answer: 1.0, algo={"advantage": constant, "terms": [Push], "filter": bool}
    )
    assert {r.advantage for group in run.rollouts() for r in group.rollouts} == {3.0}
    assert next(row["loss/push"] for row in run.metrics if "loss/push" in row) == 1.0


def test_data_comes_in_many_forms(tmp_path: Path) -> None:
    def sizes(data: Any, *args: Any, **kwargs: Any) -> tuple[int, int, int]:
        entry = task_settings(data, *args, runs_dir=tmp_path, **kwargs)["task"]
        task = make_task(entry["name"], entry["path"], **entry["args"])
        return tuple(len(task.prompts(split)) for split in ("train", "validation", "test"))  # type: ignore[return-value]

    assert sizes(ROWS) == sizes(row for row in ROWS) == (24, 3, 3)
    assert sizes(ROWS, 0.2) == (18, 6, 6)
    assert sizes(ROWS[:20], ROWS[20:]) == sizes({"train": ROWS[:20], "test": ROWS[20:]}) == (18, 2, 10)
    mapped = [{"q": row["question"], "a": {"b": row["answer"]}} for row in ROWS]
    assert sizes(mapped, columns={"question": "q", "answer": "a.b"}) == (24, 3, 3)
    first, second = (task_settings(ROWS, runs_dir=tmp_path)["task"]["path"] for _ in range(2))
    assert first == second  # the same rows are written once
    for wrong, message in (
        ([], "no rows"),
        (["a"], "dicts as rows"),
        ([{"question": object(), "answer": "1"}], "type object"),
        (3, "must be rows"),
        ({"trian": ROWS}, "trian"),
    ):
        with pytest.raises(UserError, match=message):
            task_settings(wrong, runs_dir=tmp_path)
    with pytest.raises(UserError, match=r"between 0 and 0\.5"):
        task_settings(ROWS, 0.7, runs_dir=tmp_path)
    with pytest.raises(UserError, match="needs data"):
        task_settings(None, ROWS)


def test_arguments_become_settings_with_suggestions() -> None:
    given = {"lr": 1e-4, "optim": {"warmup": 3, "lr": 1.0}, "sft.args": {"a": 1}, "prompt": {}, "seed": None}
    assert overrides_of(given, TrainConfig) == {"optim.lr": 1e-4, "optim.warmup": 3, "sft.args": {"a": 1}, "prompt": {}}
    for wrong, message in (
        ({"stpes": 3}, "did you mean 'steps'"),
        ({"rewards": print}, "did you mean 'reward'"),
        ({"train_dataset": ROWS}, "did you mean 'data'"),
        ({"lr": 1.0, "optim.lr": 2.0}, "same setting"),
        ({"optim": {"lr": object()}}, r"optim\.lr"),
    ):
        with pytest.raises(UserError, match=message):
            overrides_of(wrong, TrainConfig, SHORT, ("data", "reward"))
    with pytest.raises(UserError, match=r"'optim\.lr' in the arguments"):
        assay.train(model="preset:nano", data=ROWS, optim={"lr": "fast"})
    with pytest.raises(UserError, match=r"optim\.lr"):
        assay.train(model="preset:nano", data=ROWS, learning_rate=1.0)
    for left_out in ("model", "data"):
        with pytest.raises(UserError, match=f"pass {left_out}="):
            assay.train(**{"model": "preset:nano", "data": ROWS, left_out: None})


class NoVerdict:
    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Any:
        return 0.5


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"config": {"steps": 3}}, "config must be the path of a TOML file, not dict"),
    ({"callbacks": print}, "callbacks must be a list"),
    ({"tokenizer": "folder"}, "tokenizer is for a transformers model"),
    ({"columns": "question"}, "columns must be a dict"),
    ({"eval_data": 10}, r"a share of data such as 0\.1, not 10"),
    ({"data": ROWS[:2]}, "data has too few rows"),
    ({"data": ROWS[:2], "eval_data": 0.4}, "data has too few rows"),
    ({"data": [*ROWS, {"question": "x"}]}, r'^row 30 of data has no column "answer".* write an empty one$'),
    ({"data": {"train": ROWS, "test": [{}]}}, r"^row 0 of data\['test'\] has no column"),
    ({"data": [{"question": "x", "answer": b"1"}]}, "^row 0 has a value of type bytes"),
    ({"reward": NoVerdict}, "not the class NoVerdict: pass an object of it"),
    ({"reward": NoVerdict()}, r"a judge, which takes .* must return a Verdict, not 0\.5"),
    ({"reward": lambda completion: 1.0}, r"^lambda takes \(completion\)"),
    ({"data": None, "env": 3}, "^int must be an Env class"),
    ({"config": "my.toml", "resume": "sort"}, "a resumed run has its own settings: leave out the config"),
    ({"data": {"train": ROWS[:2]}, "eval_data": 0.4}, "data has too few rows"),  # held out, as of a list
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_mistakes_are_one_line(small: dict[str, Any], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        assay.train(**{**small, **wrong})
    assert "\n" not in str(error.value) and "python-" not in str(error.value)


def test_errors_name_arguments_instead_of_options() -> None:
    text = "lower it, e.g. assay train --resume runs/a --optim.lr 1e-05, or set task.name, e.g. --task abacus"
    expected = "lower it, e.g. assay.train(resume='runs/a', optim={'lr': 1e-05}), or set task.name, e.g. task='abacus'"
    with pytest.raises(UserError) as error, python_errors():
        raise UserError(text)
    assert str(error.value) == expected
    assert in_python_words("start vLLM with --enable-sleep-mode") == "start vLLM with --enable-sleep-mode"


def test_a_transformers_model_is_trained(small: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = assay.train(**small, reward=lambda completion, answer: 0.0)
    folder = str(first.path / "checkpoints" / "step-000001" / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    run = assay.train(**{**small, "model": model, "tokenizer": tokenizer}, reward=lambda completion, answer: 0.0)
    loaded = AutoModelForCausalLM.from_pretrained(run.path / "checkpoints" / "step-000000" / "model")
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    with pytest.raises(UserError, match="tokenizer"):
        assay.train(**{**small, "model": model})


def test_fine_tuning_on_solutions(small: dict[str, Any]) -> None:
    rows = [{**row, "solution": row["answer"]} for row in ROWS]
    run = assay.sft(**{**small, "data": rows, "steps": 3}, lr=1e-3)
    assert run.summary["sft"]["steps"] == 3 and ": finished, 3 steps" in repr(run)
    with pytest.raises(UserError, match="pass steps"):
        assay.sft(**{**small, "data": rows, "steps": None})
    with pytest.raises(UserError, match="have no worked solution"):
        assay.sft(**small)


def test_settings_of_peft() -> None:
    @dataclass
    class Config:  # what PEFT's LoraConfig has; that package is not installed
        peft_type: str = "LORA"
        r: int = 8
        lora_alpha: int = 16
        target_modules: set[str] | None = None
        lora_dropout: float = 0.0
        init_lora_weights: bool | str = True
        exclude_modules: list[str] | None = None
        rank_pattern: dict[str, int] = field(default_factory=dict)

    given = Config(r=4, target_modules={"v_proj", "q_proj"})
    assert lora_settings(given) == {"lora.rank": 4, "lora.alpha": 16.0, "lora.targets": ["q_proj", "v_proj"]}
    assert lora_settings(Config())["lora.targets"] == ["all-linear"]
    unsupported: list[tuple[str, Any]] = [("lora_dropout", 0.1), ("init_lora_weights", "pissa")]
    for name, value in [*unsupported, ("exclude_modules", ["q_proj"]), ("rank_pattern", {"q_proj": 2})]:
        with pytest.raises(UserError, match=f"peft_config.{name} = .* is not supported"):
            lora_settings(Config(**{name: value}))
    with pytest.raises(UserError, match="PEFT"):
        lora_settings(3)


class Recorded(assay.Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_step(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("step", step))
        if step == 2:
            run.request_stop()

    def on_evaluation(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluation", step))

    def on_checkpoint(self, run: Any, step: int, path: Path) -> None:
        assert (path / "state.json").is_file()
        self.calls.append(("checkpoint", step))

    def on_stop(self, run: Any, summary: Mapping[str, Any]) -> None:
        self.calls.append(("stop", summary.get("steps", -1)))


def worth(value: float) -> Any:
    def reward(completion: str, answer: str) -> float:
        return value * len(completion)

    return reward


def test_callbacks_follow_a_run_and_may_stop_it(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, steps = Recorded(), list[int]()
    arguments = {**small, "steps": 3, "name": "followed"}
    callbacks = [recorded, lambda run, step, metrics: steps.append(step)]
    run = assay.train(**arguments, reward=worth(0.1), callbacks=callbacks)
    start = [("evaluation", 0), ("checkpoint", 0), ("step", 1), ("step", 2)]
    assert recorded.calls == [*start, ("checkpoint", 2), ("stop", -1)] and steps == [1, 2]
    assert run.state == "stopped" and not run.summary
    monkeypatch.setattr(functions, "_objects", {})  # as in another process
    again: dict[str, Any] = {"resume": "followed", "runs_dir": small["runs_dir"], "quiet": True}
    with pytest.raises(UserError, match=r"pass it again \(reward"):
        assay.train(**again)
    with pytest.raises(UserError, match="differs from what run followed was started with"):
        assay.train(**again, reward=worth(0.2))
    resumed = assay.train(**again, reward=worth(0.1))
    assert resumed.state == "finished" and resumed.summary["steps"] == 3
    whole = assay.train(**{**arguments, "name": "whole"}, reward=worth(0.1))
    assert [r.token_ids for g in whole.rollouts() for r in g.rollouts] == [
        r.token_ids for g in resumed.rollouts() for r in g.rollouts
    ]

    def broken(run: Any, step: int, metrics: Mapping[str, float]) -> None:
        raise KeyError("x")

    with pytest.raises(UserError, match=r"callback .*broken failed: KeyError"):
        assay.train(**small, reward=worth(0.1), callbacks=[broken])


def test_the_same_settings_give_the_same_run_as_the_command_line(tmp_path: Path, small: dict[str, Any]) -> None:
    runs = SmallRuns(tmp_path)
    assert runs.train() == 0
    run = assay.train(runs.config, name="python", runs_dir=str(runs.runs), quiet=True)
    assert run.summary == runs.summary("python")
    runs.same_run("small", "python", 2)


def test_a_session_works_in_an_event_loop(small: dict[str, Any]) -> None:
    async def loop() -> list[dict[str, float]]:
        metrics = []
        with assay.session(**{**small, "steps": 2}, reward=lambda completion, answer: 0.5) as run:
            while not run.done():
                groups = await run.asample()
                run.credit(groups)
                metrics.append(run.update(groups))
                run.record(groups)
        assert run.summary["steps"] == 2
        return metrics

    assert [row["reward/mean"] for row in asyncio.run(loop())] == [0.5, 0.5]


def test_a_saved_run_shows_itself(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assay.train(**small, reward=lambda completion, answer: 0.5, name="shown")
    run = assay.load_run("shown", small["runs_dir"])
    assert repr(run).startswith("run shown: finished, 1 step, accuracy")
    monkeypatch.chdir(small["runs_dir"])
    relative = assay.load_run("shown", ".")
    monkeypatch.chdir("/")
    assert relative.summary == run.summary  # after a change of the folder
    assert "<table" in run._repr_html_() and "shown" in run._repr_html_()
    rollouts = run.rollouts(step=1)
    assert len(rollouts) == 2 and "4 rollouts, mean reward 0.5" in repr(rollouts)
    assert "&lt;" not in repr(rollouts) and "<table" in rollouts._repr_html_()
    tokens = rollouts.tokens(1, 0)
    rollout = rollouts[1].rollouts[0]
    assert [row["id"] for row in tokens] == rollout.token_ids
    assert [row["logprob"] for row in tokens if row["trained"]] == rollout.turns[0].completion.engine_logprobs
    assert run.checkpoints == [0, 1]
    with pytest.raises(UserError, match="unknown run 'other'"):
        assay.load_run("other", small["runs_dir"])


@pytest.mark.slow
def test_memory_is_released_after_a_run(small: dict[str, Any]) -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())

    counts = []
    for _ in range(10):
        assay.train(**small, reward=lambda completion, answer: 0.5)
        counts.append((alive(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert all(last <= second for last, second in zip(counts[-1], counts[1], strict=True)), counts


def test_runs_in_two_threads_restore_how_warnings_are_shown() -> None:
    before = warnings.showwarning
    shown = [Shown(), Shown()]
    first, second = map(console_warnings, shown)
    first.__enter__()
    second.__enter__()
    warnings.showwarning("late", UserWarning, "", 1)
    first.__exit__(None, None, None)  # not the one that was entered last
    warnings.showwarning("later", UserWarning, "", 1)
    second.__exit__(None, None, None)
    assert warnings.showwarning is before and shown[1].texts == ["late", "later"]


def test_importing_is_fast() -> None:
    code = (
        "import sys, time; started = time.perf_counter(); import assay; took = time.perf_counter() - started\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules and took < 0.2, took\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_functions_work_after_importing_every_module(tmp_path: Path) -> None:
    code = (
        "import assay, pkgutil, importlib\n"
        "for module in pkgutil.walk_packages(assay.__path__, 'assay.'):\n"
        "    if not module.name.endswith('__main__') and 'kernels' not in module.name:\n"
        "        try: importlib.import_module(module.name)\n"
        "        except ImportError as error: assert 'assay' not in str(error.name), error\n"
        "for name in assay.__all__: assert callable(getattr(assay, name)), name\n"
        f"rows = {ROWS!r}\n"
        "run = assay.train(model={'source': 'preset:nano', 'tokenizer': 'characters'}, data=rows, steps=0,\n"
        "                  quiet=True, reward=lambda completion, answer: 1.0, max_new_tokens=2, name='imported')\n"
        "with assay.serve(run.model(), device='cpu') as server: assert server.url.startswith('http')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
