"""Programs and tests in two processes; here in two threads, connected by pipes. See also tests/rewards/test_code.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from assay.system.harness import ProgramConnection, ProgramServer, TestSession


class Ended(BaseException): ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def exit_thread(code: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", exit_thread)

    def run_program(source: str, tests: list[Any], setup: str = "", names: list[str] | None = None) -> dict[str, Any]:
        requests_end, requests = os.pipe()
        replies, replies_end = os.pipe()

        def serve() -> None:
            with suppress(Ended):
                ProgramServer(requests_end, replies_end).serve(source)
            os.close(requests_end)
            os.close(replies_end)

        thread = threading.Thread(target=serve)
        thread.start()
        session = TestSession({"setup": setup, "tests": tests, "names": names})
        report = session.run(ProgramConnection(requests, replies, 30.0))
        os.close(requests)
        thread.join(30)
        os.close(replies)
        return report

    yield run_program


def test_report_lists_the_results_and_the_first_failure(run: Any) -> None:
    report = run("def f(x): return 2 * x", ["assert f(1) == 2", "assert f(2) == 5, 'no'", "assert f(3) == 7", "f(1)"])
    assert report == {
        "kind": "report",
        "stage": "done",
        "passed": [True, False, False, True],
        "detail": "f(2): 4 instead of 5",
    }


def test_exceptions_of_the_program_arrive_by_name(run: Any) -> None:
    kinds = "[Own, OSError, KeyboardInterrupt, StopIteration]"
    source = f"class Own(Exception): pass\ndef f(x):\n    raise {kinds}[x]('why')"
    tests = [
        "try: f(1)\nexcept OSError as error: assert str(error) == 'why'",
        "try: f(0)\nexcept Exception as error: assert str(error) == 'Own: why'",
        "try: f(2)\nexcept Exception as error: assert 'KeyboardInterrupt' in str(error)",
        "assert f(0) == 1",
        "assert all(map(f, [3]))",
    ]
    report = run(source, tests)
    assert report["passed"] == [True, True, True, False, False] and report["detail"] == "f(0): Own: why"


def test_arguments_that_the_program_changes_are_changed(run: Any) -> None:
    source = "def f(a, b, c, d):\n    a.append(1); b['k'] = 2; c.add(3); d[0][0] = 4"
    test = "a, b, c, d = [], {}, set(), [[0]]\nf(a, b, c, d)\nassert (a, b, c, d) == ([1], {'k': 2}, {3}, [[4]])"
    assert run(source, [test])["passed"] == [True]
