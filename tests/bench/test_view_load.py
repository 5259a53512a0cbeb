"""The benchmark of `assay view`: the run that it writes, and its measurements on a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import view  # bench/view.py

from assay.runs import read_rollouts


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
