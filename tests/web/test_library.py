"""The runs that are shown, and the thread that indexes them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from permissions import public_folder, without_permission
from web_parts import group_of, listed, make_run, standard_run

from assay.runs import write_rollouts
from assay.web.app import Indexer, Library
from assay.web.data import RunView, ViewError


def test_runs_of_several_folders_have_different_ids(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_run(tmp_path / folder, "demo", 2)
    library = Library([tmp_path / "a", tmp_path / "b" / "demo", tmp_path / "b"])
    assert [(run["id"], run["name"]) for run in library.runs()["runs"]] == [("demo", "demo"), ("demo~2", "demo")]
    assert library.view("demo~2").folder.path == tmp_path / "b" / "demo"
    new = make_run(tmp_path / "a", "new", 1)  # appears without a restart, and does not change other ids
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
    shown = library.runs()
    assert [run["id"] for run in shown["runs"]] == ["inside"]
    assert str(outside) in shown["problems"][0]
    # A folder that the user gives may be a link.
    assert [view.id for view in Library([tmp_path / "runs" / "link"]).views()] == ["outside"]


def test_runs_without_permission_are_named() -> None:
    with public_folder() as folder:
        denied, _ = make_run(folder, "denied"), make_run(folder, "shown")
        library = Library([folder])
        assert library.runs()["problems"] == []
        with without_permission(denied):
            answer = library.runs()
            assert [run["id"] for run in answer["runs"]] == ["shown"]
            (problem,) = answer["problems"]
            assert problem.startswith(f"{denied} cannot be read (permission denied): run chmod -R u+rX {denied} if")
        assert library.runs()["problems"] == []
        view = library.view("denied")
        with without_permission(denied), pytest.raises(ViewError, match="permission denied"):
            library.view(view.id)


def eventually(view: RunView, total: int) -> None:
    deadline = time.monotonic() + 60
    while listed(view)["total"] != total:
        assert time.monotonic() < deadline, listed(view)["total"]
        time.sleep(0.02)


def test_runs_are_indexed_in_a_thread_while_they_grow(tmp_path: Path) -> None:
    path = standard_run(tmp_path / "runs")
    (view,) = Library([tmp_path / "runs"]).views()
    eventually(view, 12)
    write_rollouts(path, 4, [group_of("p9", ["ok"])])
    eventually(view, 13)


def test_a_run_that_cannot_be_indexed_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = Indexer()
    broken = RunView("broken", standard_run(tmp_path / "a"), indexer.request)
    intact = RunView("intact", standard_run(tmp_path / "b"), indexer.request)

    def fail(seconds: float = 0.5) -> bool:
        raise MemoryError("no memory")

    monkeypatch.setattr(broken, "update_index", fail)
    assert listed(broken)["total"] == 0
    eventually(intact, 12)
    assert any("MemoryError" in problem for problem in broken.detail()["problems"])
