"""`assay train`: files, console output and error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns, gpt2_folder, preset_folder

from assay.cli.main import main
from assay.cli.train import explain_sampling
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs import Run
from assay.runs.directory import RunFiles
from assay.runs.metrics import draw_curves
from assay.text import char_tokenizer
from assay.training import run as train_run
from assay.training.sources import OnPolicySource

TASK_FILE = '''
"""A task of one's own: is the number even?"""
from assay.tasks import Task
from assay.types import Prompt


class Parity(Task):
    name = "parity"
    default_extract = "last-number"

    def __init__(self, largest: int = 20) -> None:
        self.largest = largest

    def prompts(self, split):
        place = ("train", "validation", "test").index(split)
        numbers = [n for n in range(self.largest) if (n % 3) == place]
        return [
            Prompt(f"parity/{n}", ({"role": "user", "content": f"{n} :"},), str(n % 2), solution=f"{n % 2}")
            for n in numbers
        ]

    def words(self):
        return [":", *map(str, range(self.largest))]


def close(completion, answer):
    return 1.0 if completion.strip() == answer else len(completion) % 3 / 10


async def later(completion, answer):
    return {"reward": close(completion, answer), "parsed": completion[:1], "parts": {"length": len(completion)}}
'''


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    """A finished run with judge workers, a warm start and all files."""
    small = SmallRuns(tmp_path_factory.mktemp("finished"))
    words = ("--sft.steps", 2, "--sft.batch", 4, "--reward.workers", 1, "--seed", 11, "--eval.every", 1)
    with redirect_stdout(StringIO()) as output, redirect_stderr(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_run, "draw_curves", draw_curves)
        assert small.train(*words) == 0
    assert "could not be drawn" not in output.getvalue(), output.getvalue()
    return small


def is_fraction(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1


def test_contents_of_the_summary(finished: SmallRuns) -> None:
    summary = finished.summary()
    assert (summary["task"], summary["model"], summary["algorithm"]) == ("abacus", "preset:nano", "grpo")
    assert (summary["steps"], summary["seed"]) == (2, 11)
    assert isinstance(summary["wall_s"], float) and summary["wall_s"] > summary["sft"]["wall_s"] > 0
    steps = [row for row in finished.metrics() if "time/step" in row]
    spent = sum(row["time/step"] - row["time/eval"] for row in steps)
    assert len(steps) == 2 and summary["train_s"] == pytest.approx(spent, abs=0.01)
    for name in ("before", "after"):
        measured = summary[name]
        low, high = measured["ci95"]
        assert is_fraction(measured["accuracy"]) and is_fraction(low) and is_fraction(high)
        assert low <= measured["accuracy"] <= high and measured["n"] == 5
    paired = summary["paired"]
    assert is_fraction(paired["p_value"]) and all(isinstance(paired[key], int) for key in ("gained", "lost"))
    assert paired["gained"] - paired["lost"] == round(
        5 * (summary["after"]["accuracy"] - summary["before"]["accuracy"])
    )
    assert isinstance(summary["tokens"], int) and 18 <= summary["tokens"] <= 2 * 9 * 8


def test_the_run_directory_is_complete(finished: SmallRuns) -> None:
    run = finished.runs / "small"
    for name in ("config.toml", "metrics.jsonl", "environment.json", "summary.json", "curves.png"):
        assert (run / name).stat().st_size > 0, name
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(f.name for f in (run / "rollouts").iterdir()) == [
        f"step-00000{step}.{kind}" for step in (1, 2) for kind in ("jsonl", "npz")
    ]
    for step in (0, 2):
        assert (finished.checkpoint(step) / "model" / "tokenizer.json").is_file()
    rows = finished.metrics()
    assert [row["sft/step"] for row in rows if "sft/step" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [1, 2]
    assert sum("before/accuracy" in row for row in rows) == sum("after/accuracy" in row for row in rows) == 1
    walls = [row["time/wall"] for row in rows if "time/wall" in row]
    assert walls == sorted(walls)
    saved = load_settings(TrainConfig, run / "config.toml", {})  # all settings, also defaults
    assert (saved.seed, saved.sft.steps, saved.train.prompts, saved.optim.betas) == (11, 2, 3, (0.9, 0.95))


def test_training_starts_from_a_checkpoint_of_another_run(small: SmallRuns, finished: SmallRuns) -> None:
    words = ["train", small.config, "--model", "run:small@best", "--runs_dir", finished.runs, "--name", "from"]
    reward = f"{small.folder}/reward.py:reward"
    assert main([*map(str, words), "--train.steps", "1", "--reward.function", reward]) == 0
    best = json.loads((finished.runs / "small/checkpoints/best.json").read_text())["step"]
    begun, source = (finished.checkpoint(*of) / "model/model.safetensors" for of in ((0, "from"), (best,)))
    assert begun.read_bytes() == source.read_bytes()
    assert finished.summary("from")["model"] == "run:small@best"


def test_results_folder_and_next_commands_are_printed(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.train() == 0
    result = capsys.readouterr()
    output = result.out
    assert re.search(r"before +\d+\.\d %", output) and re.search(r"after +\d+\.\d %", output)
    assert re.search(r"[+-]\d+\.\d points; \d+ problems? gained, \d+ lost, paired p = ", output)
    path = small.runs / "small"
    _, commands = output.split(f"saved in {path}")[1].split("next commands to try:\n")
    assert [line.split()[:3] for line in commands.splitlines()] == [
        ["assay", "runs", str(path)],
        ["assay", "chat", f"run:{path}@0"],
        ["assay", "eval", f"run:{path}@0"],
        ["assay", "export", f"run:{path}@last"],
    ]
    assert re.search(r"step 2/2  reward \d\.\d\d", output)
    assert "\x1b[" not in output and not result.err  # plain lines, because stdout is not a terminal
    before = small.files()
    assert small.train("--train.steps", 1, "--train.prompts", 1, "--eval.final_examples", 1) == 0
    assert "small exists: this run is small-2" in capsys.readouterr().out
    assert small.summary("small-2")["run"] == "small-2"
    assert before.items() <= small.files().items()


def test_overlap_between_train_and_test_is_reported(small: SmallRuns, stdout_of: Callable[..., str]) -> None:
    rows = [{"question": f"{n} + 1", "answer": n + 1} for n in range(30)]
    lines = [json.dumps(row) + "\n" for row in rows]
    data = small.folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(lines[:20]))
    (data / "test.jsonl").write_text("".join(lines[16:26]))
    words = ("--task", "jsonl", "--task.path", data, "--task.args", "{}", "--model.tokenizer", "characters")
    output = stdout_of(small.train(*words, "--eval.final_examples", 0, "--eval.examples", 0, "--train.steps", 1))
    assert re.search(r"warning: [34] of the 10 test problems", output)  # validation is carved
    assert "no overlap between 18 train and 2 validation problems" in output


def test_a_single_file_is_trained_and_measured_on_different_rows(
    small: SmallRuns, stdout_of: Callable[..., str]
) -> None:
    file = small.folder / "mine.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n} + 1", "answer": n + 1}) + "\n" for n in range(40)))
    words = ("--task", "jsonl", "--task.path", file, "--task.args", "{}", "--model.tokenizer", "characters")
    output = stdout_of(small.train(*words, "--eval.final_examples", 0, "--eval.examples", 0, "--train.epochs", 1))
    assert "no overlap between 32 train and 4 test problems" in output
    assert "no overlap between 32 train and 4 validation problems" in output
    assert not [line for line in output.splitlines() if "warning" in line and "were cut off" not in line]
    folder = small.runs / "small"
    trained = {json.loads(line)["prompt_id"] for f in folder.glob("rollouts/*.jsonl") for line in f.open()}
    tested = {json.loads(line)["prompt_id"] for f in folder.glob("evals/*after-test*.jsonl") for line in f.open()}
    assert len(tested) == 4 == small.summary()["after"]["n"] and len(trained) == 32 and not trained & tested


def test_user_defined_task_and_reward(small: SmallRuns) -> None:
    file = small.folder / "parity.py"
    file.write_text(TASK_FILE)
    words = ("--task", f"{file}:Parity", "--task.args.largest", 30, "--eval.final_examples", 0, "--train.steps", 1)
    assert small.train(*words, "--reward.function", f"{file}:close", "--name", "mine", "--reward.workers", 1) == 0
    assert small.summary("mine")["before"]["n"] == 10
    assert small.train(*words, "--reward.function", f"{file}:later", "--name", "async") == 0
    line = json.loads((small.runs / "async/rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert line["prompt_id"].startswith("parity/") and "length" in line["verdict"]["parts"]
    assert small.train(*words, "--reward.function", "", "--sft.steps", 3, "--name", "own-judge") == 0
    assert small.summary("own-judge")["task"] == f"{file}:Parity"


def test_a_dry_run_checks_everything_and_writes_nothing(small: SmallRuns, stdout_of: Callable[..., str]) -> None:
    before = small.files()
    output = stdout_of(small.train("--dry-run", "--algo.kl_coef", 0.1))
    assert "all checks passed" in output and "24 train problems; 2 steps" in output
    assert re.search(r"estimated total +\d+\.\d\d MiB on cpu", output)
    for part in ("weights, gradients, AdamW", "engine's copy", "reference", "KV cache", "activations", "logits"):
        assert part in output
    assert {k: v for k, v in small.files().items() if "__pycache__" not in k} == before and not small.runs.exists()


def write(small: SmallRuns, name: str, text: str) -> str:
    (small.folder / name).write_text(text)
    return f"{small.folder}/{name}"


def the_same_twice(small: SmallRuns) -> str:
    folder = small.folder / "twice"
    folder.mkdir()
    for split, size in (("train", 30), ("test", 5)):
        rows = [json.dumps({"question": f"{n} + 1", "answer": n + 1}) for n in range(size)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    (folder / "validation.jsonl").write_text('{"question": "7 + 7", "answer": 14}\n')
    return str(folder)


def truncated_weights(small: SmallRuns) -> str:
    folder = preset_folder(small.folder / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return str(folder)


def gpt2(small: SmallRuns, chat: bool = True) -> Path:
    return gpt2_folder(small.folder / "g", chat)


def without(folder: Path, keep: Collection[str]) -> Path:
    """The folder with only some of its files."""
    kept = {file for pattern in keep for file in folder.glob(pattern)}
    for file in set(folder.iterdir()) - kept:
        file.unlink()
    return folder


def other_vocabulary(small: SmallRuns) -> str:
    char_tokenizer().save(small.folder / "characters")
    return f"{small.folder}/characters"


Words = Callable[[SmallRuns], list[object]]
CHARACTERS = ("--model.tokenizer", "characters")
ONE_LONG = "rows = [{'question': '1' * 597 if n == 37 else f'{n:03}', 'answer': n} for n in range(50)]\n"
FAILING = "def reward(completion, answer):\n    return 1 / 0\n"
KL = ("--algo.kl_coef", 0.1, "--algo.reference")
BAD: list[tuple[Words, str]] = [
    (lambda s: ["--task", ""], "no task: set task.name"),
    (lambda s: ["--algo.recipe", "gpro"], "did you mean 'grpo'"),
    (lambda s: ["--train.samples", 1], "at least two"),
    (lambda s: ["--reward.format_pattern", "("], "not a regular expression"),
    (lambda s: ["--model", ""], "no model: set model.source"),
    (lambda s: ["--model", "./nothing/here"], "nothing/here"),
    (lambda s: ["--model", "no-such-org/no-such-model"], "no-such-org/no-such-model"),
    (lambda s: ["--model", truncated_weights(s)], "is damaged or incomplete"),
    (lambda s: ["--model", gpt2(s), "--model.tokenizer", other_vocabulary(s)], "they do not match"),
    (lambda s: ["--model", gpt2(s, chat=False)], "no chat template"),
    (
        lambda s: ["--model", without(gpt2(s), ["tokenizer.json"])],
        "a tokenizer but no model: config.json and the weights",
    ),
    (
        lambda s: ["--model", without(gpt2(s), ["tokenizer.json", "config.json", "*.safetensors"])],
        "lacks tokenizer_config.json and chat_template.jinja",
    ),
    (
        lambda s: ["--task", write(s, "long.py", ONE_LONG) + ":rows", "--task.args", "{}", *CHARACTERS],
        "prompt rows/all/37 has 599 tokens",
    ),
    (
        lambda s: ["--task", "jsonl", "--task.args", "{}", "--task.path", the_same_twice(s)],
        "test problems are also in the train split",
    ),
    (  # noticed before the model is loaded
        lambda s: ["--reward.function", write(s, "failing.py", FAILING) + ":reward", "--model", "no/such/model"],
        "ZeroDivisionError",
    ),
    (lambda s: ["--runs_dir", write(s, "taken", "") + "/runs"], "choose another folder"),
    (lambda s: ["--device", "tpu9"], "tpu9"),
    (lambda s: [*KL, "run:none@last"], "unknown run 'none'"),
    (lambda s: [*CHARACTERS, *KL, gpt2(s)], "the same tokenizer"),
    (lambda s: ["--engine.name", "hf"], "engine"),
]


def test_a_tokenizer_of_presets_has_no_effect_on_other_models(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    folder = gpt2_folder(small.folder / "g")
    output = stdout_of(small.train("--model", folder, "--model.tokenizer", "words", "--dry-run"))
    assert "model.tokenizer has no effect" in output and "estimated total" in output
    evaluated = ("--task", "abacus", "--eval.final_examples", 1, "--eval.max_new_tokens", 2)
    assert small("eval", folder, "--model.tokenizer", "characters", *evaluated) == 0
    assert "model.tokenizer has no effect" in capsys.readouterr().out
    assert "has no effect" not in stdout_of(small.train("--model.tokenizer", "words", "--dry-run"))  # a preset


@pytest.mark.parametrize(("words", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line_and_writes_no_files(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: Words, message: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = [str(word) for word in words(small)]
    capsys.readouterr()
    before = small.files()
    runs_dir = [] if "--runs_dir" in given else ["--runs_dir", str(small.runs)]
    assert main(["train", str(small.config), *given, *runs_dir]) == 2
    result = capsys.readouterr()
    assert result.err.startswith("assay: ") and message in result.err and result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.out + result.err
    assert {k: v for k, v in small.files().items() if "__pycache__" not in k} == before
    assert not small.runs.exists() or not list(small.runs.iterdir())


@pytest.mark.parametrize(
    ("function", "workers", "message"), [("not_a_number", 0, "nan"), ("hangs", 1, "reward.timeout_s")]
)
def test_a_judge_that_always_fails_is_rejected_before_the_run_starts(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], function: str, workers: int, message: str
) -> None:
    with (small.folder / "reward.py").open("a") as file:
        file.write("\n\ndef hangs(completion, answer):\n    __import__('time').sleep(60)\n")
    words = ("--reward.function", f"{small.folder}/reward.py:{function}", "--reward.workers", workers)
    assert small.train(*words, "--reward.timeout_s", 0.5) == 2
    result = capsys.readouterr()
    assert message in result.err and result.err.count("\n") == 1 and "Traceback" not in result.out + result.err
    assert not small.runs.exists()


def test_truncated_sampling_is_warned_about(small: SmallRuns, stdout_of: Callable[..., str]) -> None:
    assert "warning: sampling is truncated" in stdout_of(small.train("--sampling.top_k", 3, "--train.steps", 1))
    (row,) = [row for row in small.metrics() if "sampling/kept_mass" in row]
    assert 0 < row["sampling/kept_mass"] < 1


def test_an_interrupted_run_prints_how_to_resume(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OnPolicySource, "next", interrupted)
        assert small.train() == 130
    result = capsys.readouterr()
    assert f"saved after step 0 of 2; to resume from there: assay train --resume {small.runs / 'small'}" in result.out
    assert "Traceback" not in result.err and Run(small.runs / "small").state == "stopped"
    assert main(["train", "--resume", str(small.runs / "small")]) == 0
    assert small.summary()["steps"] == 2


@pytest.mark.parametrize(
    ("sampled", "temperature", "explained"), [(0.4, 0.0, True), (0.88, 0.0, False), (0.4, 1.0, False)]
)
def test_a_greedy_evaluation_that_differs_from_sampled_answers_is_explained(
    sampled: float, temperature: float, explained: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(f"[eval]\ntemperature = {temperature}\n[sampling]\ntemperature = 0.7\n")
    rows = [{"step": step, "reward/correct": sampled if step > 2 else 0.0} for step in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = explain_sampling({"after": {"accuracy": 0.9}}, RunFiles(tmp_path))
    assert bool(text) == explained
    if explained:
        assert "sampled at temperature 0.7 in its last 10 steps, 40.0 % are correct" in text


def test_the_first_evaluation_warns_if_all_answers_are_cut_off(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    output = stdout_of(small.train("--train.steps", 1, "--sampling.max_new_tokens", 1))
    assert "warning: evaluation before training: 100 % of the answers were cut off (at up to 1 tokens): raise" in output
    assert output.index("were cut off") < output.index("step 1/1")
    assert small("eval", "run:small@last", "--device", "cpu", "--eval.final_examples", 2) == 0
    assert "run:small@last: 100 % of the answers were cut off" in capsys.readouterr().out
