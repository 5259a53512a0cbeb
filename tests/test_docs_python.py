"""The Python examples of the documentation run as written, with fewer steps and small models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docs_parts import ROOT, block, blocks
from reward_model_parts import save_classifier
from serve_parts import save_folder, tiny_model

import assay

GUIDE = ROOT / "docs" / "guides" / "python.md"
PRETRAINED = '"Qwen/Qwen2.5-0.5B-Instruct"'
NANO = '{"source": "preset:nano", "tokenizer": "characters"}'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shortened(code: str, *changes: tuple[str, str]) -> str:
    for text, shorter in changes:
        assert code.count(text) == 1, text
        code = code.replace(text, shorter)
    return code


def executed(*codes: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in codes:
        exec(compile(code, "block", "exec"), names)
    return names


@pytest.mark.slow
def test_the_blocks_of_python_md_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = blocks(GUIDE, "python")
    first = shortened(first, ("steps=60", "steps=2"), ('"steps": 100', '"steps": 30'), ("samples=16", "samples=4"))
    names = executed(first, *others)
    run = names["run"]
    assert run.summary["steps"] == 2 and len(run.rollouts(1)) == 16 and run.path == Path("runs/sort").resolve()
    assert [verdict.reward for verdict in names["verdicts"]] == [1.0, 0.0]
    assert names["after"].paired and len(names["answers"]) == 2 and len(names["answers"][0]) == 4
    assert names["longer"].summary["steps"] == 4 and names["longer"].name == "short"
    assert [run.config["optim"]["lr"] for run in names["rates"].values()] == [1e-4, 1e-3]
    shown = capsys.readouterr().out
    assert "evaluated 2" in shown and "saved runs/grpo-3/checkpoints/step-000002" in shown and "ended 2" in shown
    assert "Settings that differ" in shown and 'runs/sort@last", "object": "model"' in shown
    assert (Path("sort-model") / "config.json").is_file()
    assert {rollout.advantage for group in assay.load_run("grpo-2").rollouts() for rollout in group.rollouts} != {0.0}


@pytest.mark.slow
def test_the_run_of_the_readme_in_python() -> None:
    (code,) = [code for code in blocks(ROOT / "README.md", "python") if "assay.train" in code]
    code = shortened(
        code,
        (PRETRAINED, NANO),
        ("steps=50", 'steps=2, prompts=4, max_new_tokens=4, eval={"final_examples": 4}'),
        ("step=10", "step=2"),
    )
    run = executed(code)["run"]
    assert run.summary["steps"] == 2 and (Path("my-model") / "config.json").is_file()
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


@pytest.mark.slow
def test_the_run_of_the_start_page_is_that_of_the_readme() -> None:
    rows = [{"question": f"{a} + 1 =", "answer": str(a + 1)} for a in range(20)]
    code = block("index.md", "python", "assay.train")
    code = shortened(code, (PRETRAINED, NANO), ("steps=50", "steps=1, prompts=2, max_new_tokens=4"))
    names = {"assay": assay, "rows": rows, "reward": lambda completion, answer: float(answer in completion)}
    exec(code, names)
    assert names["run"].summary["steps"] == 1


@pytest.mark.slow
def test_the_run_of_the_quickstart_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    code = block("start/quickstart.md", "python", "assay.train(")
    code = shortened(code, ("steps=60", "steps=2"), ('"steps": 70', '"steps": 20'))
    assert executed(code)["run"].summary["steps"] == 2
    assert "run letters: finished, 2 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_the_clients_of_serving_md_get_answers(capsys: pytest.CaptureFixture[str]) -> None:
    address, model = '"http://127.0.0.1:8000', "Qwen/Qwen2.5-0.5B-Instruct"
    chat = block("guides/serving.md", "python", "import openai")
    folder = save_folder(tiny_model(0, 1024), Path("model"))
    with assay.serve(str(folder), name=model) as server:
        names = executed(shortened(chat, (address, f'"{server.url}')))
    assert names["chunk"].choices[0].finish_reason in ("stop", "length")
    classify = block("guides/serving.md", "python", "/classify")
    with assay.serve(str(save_classifier(Path("classifier"))), name="reward") as server:
        capsys.readouterr()
        executed(shortened(classify, (address, f'"{server.url}')))
    (value,) = json.loads(capsys.readouterr().out)
    assert isinstance(value, float)


def test_the_loop_of_own_loop_md_is_that_of_the_program() -> None:
    """Without time measurements."""
    documented = block("guides/own-loop.md", "python", "run.begin()")
    source = (ROOT / "src" / "assay" / "training" / "loop.py").read_text().partition("run.begin()")[2]
    assert re.findall(r"run\.[\w.]+\(.*\)", documented)[1:] == re.findall(r"run\.[\w.]+\(.*\)", source)


def test_the_reward_of_five_projects_md_gives_partial_credit() -> None:
    reward = executed(block("evidence/five-projects.md", "python", "def reward(completion, answer, nums)"))["reward"]
    values = [reward(f"<answer>{text}</answer>", "10", [2, 5]) for text in ("2 * 5", "2 + 5", "5 + 5", "no")]
    assert values == [1.0, 0.1, 0.0, 0.0]
