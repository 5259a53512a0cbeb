"""Plain values between two processes that do not trust each other. test_code_runner.py tests the harness itself."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest

from assay.system.harness import PlainDecoder, PlainEncoder, TooLarge, difference, shown
from assay.system.spawn import BadMessage


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


def written(value: Any) -> str:
    """As text; the order of a set depends on the hashes of this process and on the order of insertion."""
    return str(sorted(map(repr, value))) if isinstance(value, set | frozenset) else repr(value)


def test_plain_values_are_preserved_with_their_types() -> None:
    for value in PLAIN:
        received = sent(value)
        assert received == value and type(received) is type(value) and written(received) == written(value)
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
