from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from assay.runs.files import (
    atomic_write,
    from_json,
    json_line,
    json_lines,
    make_folder,
    read_json,
    remove_temporaries,
    rename,
    to_json,
    write_json,
)
from assay.types import Status


def test_non_finite_numbers_round_trip_as_strings() -> None:
    line = json_line({"nan": math.nan, "up": math.inf, "down": -math.inf, "numpy": np.float32("nan")})
    saved = json.loads(line, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert saved == {"nan": "NaN", "up": "Infinity", "down": "-Infinity", "numpy": "NaN"}
    assert math.isnan(from_json(saved["nan"]))
    assert from_json(saved["up"]) == math.inf
    assert from_json(saved["down"]) == -math.inf
    assert from_json("ok") == "ok"


def test_to_json_keeps_values_and_converts_other_types() -> None:
    value = {1: (Status.OK, np.int64(3), np.array([1.5, 2.0])), "set": {2, 1}, "bool": True, "path": Path("a")}
    assert to_json(value) == {"1": ["ok", 3, [1.5, 2.0]], "set": [1, 2], "bool": True, "path": "a"}
    assert type(to_json(Status.OK)) is str
    assert to_json({"a": [math.nan, np.float32(2.5)]}, non_finite=lambda number: None) == {"a": [None, 2.5]}


def test_json_line_has_no_line_separators() -> None:
    text = "a\nb\r\u2028\u2029\ud800\x00é"
    line = json_line({"text": text})
    assert line.splitlines() == [line[:-1]]
    assert json.loads(line) == {"text": text}


def test_damaged_incomplete_and_long_lines_are_returned_as_such() -> None:
    content = b'{"a": 1}\n[2]\n{"long": "' + b"x" * 40 + b'"}\n\xff\n{"b": 2}\n{"half'
    lines = list(json_lines(io.BytesIO(content), limit=20))
    assert [line.value for line in lines] == [{"a": 1}, None, None, None, {"b": 2}, None]
    assert [line.is_complete for line in lines] == [True] * 5 + [False]
    assert [line.number for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [content[line.start : line.start + line.size][-3:] for line in lines] == [
        line.content[-3:] for line in lines
    ]


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b'{"new"')
        raise RuntimeError
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_flushes_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure may undo a rename whose folder was not flushed."""
    calls: list[str] = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    write_json(tmp_path / "summary.json", {})
    assert calls == [f"{tmp_path}/.summary.json.tmp-{os.getpid()}", "rename", str(tmp_path)]
    calls.clear()
    (tmp_path / "new").mkdir()
    rename(tmp_path / "new", tmp_path / "runs")
    make_folder(tmp_path / "runs" / "a" / "b")
    make_folder(tmp_path / "runs" / "a" / "b")
    assert calls == ["rename", str(tmp_path), f"{tmp_path}/runs", f"{tmp_path}/runs/a"]


def test_remove_temporaries_keeps_other_files(tmp_path: Path) -> None:
    kept = ["summary.json", ".notes.tmp-old", "results.tmp-12", ".tmp-12", ".a.tmp-12.txt", ".lock"]
    for name in (*kept, ".summary.json.tmp-12", ".step-000001.npz.tmp-4194304"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".folder.tmp-7").mkdir()
    remove_temporaries(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, ".folder.tmp-7"}
