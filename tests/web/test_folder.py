"""Run folders as they are: damaged, half-written, in progress, or hostile."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from web_parts import CONFIG

from assay.runs import Run
from assay.runs.directory import MAX_DEPTH
from assay.web.folder import RunFolder

DEEP = b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Run.create(tmp_path, "one", CONFIG) as run:
        for step in (1, 2, 3):
            run.log(step, {"reward/mean": step / 4, "time/wall": 10.0 * step})
        run.write_summary({"task": "abacus", "steps": 3})
    return tmp_path / "one"


def test_a_bad_line_of_metrics_does_not_hide_the_others(path: Path) -> None:
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[1] = '{"step": "two"'
    file.write_text("\n".join([*lines, '["no object"]', '{"step": 1e400}', '{"step": 4, "reward/mean": 1.0}', ""]))
    facts, problems = RunFolder(path).facts()
    assert (facts["steps"], facts["reward"]) == (4, 1.0)
    assert problems == [f"metrics.jsonl, line {number}: not a line of metrics" for number in (2, 4, 5)]


def test_an_incomplete_last_line_counts_when_it_is_complete(path: Path) -> None:
    folder, file = RunFolder(path), path / "metrics.jsonl"
    with file.open("a") as out:
        out.write('{"step": 4, "reward')
    facts, problems = folder.facts()
    assert facts["steps"] == 3 and problems == ["metrics.jsonl ends with an incomplete line"]
    with file.open("a") as out:
        out.write('/mean": 0.9}\n')
    facts, problems = folder.facts()
    assert (facts["steps"], facts["reward"], problems) == (4, 0.9, [])


def test_a_line_that_is_too_long_does_not_hide_the_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.web.folder.MAX_LINE", 2**20)
    folder, file = RunFolder(path), path / "metrics.jsonl"
    with file.open("a") as out:
        out.write(json.dumps({"step": 4, "text": "x" * (3 * 2**20)}) + '\n{"step": 5, "reward/mean": 0.7}\n')
    facts, problems = folder.facts()
    assert (facts["steps"], facts["reward"]) == (5, 0.7)
    assert problems == ["metrics.jsonl, line 4: longer than 1 MiB"]
    with file.open("a") as out:
        out.write('{"step": 6, "reward/mean": 0.8}\n')
    assert folder.facts()[0]["steps"] == 6 and len(folder.metrics.points("step")[0]) == 5


def test_a_file_that_was_replaced_is_read_again(path: Path) -> None:
    folder, file = RunFolder(path), path / "metrics.jsonl"
    assert folder.facts()[0]["steps"] == 3
    shorter = file.read_text().splitlines(keepends=True)[:1]
    file.write_text("".join(shorter))  # the same inode
    assert folder.facts()[0]["steps"] == 1
    file.write_text("".join([*shorter, '{"step": 2, "reward/mean": 9.5}\n', '{"step": 7, "x": 1}\n']))
    folder.metrics.read()
    assert folder.metrics.points("reward/mean")[1].tolist()[-1] == 9.5
    os.unlink(file)
    assert folder.facts()[0]["steps"] == 3  # of the summary
    assert folder.metrics.columns == {}


def test_points_of_a_metric_along_another(path: Path) -> None:
    with (path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 3, "reward/mean": 0.1, "time/wall": 40.0}\n{"step": 5, "reward/mean": "NaN"}\n')
        out.write('{"step": 6, "reward/mean": 0.6}\n')
    metrics = RunFolder(path).metrics
    metrics.read()
    assert [part.tolist() for part in metrics.points("reward/mean")] == [[1, 2, 3, 6], [0.25, 0.5, 0.1, 0.6]]
    assert [part.tolist() for part in metrics.points("reward/mean", "time/wall")] == [
        [10, 20, 30, 40],
        [0.25, 0.5, 0.75, 0.1],
    ]
    assert [part.tolist() for part in metrics.points("missing")] == [[], []]


def test_a_long_run_is_read_in_limited_memory_without_losing_peaks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_VALUES": 4000, "BATCH": 100, "DIAGNOSED": 50, "MAX_DAMAGED": 2}.items():
        monkeypatch.setattr(f"assay.web.folder.{name}", value)
    random = np.random.default_rng(0)
    rows = [{"step": step, "reward/mean": random.random(), "time/wall": step / 2} for step in range(1, 6001)]
    rows[0]["before/accuracy"], rows[2500]["reward/mean"], rows[4500]["reward/mean"] = 0.5, -100.0, 100.0
    for step in range(1000, 6001, 1000):
        rows[step - 1]["eval/accuracy"] = step
    lines = [json.dumps(row) + "\n" for row in rows]
    folder, file = RunFolder(path), path / "metrics.jsonl"
    file.write_text("".join(lines[:4000]))
    folder.metrics.read()
    file.write_text("".join([*lines, *("damaged\n" for _ in range(9))]))
    facts, problems = folder.facts()
    assert sum(len(values) for _, values in folder.metrics.columns.values()) <= 4000
    assert len(problems) == 3
    assert (facts["steps"], facts["reward"], facts["answers"]) == (6000, rows[-1]["reward/mean"], None)
    known = {row["step"]: row["reward/mean"] for row in rows}
    steps, values = (part.tolist() for part in folder.metrics.points("reward/mean"))
    assert values == [known[step] for step in steps] and {1, 2501, 4501, 6000} <= set(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) < 250  # every part of the run is there
    assert folder.metrics.points("eval/accuracy", "time/wall")[1].tolist() == [*range(1000, 6001, 1000)]
    assert [row["step"] for row in folder.metrics.steps()] == [*range(1, 9), *range(5951, 6001)]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.toml", b"= broken", "config.toml is not valid TOML"),
        ("config.toml", None, "config.toml is missing"),
        ("config.toml", b"\xff\xfe", "config.toml is not valid TOML"),
        ("summary.json", b'{"steps": 3', "summary.json is not valid JSON"),
        ("summary.json", b"[]", "summary.json is not valid JSON (it does not contain an object)"),
        ("environment.json", b"[" * 100_000, "environment.json is not valid JSON"),
        ("status.json", DEEP, "status.json is not valid JSON (it is nested too deeply)"),
    ],
)
def test_a_damaged_file_is_named_and_the_others_are_read(
    path: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)
    facts, problems = RunFolder(path).facts()
    assert [text.startswith(problem) for text in problems] == [True]
    assert facts["steps"] == 3


def test_a_run_in_progress_is_described_by_its_config_and_metrics(tmp_path: Path) -> None:
    with Run.create(tmp_path, "one", "seed = 3\ntrain.steps = 9") as run:
        run.log(0, {"before/accuracy": 0.25, "before/low": 0.1, "before/high": 0.5})
        run.log(4, {"reward/mean": 0.5, "sampling/answers": 32.0, "time/wall": 12.5})
        run.log(5, {"reward/mean": float("nan")})
        facts, _ = RunFolder(run.path).facts()
    assert (facts["state"], facts["steps"], facts["steps_planned"], facts["seed"]) == ("running", 5, 9, 3)
    assert facts["reward"] == 0.5  # the last finite one
    assert facts["before"] == {"accuracy": 0.25, "ci95": [0.1, 0.5]} and facts["after"] is None
    assert facts["wall_s"] == 12.5


def test_the_summary_comes_before_the_config(path: Path) -> None:
    summary = {"task": "mix", "model": "m", "algorithm": "ppo", "seed": 0, "steps": 3, "wall_s": 2.5}
    (path / "summary.json").write_text(json.dumps(summary))
    facts, _ = RunFolder(path).facts()
    assert {name: facts[name] for name in summary} == summary


def test_values_of_unexpected_types_are_left_out(path: Path) -> None:
    odd = {"steps": [1], "before": 3, "after": {"accuracy": "high"}, "wall_s": "NaN", "seed": 10**400, "task": {}}
    (path / "summary.json").write_text(json.dumps(odd))
    (path / "environment.json").write_text('{"started": 12}')
    facts, _ = RunFolder(path).facts()
    assert all(facts[key] is None for key in ("before", "after", "wall_s", "seed"))
    assert facts["steps"] == 3


def test_links_out_of_the_folder_are_refused(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"task": "SECRET"}')
    for name in ("summary.json", "metrics.jsonl"):
        (path / name).unlink()
        (path / name).symlink_to(secret)
    (path / "inside.json").write_text("{}")
    (path / "link.json").symlink_to(path / "inside.json")
    folder = RunFolder(path)
    facts, problems = folder.facts()
    assert "SECRET" not in str(facts)
    assert len([text for text in problems if "leads out of the run folder" in text]) == 2
    assert folder.read("link.json") == b"{}"
    for name in ("../secret.json", str(secret), "rollouts/../../secret.json"):
        with pytest.raises(OSError, match="leads out"):
            folder.read(name)


def test_links_and_pipes_among_the_rollouts_are_not_read(path: Path, tmp_path: Path) -> None:
    (path / "rollouts").mkdir()
    folder = RunFolder(path)
    (tmp_path / "secret.jsonl").write_text("{}\n")
    link, pipe = (path / "rollouts" / name for name in ("step-000001.jsonl", "step-000002.jsonl"))
    link.symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(pipe)
    (path / "evals").symlink_to(tmp_path)
    assert [*folder.lines(link), *folder.lines(pipe)] == [] and folder.names("evals") == []
    assert folder.problems == [
        "rollouts/step-000001.jsonl is a link that leads out of the run folder",
        "rollouts/step-000002.jsonl is a named pipe",  # which would wait forever
        "evals is a link that leads out of the run folder",
    ]
    assert folder.problems[-1] in folder.facts()[1]
