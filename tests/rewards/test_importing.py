from __future__ import annotations

from pathlib import Path

import pytest

from assay.rewards import FunctionJudge, JudgePool, load_object
from assay.types import UserError


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("nowhere", "package.module:name"),
        ("nowhere.py", "package.module:name"),
        ("nowhere:reward", "no module 'nowhere'"),
        ("nowhere.at.all:reward", "no module"),
        ("missing_file.py:reward", "no file"),
        ("assay.types:nothing", "no 'nothing'"),
        ("..:x", "module"),
    ],
)
def test_invalid_paths_are_user_errors(path: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        load_object(path)


@pytest.mark.parametrize(
    ("code", "word"),
    [("1 / 0", "ZeroDivisionError"), ("import a_module_nobody_has", "a_module_nobody_has"), ("x = 3", "no 'reward'")],
)
def test_files_that_fail_are_user_errors(tmp_path: Path, code: str, word: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(UserError, match=word):
        load_object(f"{tmp_path / 'mine.py'}:reward")


def test_object_that_is_no_function_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("reward = 3")
    with pytest.raises(UserError, match="not a function"):
        FunctionJudge(f"{tmp_path / 'mine.py'}:reward")


def test_relative_paths_work_in_other_working_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_pkg").mkdir()
    (tmp_path / "my_rewards_pkg" / "inner.py").write_text("def reward(completion, answer): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    judges = [FunctionJudge("my_rewards_pkg.inner:reward"), FunctionJudge("my_rewards_pkg/inner.py:reward")]
    monkeypatch.chdir("/")
    for judge in judges:
        with JudgePool(judge, workers=1) as pool:
            assert pool.judge([("", "", {})])[0].correct
