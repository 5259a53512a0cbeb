"""Description of the environment of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from assay.runs.environment import describe_environment, memory_gib, usable_cores, version_of


def test_versions_command_and_machine_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    described = describe_environment()
    assert described["command"] == sys.argv and described["folder"] == str(tmp_path)
    assert described["versions"]["numpy"] == numpy.__version__
    assert described["versions"]["python"] == platform.python_version()
    assert described["machine"]["host"] == platform.node() and described["machine"]["cores"] == os.cpu_count()
    assert described["git"] is None  # not in a repository


def test_git_state_tells_whether_files_differ_from_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("one")
    user = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "file"], [*user, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], check=True)
    state = describe_environment()["git"]
    assert len(state["commit"]) == 40 and not state["dirty"]
    (tmp_path / "file").write_text("two")
    assert describe_environment()["git"] == {**state, "dirty": True}


def test_memory_is_rounded_as_requested() -> None:
    exact = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert memory_gib(digits=1) == round(exact, 1) and memory_gib() == round(exact)
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_the_version_of_a_missing_package_is_none() -> None:
    assert version_of("no-such-package") is None and version_of("numpy") == numpy.__version__
