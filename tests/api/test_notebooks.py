"""The notebooks run from top to bottom, as a script would, and so does `assay.train` in several processes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import assay

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            *statements, last = ast.parse("".join(cell["source"])).body
            if not isinstance(last, ast.Expr):
                statements.append(last)
            exec(compile(ast.Module(statements, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):  # what the notebook shows
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    run, after = names["run"], names["after"]
    assert run.summary["paired"]["p_value"] < 0.05 and run.summary["after"]["accuracy"] > 0.6
    assert after.accuracy > names["before"].accuracy
    assert [type(value).__name__ for value in shown][:2] == ["SavedRun", "Picture"]
    assert all(value._repr_html_() for value in shown if hasattr(value, "_repr_html_"))
    assert (tmp_path / "sort-model" / "config.json").is_file()


def test_the_script_is_the_notebook() -> None:
    cells = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    notebook = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = ast.parse((ROOT / "examples" / "quickstart.py").read_text())
    statements = [without_print(statement) for statement in script.body[1:]]  # after the docstring
    assert list(map(ast.unparse, statements)) == list(map(ast.unparse, ast.parse(notebook).body))


def without_print(statement: ast.stmt) -> ast.AST:
    """What `print(value)` prints: a notebook shows the value instead."""
    match statement:
        case ast.Expr(ast.Call(ast.Name("print"), [value])):
            return value
    return statement


@pytest.mark.slow
def test_several_processes_train_one_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import assay
            rows = [{{"question": f"{{i}} + 1 =", "answer": str(i + 1)}} for i in range(30)]
            run = assay.train(
                model={{"source": "preset:nano", "tokenizer": "characters"}}, data=rows, max_new_tokens=4, steps=2,
                reward=lambda completion, answer: len(completion) / 4, prompts=4, samples=2, name="both",
                runs_dir={str(tmp_path / "runs")!r},
            )
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    run = assay.load_run("both", tmp_path / "runs")
    assert run.state == "finished" and sum(len(group.rollouts) for group in run.rollouts(2)) == 8
