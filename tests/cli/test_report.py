"""`assay report`: where the file is written, and mistakes in its arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from assay.cli.main import main
from assay.runs import Run


@pytest.fixture(autouse=True)
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


def test_mistakes_are_one_line(folder: Path, refused: Callable[..., str]) -> None:
    for words, told in (
        (["onn"], "did you mean 'one'"),
        (["one", "--runs_dir", "none"], "give the path of a run"),
        (["one", "-o", "no/such/folder.html"], "choose another file with -o"),
    ):
        assert told in refused(main(["report", *words]))
