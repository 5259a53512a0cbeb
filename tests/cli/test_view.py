"""`assay view`: which runs it shows, its URL, mistakes, and its end. `assay report`: its file, mistakes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from permissions import public_folder, without_permission

from assay.cli import view
from assay.cli.main import main
from assay.runs import Run
from assay.types import UserError


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("one", "two"):
        Run.create(tmp_path / "runs", name, "seed = 1\n").close()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_runs_folders_run_folders_and_names(runs: Path) -> None:
    default = Path("runs")
    assert view.folders([], default) == [default]
    assert view.folders(["runs", "one", "run:two@last", str(runs / "two")], default) == [
        *(default, default / "one", default / "two", runs / "two")
    ]
    Path("one").mkdir()  # an unrelated folder with the name of a run
    assert view.folders(["one"], default) == [default / "one"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ome"], "did you mean 'one'"),
        (["a\0b"], "unknown run"),
        (["x" * 5000], "unknown run"),
        (["--dir", "nowhere"], "there is no folder nowhere: give the folder of your runs"),
        (["--dir", "nowhere", "other"], "other, and nowhere has no runs"),
        (["empty"], "`assay train CONFIG` creates one"),
        (["--port", "99999999"], "choose another --host or --port"),
        (["--port", "x"], "--port"),
        (["--host", "not.a.host.invalid"], "cannot listen on not.a.host.invalid"),
    ],
)
def test_mistakes_are_one_line(runs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["view", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("words", ["view", "view one", "report one", "runs", "runs one", "runs x"])
def test_folders_without_permission_are_named(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with public_folder() as folder:
        path = Run.create(folder / "runs", "one", "seed = 1\n").path
        for denied in (path, path.parent):
            with without_permission(denied):
                code = main([*words.split(), "--dir", str(path.parent)])
            (line,) = capsys.readouterr().err.splitlines()
            if words == "runs x" and denied is path:
                assert code == 2 and "unknown run 'x'" in line
            else:
                assert f"{denied} cannot be read (permission denied): run chmod -R u+rX {denied} if it is yours" in line
                assert code == (0 if words == "runs" and denied is path else 2)  # the other runs are listed


def test_without_a_port_a_free_one_is_used_if_the_usual_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(view, "PORT", other.getsockname()[1])
        with view.listen("127.0.0.1", None) as listener:
            assert listener.getsockname()[1] != view.PORT
        with pytest.raises(UserError, match=r"--port \(0: any free port\)"):
            view.listen("127.0.0.1", view.PORT)


def test_hosts_and_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert view.accepted_hosts("127.0.0.1") == view.accepted_hosts("localhost") == view.accepted_hosts("::1") == set()
    assert {"*", "0.0.0.0", socket.gethostname().lower()} <= view.accepted_hosts("0.0.0.0")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert view.page_url(listener, "T") == f"http://127.0.0.1:{port}/?token=T"
        assert f"ssh -L {port}:localhost:{port}" in view.reach_hint(listener)
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        assert "not encrypted" in view.reach_hint(listener) and socket.gethostname() in view.page_url(listener, "T")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert view.has_display()
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    assert not view.has_display()


def test_it_serves_until_it_is_stopped_and_writes_nothing_into_runs(runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    environment = {**os.environ, "XDG_CACHE_HOME": str(runs.parent / "cache")}
    command = [sys.executable, "-m", "assay", "view", "--port", "0", "--no-open"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        line = process.stdout.readline()
        match = re.fullmatch(r"2 runs at (http://127\.0\.0\.1:\d+)/\?token=([\w-]{32})\n", line)
        assert match, line + process.stderr.read()
        request = urllib.request.Request(match[1] + "/api/runs/one", headers={"Authorization": f"Bearer {match[2]}"})
        with urllib.request.urlopen(request) as response:
            assert response.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
    assert before == {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}


# `assay report`


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Run.create(tmp_path / "runs", "one", 'seed = 3\n[task]\nname = "abacus"\n') as run:
        run.log(1, {"reward/mean": 0.5})
    return tmp_path


def test_the_file_is_written_where_the_user_says(folder: Path, stdout_of: Callable[..., str]) -> None:
    assert stdout_of(main(["report", "one"])).startswith("one-report.html (0.")
    assert "<title>one · assay report</title>" in (folder / "one-report.html").read_text()
    (folder / "there").mkdir()
    assert main(["report", "runs/one", "-o", "there"]) == 0 and (folder / "there" / "one-report.html").is_file()
    assert main(["report", "run:one@last", "-o", "x.html"]) == 0 and (folder / "x.html").is_file()


def test_mistakes_in_arguments_of_report_are_one_line(folder: Path, refused: Callable[..., str]) -> None:
    for words, told in (
        (["onn"], "did you mean 'one'"),
        (["one", "--runs_dir", "none"], "give the path of a run"),
        (["one", "-o", "no/such/folder.html"], "choose another file with -o"),
    ):
        assert told in refused(main(["report", *words]))
