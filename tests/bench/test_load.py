"""bench/serve.py and bench/view.py: all answers to the load are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import view  # bench/view.py
from serve_parts import command

from assay.runs import read_rollouts

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = str(ROOT / "bench" / "serve.py")


@pytest.mark.slow
def test_all_answers_to_the_load_are_counted(tmp_path: Path) -> None:
    folder, results = tmp_path / "model", tmp_path / "results.json"
    subprocess.run([sys.executable, SCRIPT, "model", "tiny", str(folder)], check=True)
    with command(str(folder), "--name", "bench") as (_, url):
        words = ["load", url, "--names", "ours", "--model", "bench", "--clients", "1", "9", "--rounds", "2"]
        words += ["--new", "12", "--prompt", "7", "--vocabulary", "500", "--processes", "2", "--json", str(results)]
        subprocess.run([sys.executable, SCRIPT, *words], check=True)
    content = json.loads(results.read_text())
    assert [(row["server"], row["clients"], row["requests"]) for row in content["rows"]] == [
        ("ours", 1, 2),
        ("ours", 9, 18),
    ]
    for row in content["rows"]:
        assert row["errors"] == 0 and row["generated_tokens"] == 12 * row["requests"]
        rounding = 0.0005 * row["tokens_per_s"] + 0.05 * row["seconds"]  # of both; a run may take only 40 ms
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(row["generated_tokens"], abs=1.01 * rounding)
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p99"] <= row["latency_s"]["p99"]
    assert content["command"].startswith("python bench/serve.py load") and content["machine"] and content["versions"]


def test_the_run_is_written_as_training_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "EVALUATED", 5)
    writer = view.Writer()
    path = writer.write(tmp_path, 2 * view.PROMPTS * view.SAMPLES)
    groups = read_rollouts(path, 2)
    assert [len(group.rollouts) for group in groups] == [view.SAMPLES] * view.PROMPTS
    rollout = groups[0].rollouts[0]
    assert writer.tokenizer.decode(rollout.turns[0].completion.token_ids) == rollout.text
    assert len({group.prompt.question for group in groups}) == view.PROMPTS
    assert writer.prompt("train", 3) == writer.prompt("train", 3)


@pytest.mark.slow
def test_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(view, "EVALUATED", 20)
    result = tmp_path / "view.json"
    view.main(["--rollouts", "512", "--count", "2", "--json", str(result)])
    content = json.loads(result.read_text())
    assert content["run"]["rollouts"] == 512 and content["index_s"] > 0
    assert len(content["rows"]) == len(view.requests(2, view.random.Random(0))) + 2
    assert all(0 < row["p50_ms"] <= row["max_ms"] for row in content["rows"])
