"""The list of metrics is that of the program."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from small_run import SmallRuns

from assay.runs.metrics import METRICS, meaning

SOURCE = Path(__file__).resolve().parents[2] / "src" / "assay"
KINDS = {name.partition("/")[0] for part in METRICS.values() for name in part}
METRIC = re.compile(rf"(?:{'|'.join(KINDS)})/[a-z_@]+")


def names_in_code() -> set[str]:
    constants = (
        node.value
        for file in SOURCE.rglob("*.py")
        if file.name != "metrics.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {text for text in constants if METRIC.fullmatch(text)}


def test_every_metric_of_the_program_is_in_the_list() -> None:
    names = names_in_code()
    assert len(names) > 60 and not [name for name in names if meaning(name) is None and not name.endswith("_")]


def test_every_metric_in_the_list_is_written_by_the_program() -> None:
    source = "".join(file.read_text() for file in SOURCE.rglob("*.py") if file.name != "metrics.py")
    listed = [name for part in METRICS.values() for name in part if not re.search("[A-Z]", name)]
    last_parts, words = [name.partition("/")[2] for name in listed], set(re.findall(r"\w+", source))
    assert not [name for name in last_parts if name not in words and not re.search(rf"\b{name}\b", source)]


def test_metrics_of_a_run_have_a_meaning(tmp_path: Path, no_curves: None) -> None:
    small = SmallRuns(tmp_path)
    assert small.train("--eval.every", "1", "--eval.samples", "2", "--sft.steps", "1", "--algo.kl_coef", "0.1") == 0
    names = {name for row in small.metrics() for name in row} - {"step"}
    assert len(names) > 50 and not [name for name in names if meaning(name) is None]
    assert meaning("reward/mena") is None and meaning("status/ok") == meaning("status/NAME")
