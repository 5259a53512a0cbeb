"""The runner of programs: limits, replacement and confinement. Attacks are in tests/rewards/test_code.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from process_tree import descendants

from assay.system import code_runner, isolation
from assay.system.code_runner import ProgramLimits, ProgramResult, ProgramRunner, RunnerLost, start_runner
from assay.types import UserError

TESTS = {"setup": "", "tests": ["assert f(2) == 4"], "names": ["f"]}
RIGHT = "def f(x): return x * x"
LIMITS = ProgramLimits(timeout_s=20.0)


@pytest.fixture(scope="module")
def running() -> Iterator[ProgramRunner]:
    try:
        started = start_runner()
    except UserError as error:
        pytest.skip(str(error))
    yield started
    started.close()


def test_result_of_a_program(running: ProgramRunner) -> None:
    assert running.run(RIGHT, TESTS, LIMITS) == ProgramResult("done", [True], "")
    assert running.run("def f(x): return 5", TESTS, LIMITS).detail == "f(2): 5 instead of 4"


def test_exceptions_of_the_program_arrive_by_name(running: ProgramRunner) -> None:
    kinds = "[Own, OSError, KeyboardInterrupt, StopIteration]"
    source = f"class Own(Exception): pass\ndef f(x):\n    raise {kinds}[x]('why')"
    tests = [
        "try: f(1)\nexcept OSError as error: assert str(error) == 'why'",
        "try: f(0)\nexcept Exception as error: assert str(error) == 'Own: why'",
        "try: f(2)\nexcept Exception as error: assert 'KeyboardInterrupt' in str(error)",
        "assert f(0) == 1",
        "assert all(map(f, [3]))",
    ]
    result = running.run(source, TESTS | {"tests": tests}, LIMITS)
    assert result == ProgramResult("done", [True, True, True, False, False], "f(0): Own: why")


def test_arguments_that_the_program_changes_are_changed(running: ProgramRunner) -> None:
    source = "def f(a, b, c, d):\n    a.append(1); b['k'] = 2; c.add(3); d[0][0] = 4"
    test = "a, b, c, d = [], {}, set(), [[0]]\nf(a, b, c, d)\nassert (a, b, c, d) == ([1], {'k': 2}, {3}, [[4]])"
    assert running.run(source, TESTS | {"tests": [test]}, LIMITS).passed == [True]


def test_programs_share_nothing(running: ProgramRunner) -> None:
    leave = "import math\nmath.left = 1\n" + RIGHT
    assert running.run(leave, TESTS, LIMITS).passed == [True]
    assert "AttributeError" in running.run("import math\nmath.left\n" + RIGHT, TESTS, LIMITS).detail


def test_memory_limit_applies_to_one_program(running: ProgramRunner) -> None:
    program = "data = bytearray(300 << 20)\n" + RIGHT
    assert "MemoryError" in running.run(program, TESTS, ProgramLimits(20.0, memory_mb=256)).detail
    assert running.run(program, TESTS, ProgramLimits(20.0, memory_mb=600)).passed == [True]


def test_how_a_program_ended_is_reported(running: ProgramRunner) -> None:
    assert running.run("import os\nos._exit(7)", TESTS, LIMITS).detail == "the program ended (exit code 7)"
    assert "SIGKILL" in running.run("import os\nos.kill(0, 9)", TESTS, LIMITS).detail


def test_program_has_no_environment_or_descriptors_of_ours(running: ProgramRunner) -> None:
    program = """
import os
def f(x):
    open_ones = [n for n in range(256) if not failed(n)]
    return len(open_ones), sorted(n for n in os.environ if "KEY" in n or "TOKEN" in n)
def failed(n):
    try: os.fstat(n)
    except OSError: return True
"""
    os.environ["SECRET_API_KEY"] = "x"
    fresh = start_runner()
    try:
        tests = {**TESTS, "tests": ["assert f(1) == (5, [])"]}  # the standard streams and two pipes
        assert fresh.run(program, tests, LIMITS) == ProgramResult("done", [True], "")
    finally:
        del os.environ["SECRET_API_KEY"]
        fresh.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_is_left_after_a_program(running: ProgramRunner) -> None:
    before = descendants(running.process.pid)
    running.run("while True: pass", TESTS, ProgramLimits(timeout_s=0.3))
    assert descendants(running.process.pid) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_runner_that_was_killed_is_lost() -> None:
    victim = start_runner()
    os.kill(descendants(victim.process.pid)[-1], signal.SIGKILL)
    with pytest.raises(RunnerLost):
        victim.run(RIGHT, TESTS, LIMITS)
    victim.close()


def test_system_without_confinement_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramRunner, "wait_until_ready", lambda self: ["a filter of system calls"])
    with pytest.raises(UserError, match=r"without a filter of system calls.*allow_unconfined"):
        start_runner()
    start_runner(allow_unconfined=True).close()


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
def test_readable_files_are_those_of_the_standard_library() -> None:
    readable, listable = isolation.standard_library()
    assert os.path.dirname(os.__file__) in listable
    assert os.__file__ in readable
    folders = [path for path in readable if os.path.isdir(path)]
    for module in (pytest, code_runner):
        assert not any(os.path.realpath(module.__file__ or "").startswith(f"{folder}/") for folder in folders)
