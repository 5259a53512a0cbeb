"""Reading of a run folder in which some files cannot be read."""

from __future__ import annotations

from pathlib import Path

from assay.runs.reading import RunFiles


def test_readable_lines_are_returned_and_the_others_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "x": "NaN"}\nbroken\n[]\n{"step": "2"}\n{"step": 3}\n{"step": 4, "r'
    )
    files = RunFiles(tmp_path)
    first, last = files.metrics()
    assert first["step"] == 1 and first["x"] != first["x"] and last == {"step": 3}
    assert files.problems == ["metrics.jsonl: 2 of 5 lines cannot be read"]  # the incomplete last line is no problem


def test_missing_files_are_no_problem(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert files.config() == files.document("summary.json") == {} and files.metrics() == files.rollout_steps() == []
    assert files.problems == []


def test_folders_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    assert RunFiles(tmp_path).problems == ["rollouts cannot be listed (not a directory)"]
