"""Answers to the page's requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assay.runs import Run
from assay.web.data import Library, ViewError, curve, plain, shortened, unique

CONFIG = 'seed = 3\n[task]\nname = "abacus"\n[model]\nsource = "preset:nano"\n[train]\nsteps = 9\n'


def make_run(runs: Path, name: str, steps: int = 3) -> Path:
    with Run.create(runs, name, CONFIG) as run:
        for step in range(1, steps + 1):
            run.log(step, {"reward/mean": step / 4, "time/wall": 10.0 * step, "turns/mean": 1.0})
        run.log(steps, {"eval/accuracy": 0.5, "eval/low": 0.4, "eval/high": 0.6})
        return run.path


def test_runs_of_several_folders_have_different_ids(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_run(tmp_path / folder, "demo")
    library = Library([tmp_path / "a", tmp_path / "b" / "demo", tmp_path / "b"])
    assert [(run["id"], run["name"]) for run in library.runs()["runs"]] == [("demo", "demo"), ("demo~2", "demo")]
    assert library.view("demo~2").folder.path == tmp_path / "b" / "demo"
    new = make_run(tmp_path / "a", "new")  # appears without a restart, and does not change other ids
    assert [view.id for view in library.views()] == ["demo", "new", "demo~2"]
    (new / "config.toml").unlink()
    (new / "metrics.jsonl").unlink()
    (new / "environment.json").unlink()
    with pytest.raises(ViewError, match="deleted"):
        library.view("new")
    assert [view.id for view in library.views()] == ["demo", "demo~2"]
    with pytest.raises(ViewError, match="no run 'other'"):
        library.view("other")


def test_links_out_of_a_runs_folder_are_refused(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere", "outside")
    make_run(tmp_path / "runs", "inside")
    (tmp_path / "runs" / "link").symlink_to(outside)
    library = Library([tmp_path / "runs"])
    listed = library.runs()
    assert [run["id"] for run in listed["runs"]] == ["inside"]
    assert str(outside) in listed["problems"][0]
    # A folder that the user gives may be a link.
    assert [view.id for view in Library([tmp_path / "runs" / "link"]).views()] == ["outside"]


def test_metrics_with_panels_and_intervals(tmp_path: Path) -> None:
    view = Library([make_run(tmp_path, "one")]).views()[0]
    answer = view.metrics()
    assert answer["series"]["reward/mean"] == {"x": [1, 2, 3], "y": [0.25, 0.5, 0.75]}
    assert answer["intervals"] == {"eval/accuracy": {"x": [3], "low": [0.4], "high": [0.6]}}
    assert [panel["metric"] for panel in answer["panels"]] == ["reward/mean", "eval/accuracy"]
    assert view.metrics(since=answer["cursor"]) == {"cursor": answer["cursor"], "unchanged": True}
    assert view.metrics(["turns/mean", "missing"], x="time/wall")["series"] == {
        "turns/mean": {"x": [10, 20, 30], "y": [1, 1, 1]}
    }
    with pytest.raises(ViewError, match="x must be one of step"):
        view.metrics(x="loss")


def test_thinned_curves_keep_all_peaks() -> None:
    xs = np.arange(10_000)
    ys = np.zeros(10_000)
    ys[1234], ys[8765] = 5.0, -3.0
    thinned = curve(xs, ys, 100)
    assert len(thinned["x"]) <= 100
    points = dict(zip(thinned["x"], thinned["y"], strict=True))
    assert points[1234] == 5.0 and points[8765] == -3.0
    assert thinned["x"] == sorted(thinned["x"])
    assert curve(xs[:100], ys[:100], 100)["x"] == list(range(100))


def test_findings_are_those_of_the_doctor(tmp_path: Path) -> None:
    with Run.create(tmp_path, "one", CONFIG) as run:
        for step in range(1, 9):
            row = {"reward/mean": 0.0, "reward/range": 0.0, "reward/std": 0.0, "groups/zero_variance": 1.0}
            run.log(step, {**row, "advantage/zero": 1.0, "sampling/answers": 64.0 * step, "status/wrong": 1.0})
        run.write_summary({"steps": 8})
    view = Library([tmp_path]).views()[0]
    view.detail()
    if view._diagnosing is not None:
        view._diagnosing.result()
    findings = view.detail()["findings"]
    assert findings and findings[0].keys() == {"name", "evidence", "remedy", "severity"}


def test_numbers_that_are_not_finite_are_null() -> None:
    given = {"a": [float("nan"), 1.5, np.float32(2.5)], 3: (np.array([1, 2]), np.nan), "s": Path("x")}
    assert plain(given) == {"a": [None, 1.5, 2.5], "3": [[1, 2], None], "s": "x"}


def test_names_and_problems() -> None:
    assert unique("a", {"a", "a~2"}) == "a~3"
    assert shortened([str(n) for n in range(22)])[-1] == "and 2 more problems"
