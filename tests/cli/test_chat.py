"""`assay chat`: the command, its settings and its output."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_run import preset_folder

from assay.cli.chat import settings_of
from assay.cli.main import main
from assay.envs import make_env
from assay.models import build_preset, save_model
from assay.runs import Run, checkpoints
from assay.tasks import Abacus
from assay.text import Tokenizer, word_tokenizer

CONTEXT = 64
QUESTION = "Ann has 7 coins . She finds 5 . How many coins ?"

Chat = Callable[..., tuple[int, str, str]]


def words() -> Tokenizer:
    return word_tokenizer(Abacus().words())


def save_random_model(folder: Path, seed: int, template: bool = True) -> str:
    tokenizer = words()
    if not template:
        tokenizer.hf.chat_template = None
    return str(preset_folder(folder, tokenizer, CONTEXT, seed))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return save_random_model(folder / "one", 1), save_random_model(folder / "two", 2)


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    def run_chat(*options: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        content = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        code = main(["chat", *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_chat


def test_answers_to_prompts_are_reproducible(models: tuple[str, str], chat: Chat) -> None:
    ask = ("--prompt", QUESTION, "--prompt", "Hello ?", "--max", "8")
    code, out, err = chat(models[0], *ask)
    assert code == 0 and len(out.splitlines()) == 2
    assert err.count("unknown words for the tokenizer of") == 1 and ": Hello\n" in err
    assert "truncated: /max N allows more" in err
    assert chat(models[0], *ask)[:2] == (code, out)
    assert chat(models[0], *ask, "--seed", "1")[1] != out


def test_questions_from_a_pipe_are_not_echoed(models: tuple[str, str], chat: Chat) -> None:
    script = f"/max 6\n{QUESTION}\n\n/task abacus 4\n/quit\nnever asked\n"
    code, out, err = chat(*models, "--temperature", "0", "--reward.workers", "0", stdin=script)
    lines = out.splitlines()
    task = Abacus().prompts("test")[4]
    assert code == 0 and QUESTION not in out and "> " not in out and "tokens per answer: 6" in err
    assert [line for line in lines if line.startswith("[")] == [f"[{model}]" for model in models] * 2
    assert lines[4:6] == ["abacus, test question 4:", task.question]
    assert sum(f"gold {task.answer}, reward 0" in line for line in lines) == 2
    assert len(lines) == 4 + 2 + 6


def test_lines_that_cannot_be_answered_do_not_end_the_chat(models: tuple[str, str], chat: Chat) -> None:
    stdin = b"Ann " * CONTEXT + b"\n\xff\xfe Ann\n/nonsense\nAnn"
    code, out, err = chat(models[0], "--max", "3", stdin=stdin)
    assert code == 2 and len(out.splitlines()) == 2 and "unknown command '/nonsense'" in err
    assert f"{CONTEXT + 2} tokens fills the context of {CONTEXT}" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["/no/such/folder"], "/no/such/folder"),
        (["run:nonesuch@last"], "unknown run 'nonesuch'"),
        (["MODEL", "--eval.temprature", "1"], "did you mean 'eval.temperature'"),
        (["MODEL", "--samples", "0"], "eval.samples"),
        (["MODEL", "--task", "nonesuch"], "unknown task"),
        ([], "required: MODEL"),
    ],
)
def test_mistakes_in_the_command_exit_with_2(
    models: tuple[str, str], chat: Chat, options: list[str], message: str
) -> None:
    code, out, err = chat(*(models[0] if word == "MODEL" else word for word in options), "--prompt", QUESTION)
    *before, error = err.splitlines()
    assert (code, out) == (2, "") and message in error and all(line.startswith("loading ") for line in before)


def test_a_model_without_a_chat_template(tmp_path: Path, chat: Chat) -> None:
    model = save_random_model(tmp_path / "base", 3, template=False)
    code, out, err = chat(model, "--prompt", QUESTION)
    assert (code, out) == (2, "") and model in err and 'prompt.style = "raw"' in err
    raw = (model, "--prompt.style", "raw", "--prompt", QUESTION, "--prompt", QUESTION, "--max", "4")
    assert chat(*raw)[0] == 0
    # A template without earlier turns: every question is asked alone.
    code, out, err = chat(*raw, "--prompt.template", "{question}", "--temperature", "0")
    assert code == 0 and "is asked without the earlier turns" in err
    first, second = out.splitlines()
    assert first == second


def test_a_checkpoint_uses_the_settings_of_its_run(models: tuple[str, str], tmp_path: Path, chat: Chat) -> None:
    config = """
task = {name = "abacus", args = {max_start = 2, max_steps = 2}}
prompt.system = "Ann has"
reward = {wrong = -0.5, unparsable = -0.5, workers = 0}
sampling = {max_new_tokens = 5, stop = [";"]}
eval = {temperature = 0.0, max_new_tokens = 0}
"""
    run = Run.create(tmp_path, "toy", config)
    with checkpoints.saving(run.path, 10) as folder:
        shutil.copytree(models[0], folder / "model")
    cfg = settings_of(["run:toy@10"], {"runs_dir": str(tmp_path)})
    assert (cfg.eval.max_new_tokens, cfg.eval.temperature, cfg.prompt.system) == (5, 0.7, "Ann has")
    assert cfg.eval.stop == [";"]
    other = settings_of(["run:toy@10"], {"runs_dir": str(tmp_path), "task": "gsm8k"})
    assert (other.task.args, other.reward.wrong, other.prompt.system) == ({}, 0.0, "Ann has")
    prompt = settings_of(["run:toy@10"], {"runs_dir": str(tmp_path), "prompt.system_file": "own.txt"}).prompt
    assert (prompt.system, prompt.system_file) == ("", "own.txt")
    (tmp_path / "train.toml").write_text('[task]\nname = "abacus"\nargs = {max_start = 3}\n[reward]\nwrong = -1.0\n')
    given = settings_of(["run:toy@10"], {"runs_dir": str(tmp_path)}, config=str(tmp_path / "train.toml"))
    assert (given.task.args, given.reward.wrong, given.prompt.system) == ({"max_start": 3}, -1.0, "")
    code, out, err = chat("run:toy@last", "--runs_dir", str(tmp_path), "--prompt", "/task 3")
    assert code == 0 and Abacus(max_start=2, max_steps=2).prompts("test")[3].question in out
    assert "reward -0.5" in out and "truncated" in err
    code, out, _ = chat("run:toy@10", "--runs_dir", str(tmp_path), "--prompt", "/task gsm8k 3", "--task.path", "/none")
    assert code == 2 and out == ""


def save_scripted_model(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    """A model that follows each word of the text by the next one, whatever the words before."""
    chain = tokenizer.encode(text)
    model = build_preset("nano", tokenizer.vocab_size, CONTEXT, 0)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if "embed" in name or "proj" in name:
                weight.zero_()
        gate, up, down = (weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        for place, token in enumerate(chain):
            weights["model.embed_tokens.weight"][token, place] = 1
            gate[place, place] = up[place, place] = 1
            down[(place + 1) % len(chain), place] = 10
    save_model(model, folder, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    tokenizer.save(folder)


class TerminalOutput(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_checkpoint_plays_the_environment_of_its_run(
    tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = '[task]\nname = "abacus"\n[env]\nname = "calculator"\n[reward]\nworkers = 0\n'
    run = Run.create(tmp_path, "toy", config)
    tokenizer = word_tokenizer(make_env("calculator", task=Abacus()).words())
    with checkpoints.saving(run.path, 10) as folder:
        save_scripted_model(folder / "model", tokenizer, "<assistant> << 17 + 3 = 15 >> #### 20 <eos>")
    ask = ("run:toy@10", "--runs_dir", str(tmp_path), "--temperature", "0", "--max", "12", "--prompt", QUESTION)
    assert chat(*ask, "--env", "")[:2] == (0, "<< 17 + 3 = 15 >> #### 20\n")
    index = next(i for i, prompt in enumerate(Abacus().prompts("test")) if prompt.answer == "20")
    code, out, _ = chat(*ask, "--prompt", f"/task {index}")
    assert code == 0 and out.startswith("<< 17 + 3 = 20 >> #### 20\n")
    assert out.endswith("<< 17 + 3 = 20 >> #### 20\nok: parsed 20, gold 20, reward 1\n")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for samples in ("1", "2"):  # one after the other, and side by side
        monkeypatch.setattr(sys, "stdout", terminal := TerminalOutput())
        assert chat(*ask, "--samples", samples)[0] == 0
        assert "<< 17 + 3 =\x1b[2m 20 >>\x1b[0m #### 20" in terminal.getvalue()


@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_a_chat_into_which_no_question_is_piped_is_an_error(models: tuple[str, str], chat: Chat, stdin: str) -> None:
    code, out, err = chat(models[0], stdin=stdin)
    assert code == 2 and not out and "no question: pipe in one per line, give --prompt TEXT" in err
