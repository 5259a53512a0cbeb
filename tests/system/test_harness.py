"""Programs and their tests: plain values between two processes that do not trust each other."""

from __future__ import annotations

import enum
import json
import math
import os
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from assay.system.harness import (
    PlainDecoder,
    PlainEncoder,
    ProgramConnection,
    ProgramServer,
    TestSession,
    TooLarge,
    difference,
    shown,
)
from assay.system.pipe_messages import BadMessage


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


def sent(value: Any) -> Any:
    """The value on the other side, where objects are (number, type name)."""
    kept: list[Any] = []

    def keep(kept_value: Any) -> int:
        kept.append(kept_value)
        return len(kept) - 1

    data = json.loads(json.dumps(PlainEncoder(keep).encode(value)))
    return PlainDecoder(lambda number, name: (number, name)).decode(data)


PLAIN = (
    *(None, True, -3, 2**53, -(2**9999), 1.5, -0.0, math.inf, "a\ud800\n", b"\0\xff", bytearray(b"x"), 1 - 2j),
    *([1, [2.0, None]], (1, (2,)), (), {1, "a", (2,)}, frozenset([frozenset()])),
    {"a": {1: (2, 3)}, (4,): 5, None: [], 1.5: {}},
)


def test_plain_values_are_preserved_with_their_types() -> None:
    for value in PLAIN:
        received = sent(value)
        assert received == value and type(received) is type(value) and repr(received) == repr(value)
    assert math.isnan(sent(math.nan))


class Liar:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        raise AssertionError

    __int__ = __float__ = __str__ = __repr__ = __index__ = items = __iter__


class LyingInt(Liar, int): ...


class LyingStr(Liar, str): ...


class LyingList(Liar, list): ...  # type: ignore[type-arg]


class LyingDict(Liar, dict): ...  # type: ignore[type-arg]


class Color(enum.IntEnum):
    RED = 1


SUBCLASSES: tuple[tuple[Any, Any], ...] = (
    *((LyingInt(3), 3), (LyingStr("a"), "a"), (LyingList([1]), [1]), (LyingDict({"a": LyingInt(1)}), {"a": 1})),
    *((Color.RED, 1), (Counter("aa"), {"a": 2}), (defaultdict(list, {1: [2]}), {1: [2]}), (OrderedDict(a=1), {"a": 1})),
)


def test_instances_of_subclasses_arrive_as_their_plain_content() -> None:
    for value, content in SUBCLASSES:
        received = sent(value)
        assert type(received) is type(content) and received == content


def test_other_objects_stay_where_they_are() -> None:
    assert sent([Liar(), (x for x in "")]) == [(0, "Liar"), (1, "generator")]


def test_large_and_deep_values_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    wide: list[Any] = []
    for _ in range(50):
        wide = [wide, wide]
    for value in (deep, wide, [0] * 200_000):
        with pytest.raises(TooLarge):
            sent(value)


MALFORMED = (
    *({}, {"int": 3}, {"int": "x"}, {"set": [[1]]}, {"dict": [[[1], 2]]}, {"dict": [1]}, {"tuple": 3}),
    *({"complex": [1, 2, 3]}, {"bytes": "xy"}, {"object": 3}, {"object": [True, "x"]}, {"object": ["1", "x"]}),
    *({"eval": "1"}, {"int": "1", "set": []}, json.loads("[" * 150 + "]" * 150)),
)


def test_malformed_data_are_a_bad_message() -> None:
    for data in MALFORMED:
        with pytest.raises(BadMessage):
            PlainDecoder(lambda number, name: None).decode(data)


def test_differences_say_where() -> None:
    assert difference({"a": [1, 2]}, {"a": [1, 3]}) == "2 instead of 3 at ['a'][1]"
    assert difference((1.0000001, "x"), [1.0, "x"]) == ""
    assert difference(1, True) and difference(True, 1) and difference([1], 1) and difference({}, [])
    assert shown(10**5000) == "<int>" and len(shown("x" * 500)) == 80
