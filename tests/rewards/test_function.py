from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.rewards import FunctionJudge, JudgePool, check_verdicts, load_object
from assay.types import Status, UserError, Verdict

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(code: str) -> str:
        file = tmp_path / "mine.py"
        file.write_text(textwrap.dedent(code))
        return f"{file}:reward"

    return write_file


@pytest.mark.parametrize(
    ("body", "reward", "status"),
    [
        ("return 1.0", 1.0, Status.OK),
        ("return True", 1.0, Status.OK),
        ("return 0", 0.0, Status.WRONG),
        ("return 0.3", 0.3, Status.WRONG),
        ("return -2", -2.0, Status.WRONG),
        ("return {'reward': 0.5, 'status': 'ok', 'parsed': 7, 'parts': {'style': 0.5}}", 0.5, Status.OK),
        ("return Verdict(0.0, Status.NO_ANSWER)", 0.0, Status.NO_ANSWER),
        ("return float(completion == 'c' and answer == 'a' and fields == {'level': 3})", 1.0, Status.OK),
        ("import numpy; return numpy.float32(1)", 1.0, Status.OK),
    ],
)
def test_what_a_function_may_return(write: Write, body: str, reward: float, status: Status) -> None:
    header = "from assay.types import Status, Verdict\ndef reward(completion, answer, **fields): "
    verdict = FunctionJudge(write(header + body))("c", "a", {"level": 3})
    assert (verdict.reward, verdict.status) == (reward, status)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise KeyError('oops\\n two lines')", "KeyError: 'oops"),
        ("return float('nan')", "finite"),
        ("return {'reward': float('inf')}", "finite"),
        ("return None", "NoneType"),
        ("return '1.0'", "str"),
        ("return [1.0]", "list"),
        ("return {'score': 1}", "'reward'"),
        ("return {'reward': 1, 'status': 'fine'}", "fine"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_failing_function_is_an_error_with_one_line(write: Write, body: str, word: str) -> None:
    verdict = FunctionJudge(write(f"def reward(completion, answer, **fields): {body}"))("c", "a", {})
    assert (verdict.reward, verdict.status) == (0.0, Status.ERROR)
    assert word in verdict.detail and "\n" not in verdict.detail


def test_dict_parts(write: Write) -> None:
    verdict = FunctionJudge(write("def reward(c, a): return {'reward': 1, 'parsed': 7, 'parts': {'style': 1}}"))(
        "", "", {}
    )
    assert (verdict.parsed, verdict.parts) == ("7", {"style": 1.0})


def test_fields_that_are_not_asked_for_are_left_out(write: Write) -> None:
    judge = FunctionJudge(write("def reward(completion, answer, level=0): return level"))
    assert judge("c", "a", {"level": 1, "subject": "algebra", "answer": "b", "completion": "d"}).reward == 1.0


def test_async_functions_neighbours_and_prints_in_workers(write: Write, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("def worth(text): return float(len(text))")
    path = write("""
        import asyncio, dataclasses, os, sys
        from neighbour import worth

        @dataclasses.dataclass
        class Thing:
            x: int

        async def reward(completion, answer, **fields):
            print("noise on stdout \\ud800", flush=True)
            os.write(1, b"raw noise")
            assert sys.stdin.read() == ""
            await asyncio.sleep(0.001)
            return worth(completion)
    """)
    with JudgePool(FunctionJudge(path), workers=2) as pool:
        assert [v.reward for v in pool.judge([("x" * n, "", {}) for n in range(5)])] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_relative_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_pkg").mkdir()
    (tmp_path / "my_rewards_pkg" / "inner.py").write_text("def reward(completion, answer): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    judges = [FunctionJudge("my_rewards_pkg.inner:reward"), FunctionJudge("my_rewards_pkg/inner.py:reward")]
    monkeypatch.chdir("/")
    for judge in judges:
        with JudgePool(judge, workers=1) as pool:
            assert pool.judge([("", "", {})])[0].correct


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
def test_paths_that_lead_nowhere(path: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        FunctionJudge(path)


def test_modules_that_fail_or_hold_something_else(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a function"):
        FunctionJudge(write("reward = 3"))
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_object(f"{tmp_path / 'broken.py'}:reward")
    (tmp_path / "needy.py").write_text("import a_module_nobody_has")
    with pytest.raises(UserError, match="a_module_nobody_has"):
        load_object(f"{tmp_path / 'needy.py'}:reward")


def test_all_errors_stop_a_run() -> None:
    broken = Verdict(0.0, Status.ERROR, detail="KeyError: 'x'")
    with pytest.raises(UserError, match="KeyError: 'x'"):
        check_verdicts([broken, broken])
    check_verdicts([broken, Verdict(0.0, Status.WRONG)])
    check_verdicts([])
