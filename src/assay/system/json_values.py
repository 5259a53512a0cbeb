"""Python values as JSON, between processes that do not trust each other.

None, bool, int, float, str and lists are written as in JSON; other plain types as {"type": content}. Instances of
subclasses are sent as their plain content: an int whose `==` is always true arrives as an ordinary int. All other
objects stay where they are, and a number identifies them: {"object": [number, name of the type]}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from assay.system.pipe_messages import BadMessage
from assay.types import clip

MAX_NODES = 100_000
MAX_DEPTH = 100
_SMALL = 1 << 53

_PLAIN = (bool, int, float, str, list, tuple, dict, set, frozenset, bytes, bytearray, complex)


class TooLarge(ValueError):
    """A value has too many elements, or is nested too deeply."""


class PlainEncoder:
    """Encodes one message. `keep` stores an object that is not plain, and returns its number."""

    def __init__(self, keep: Callable[[Any], int]) -> None:
        self._keep = keep
        self._nodes = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return what `json.dumps` can write. Calls no method that a subclass may have defined."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise TooLarge(f"the value has more than {MAX_NODES:,} elements")
        if depth > MAX_DEPTH:
            raise TooLarge(f"the value is nested more than {MAX_DEPTH} deep")
        own = type(value)
        if value is None or own is bool:
            return value
        kind = next((plain for plain in _PLAIN if issubclass(own, plain)), None)
        if kind is int:
            number = int.__int__(value)
            return number if -_SMALL < number < _SMALL else {"int": hex(number)}
        if kind is float:
            return float.__float__(value)
        if kind is str:
            return str.__str__(value)
        if kind is bytes or kind is bytearray:
            return {kind.__name__: memoryview(value).hex()}
        if kind is complex:
            return {"complex": [complex(value).real, complex(value).imag]} if own is complex else self._object(value)
        if kind is dict:
            pairs = dict.items(value)
            return {"dict": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in pairs]}
        if kind is None:
            return self._object(value)
        elements = [self.encode(element, depth + 1) for element in kind.__iter__(value)]  # type: ignore[union-attr]
        return elements if kind is list else {kind.__name__: elements}

    def _object(self, value: Any) -> Any:
        return {"object": [self._keep(value), type(value).__name__[:100]]}


class PlainDecoder:
    """Decodes what an untrusted process sent. `find` returns the object with a number and the name of its type."""

    def __init__(self, find: Callable[[int, str], Any]) -> None:
        self._find = find

    def decode(self, data: Any, depth: int = 0) -> Any:
        """Return the value; raise BadMessage if the data are invalid."""
        if depth > MAX_DEPTH:
            raise BadMessage("a value is nested too deeply")
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if isinstance(data, list):
            return [self.decode(element, depth + 1) for element in data]
        if not isinstance(data, dict) or len(data) != 1:
            raise BadMessage("it contains an invalid value")
        ((kind, content),) = data.items()
        try:
            return self._tagged(kind, content, depth + 1)
        except (TypeError, ValueError, KeyError, OverflowError):  # e.g. a set of lists
            raise BadMessage(f"it contains an invalid {kind[:20]}") from None

    def _tagged(self, kind: str, content: Any, depth: int) -> Any:
        if kind == "int":
            return int(content, 16)
        if kind == "dict":
            return {self.decode(key, depth): self.decode(value, depth) for key, value in content}
        if kind in ("bytes", "bytearray"):
            return bytes.fromhex(content) if kind == "bytes" else bytearray.fromhex(content)
        if kind == "complex":
            return complex(*content)
        if kind == "object":
            number, name = content
            if type(number) is not int or not isinstance(name, str):
                raise BadMessage("it contains an invalid object")
            return self._find(number, name)
        constructors: dict[str, Callable[[Iterable[Any]], Any]]
        constructors = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return constructors[kind]([self.decode(element, depth) for element in content])


def difference(value: Any, expected: Any, path: str = "") -> str:
    """Return where a value differs from an expected JSON value, or an empty string.

    Types must be equal, but tuples count as lists, and an int counts as a float. Floats may differ by a relative 1e-6.
    """
    where = f" at {path}" if path else ""
    if isinstance(expected, list):
        if not isinstance(value, list | tuple):
            return f"{shown(value)} instead of {shown(expected)}{where}"
        if len(value) != len(expected):
            return f"{shown(value)} instead of {shown(expected)}{where}"
        pairs = zip(value, expected, strict=True)
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(pairs))), "")
    if isinstance(expected, dict):
        if not isinstance(value, dict) or set(value) != set(expected):
            return f"{shown(value)} instead of {shown(expected)}{where}"
        return next(filter(None, (difference(value[key], expected[key], f"{path}[{key!r}]") for key in expected)), "")
    if isinstance(expected, float) and type(value) in (int, float):
        same = math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9) or (value != value and expected != expected)
    else:
        same = type(value) is type(expected) and value == expected
    return "" if same else f"{shown(value)} instead of {shown(expected)}{where}"


def shown(value: Any, limit: int = 80) -> str:
    """Return the repr of a plain value, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError, MemoryError):  # e.g. an integer with thousands of digits
        text = f"<{type(value).__name__}>"
    return clip(text, limit)
