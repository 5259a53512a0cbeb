"""The wheel, installed in a new environment with the pinned packages: data files, the commands, and the demo."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHORT = ["--train.steps", "2", "--sft.steps", "2", "--eval.final_examples", "10", "--eval.examples", "5"]


def called(*words: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.wheel
def test_the_wheel_runs_the_demo_in_a_new_environment(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    called(*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("assay_rl-*.whl")
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} <= set(zipfile.ZipFile(wheel).namelist())

    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    install = [programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    called(*install, "torch", cwd=tmp_path)  # first, as in the Makefile
    called(*install, wheel, cwd=tmp_path)
    assert "start here" in called(programs / "assay", "--help", cwd=tmp_path)
    assert "pip install 'assay-rl[wandb]'" in called(programs / "assay", "info", cwd=tmp_path)
    assert "complete -o default" in called(programs / "assay", "completion", "bash", cwd=tmp_path)
    called(programs / "assay", "train", ROOT / "configs" / "demo.toml", *SHORT, cwd=tmp_path)
    exported = called(programs / "assay", "export", "run:demo@last", "demo.gguf", cwd=tmp_path)
    assert "greedy decoding" in exported and (tmp_path / "runs" / "demo" / "curves.png").is_file()
