"""Files of a run: durable writes, the list of metrics, and runs in which some files cannot be read."""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
from metric_names import METRICS, meaning
from small_run import SmallRuns

from assay.config import TrainConfig
from assay.runs.directory import RunFiles, default_settings, flattened
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


# The list of metrics is that of the program


SOURCE = Path(__file__).resolve().parents[2] / "src" / "assay"
KINDS = {name.partition("/")[0] for name in METRICS}
METRIC = re.compile(rf"(?:{'|'.join(KINDS)})/[a-z_@]+")


def names_in_code() -> set[str]:
    constants = (
        node.value
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {text for text in constants if METRIC.fullmatch(text)}


def test_every_metric_of_the_program_is_in_the_list() -> None:
    names = names_in_code()
    assert len(names) > 60 and not [name for name in names if meaning(name) is None and not name.endswith("_")]


def test_every_metric_in_the_list_is_written_by_the_program() -> None:
    source = "".join(file.read_text() for file in SOURCE.rglob("*.py"))
    listed = [name for name in METRICS if not re.search("[A-Z]", name)]
    last_parts, words = [name.partition("/")[2] for name in listed], set(re.findall(r"\w+", source))
    assert not [name for name in last_parts if name not in words and not re.search(rf"\b{name}\b", source)]


def test_metrics_of_a_run_have_a_meaning(small: SmallRuns) -> None:
    assert small.train("--eval.every", "1", "--eval.samples", "2", "--sft.steps", "1", "--algo.kl_coef", "0.1") == 0
    names = {name for row in small.metrics() for name in row} - {"step"}
    assert len(names) > 50 and not [name for name in names if meaning(name) is None]
    assert meaning("reward/mena") is None and meaning("status/ok") == meaning("status/NAME")


# Runs in which some files cannot be read


def test_readable_lines_are_returned_and_the_others_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "x": "NaN"}\nbroken\n[]\n{"step": "2"}\n{"step": 3}\n{"step": 4, "r'
    )
    files = RunFiles(tmp_path)
    first, last = files.readable_metrics()
    assert first["step"] == 1 and first["x"] != first["x"] and last == {"step": 3}
    assert files.problems == ["metrics.jsonl: 2 of 5 lines cannot be read"]  # the incomplete last line is no problem


def test_folders_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    assert RunFiles(tmp_path).problems == ["rollouts cannot be listed (not a directory)"]


def test_a_config_with_defaults_only_equals_the_default_settings() -> None:
    """Values are compared as they are read from config.toml: lists, not tuples."""
    defaults = default_settings()
    assert defaults["optim.lr"] == TrainConfig().optim.lr and isinstance(defaults["optim.betas"], list)
    assert flattened({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}
