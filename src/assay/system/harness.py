"""Run a program that a model wrote, and its tests, in two processes that exchange plain values.

The tests run in a process of their own. There, a function of the program is a `RemoteObject`: a call sends the
arguments to the process of the program, and returns what comes back as plain values. So the program sees neither the
tests nor the expected values, and whether a test passes is decided where the program has no access.

None, bool, int, float, str and lists are written as in JSON; other plain types as {"type": content}. Instances of
subclasses are sent as their plain content: an int whose `==` is always true arrives as an ordinary int. All other
objects stay where they are, and a number identifies them: {"object": [number, name of the type]}.
"""

from __future__ import annotations

import ast
import builtins
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem
from types import ModuleType
from typing import Any, NoReturn

from assay.system.spawn import BadMessage, JsonReader, encode_json, send_bytes, send_json
from assay.types import clip, describe_error, excerpt

MODULE = "program"  # the program's __name__
MAX_MESSAGE = 1 << 20  # bytes of one value or list of arguments
MAX_ITERATIONS = 100_000
MAX_DETAIL = 300
FOREVER_S = 86_400.0
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
        exact_type = type(value)
        if value is None or exact_type is bool:
            return value
        kind = next((plain for plain in _PLAIN if issubclass(exact_type, plain)), None)
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
            return (
                {"complex": [complex(value).real, complex(value).imag]}
                if exact_type is complex
                else self._object(value)
            )
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
    if isinstance(expected, list) and isinstance(value, list | tuple) and len(value) == len(expected):
        pairs = zip(value, expected, strict=True)
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(pairs))), "")
    if isinstance(expected, dict) and isinstance(value, dict) and set(value) == set(expected):
        return next(filter(None, (difference(value[key], expected[key], f"{path}[{key!r}]") for key in expected)), "")
    if isinstance(expected, float) and type(value) in (int, float):
        same = math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9) or (value != value and expected != expected)
    else:
        same = type(value) is type(expected) and value == expected
    return "" if same else f"{shown(value)} instead of {shown(expected)}{f' at {path}' if path else ''}"


def shown(value: Any, limit: int = 80) -> str:
    """Return the repr of a plain value, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError, MemoryError):  # e.g. an integer with thousands of digits
        text = f"<{type(value).__name__}>"
    return clip(text, limit)


class ProgramServer:
    """In the process of the program: runs it, then answers requests from the tests."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = JsonReader(requests), replies
        self._objects: list[Any] = []
        self._module = ModuleType(MODULE)

    def serve(self, source: str) -> NoReturn:
        self._send(self._load(source))
        while True:
            try:
                request = self._requests.receive(time.monotonic() + FOREVER_S)
            except EOFError:
                os._exit(0)
            self._send(self._answer(request))

    def _load(self, source: str) -> dict[str, Any]:
        sys.modules[MODULE] = self._module
        try:
            code = compile(source, f"<{MODULE}>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            return {"kind": "syntax", "error": describe_error(error)}
        try:
            exec(code, self._module.__dict__)
        except BaseException as error:
            return {"kind": "raised", "error": describe_error(error)}
        return {"kind": "loaded"}

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"kind": "value", **self._perform(request)}
        except BaseException as error:  # also SystemExit and the program's own exceptions
            return {"kind": "raised", "type": type(error).__name__, "error": describe_error(error)}

    def _perform(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["kind"] == "names":
            defined = self._module.__dict__
            return self._value({name: defined[name] for name in request["names"] if name in defined})
        target = self._objects[request["object"]]
        decoder = PlainDecoder(lambda number, _: self._objects[number])
        arguments = [decoder.decode(argument) for argument in request["arguments"]]
        if request["kind"] == "call":
            named = {name: decoder.decode(value) for name, value in request["named"].items()}
            return self._value(target(*arguments, **named), arguments)
        return self._value(QUESTIONS[request["kind"]](target, *arguments))

    def _value(self, value: Any, arguments: Sequence[Any] = ()) -> dict[str, Any]:
        """Encode a result, and the arguments, which a function may have changed."""
        encoder = PlainEncoder(self._keep)
        mutable = {
            str(i): argument for i, argument in enumerate(arguments) if type(argument) in (list, dict, set, bytearray)
        }
        return {
            "value": encoder.encode(value),
            "changed": {i: encoder.encode(argument) for i, argument in mutable.items()},
        }

    def _keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _send(self, reply: dict[str, Any]) -> None:
        payload = encode_json(reply)
        if len(payload) > MAX_MESSAGE:
            error = f"the result is longer than {MAX_MESSAGE >> 20} MiB"
            payload = encode_json({"kind": "raised", "type": "ValueError", "error": error})
        send_bytes(self._replies, payload)


def _elements(target: Any) -> list[Any]:
    elements = []
    for element in target:
        elements.append(element)
        if len(elements) > MAX_ITERATIONS:
            raise TooLarge(f"it has more than {MAX_ITERATIONS:,} elements")
    return elements


QUESTIONS: dict[str, Callable[..., Any]]  # about an object of the program, by their kinds
QUESTIONS = {"attribute": getattr, "item": getitem, "elements": _elements, "length": len, "truth": bool}


class ProgramLost(BaseException):
    """The program ended, or broke the protocol. Tests that catch all exceptions must not catch it."""


class ProgramTimeout(BaseException):
    """The time limit of the program is over."""


class ProgramRaised(Exception):
    """The program raised an exception that is not one of Python's own."""


class RemoteObject:
    """In the process of the tests: a function, class or other object of the program."""

    def __init__(self, connection: ProgramConnection, number: int, type_name: str) -> None:
        self._connection, self._number, self._type_name = connection, number, type_name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._connection.ask("call", self._number, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", name)

    def __iter__(self) -> Any:
        return iter(self._ask("elements"))

    def __len__(self) -> int:
        return self._ask("length")

    def __bool__(self) -> bool:
        return self._ask("truth")

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __repr__(self) -> str:
        return f"<{self._type_name}>"

    def _ask(self, kind: str, *arguments: Any) -> Any:
        return self._connection.ask(kind, self._number, arguments)


class ProgramConnection:
    """In the process of the tests: sends requests to the program. What comes back is not trusted."""

    def __init__(self, requests: int, replies: int, timeout_s: float) -> None:
        self._requests, self._replies = requests, JsonReader(replies)
        self._deadline = time.monotonic() + timeout_s
        self._decoder = PlainDecoder(lambda number, name: RemoteObject(self, number, name))
        os.set_blocking(requests, False)

    def wait_until_loaded(self) -> tuple[str, str]:
        """Return "loaded", "syntax" or "raised", and the error."""
        message = self._receive()
        if message["kind"] not in ("loaded", "syntax", "raised"):
            raise ProgramLost("the program sent an invalid message")
        return message["kind"], str(message.get("error", ""))[:MAX_DETAIL]

    def names(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the values of the global variables that the program defines, of those with these names."""
        values = self._exchange({"kind": "names", "names": list(names)})[0]
        if not isinstance(values, dict):
            raise ProgramLost("the program sent an invalid message")
        return {name: values[name] for name in names if name in values}

    def ask(self, kind: str, number: int, arguments: Sequence[Any], named: Mapping[str, Any] | None = None) -> Any:
        """Ask about an object of the program, or call it. Arguments that a call has changed are changed here, too."""
        encoder = PlainEncoder(_own_number)
        request = {
            "kind": kind,
            "object": number,
            "arguments": [encoder.encode(argument) for argument in arguments],
            "named": {name: encoder.encode(value) for name, value in (named or {}).items()},
        }
        value, changed = self._exchange(request)
        for index, argument in enumerate(arguments):
            if str(index) in changed:
                _replace(argument, changed[str(index)])
        return value

    def _exchange(self, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        try:
            send_bytes(self._requests, encode_json(request), self._deadline)
        except TimeoutError:
            raise ProgramTimeout from None
        except BrokenPipeError:
            raise ProgramLost("the program ended") from None
        reply = self._receive()
        if reply["kind"] == "raised":
            raise _exception(str(reply.get("type")), str(reply.get("error"))[:MAX_DETAIL])
        if reply["kind"] != "value" or not isinstance(reply.get("changed"), dict):
            raise ProgramLost("the program sent an invalid message")
        try:
            changed = {index: self._decoder.decode(value) for index, value in reply["changed"].items()}
            return self._decoder.decode(reply.get("value")), changed
        except BadMessage as error:
            raise ProgramLost(f"the program sent an invalid message: {error}") from None

    def _receive(self) -> dict[str, Any]:
        try:
            return self._replies.receive(self._deadline, MAX_MESSAGE)
        except TimeoutError:
            raise ProgramTimeout from None
        except EOFError:
            raise ProgramLost("the program ended") from None
        except BadMessage as error:
            raise ProgramLost(f"the program sent an invalid message: {error}") from None


def _own_number(value: Any) -> int:
    if isinstance(value, RemoteObject):
        return value._number
    raise TypeError(f"a test passes {type(value).__name__} to the program: use plain values")


def _replace(argument: Any, changed: Any) -> None:
    """Give a list, dict or set the content that the program left in it."""
    if type(argument) is not type(changed) or argument == changed:
        return
    if isinstance(argument, list | bytearray):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


# They would end a loop of a test, such as all(map(f, values)), as if it passed.
_SILENT = (StopIteration, StopAsyncIteration)


def _exception(name: str, error: str) -> Exception:
    """Return Python's own exception of this name, so that tests can expect it; else ProgramRaised."""
    kind = getattr(builtins, name, None)
    text = error.removeprefix(f"{name}: ")
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _SILENT:
        try:
            return kind(text)
        except TypeError:  # UnicodeError needs more arguments
            pass
    return ProgramRaised(error)


class TestSession:
    """In the process of the tests: runs them and reports the outcome.

    `tests`: {"setup": code, "tests": [code or {"call": code, "expected": JSON}], "names": [...] or None}. All code has
    one namespace. `names` are the variables that the program has to define.
    """

    __test__ = False  # not a class of pytest

    def __init__(self, tests: Mapping[str, Any]) -> None:
        """Raises SyntaxError or another exception if a test is invalid."""
        self._setup = compile(tests["setup"], "<setup>", "exec", dont_inherit=True)
        self._tests = [_compiled(test) for test in tests["tests"]]
        calls = [test if isinstance(test, str) else test["call"].strip() for test in tests["tests"]]
        self._required = list(tests["names"] or ())
        self._names = list(dict.fromkeys([*self._required, *_free_names([tests["setup"], *calls])]))
        self._namespace: dict[str, Any] = {"__name__": "tests"}

    def run(self, connection: ProgramConnection) -> dict[str, Any]:
        """Return the report: the stage that was reached, which tests passed, and the first failure."""
        passed: list[bool] = []
        detail = ""
        try:
            stage, error = connection.wait_until_loaded()
            if stage != "loaded":
                return self._report(stage, passed, error)
            self._namespace.update(connection.names(self._names))
            missing = [name for name in self._required if name not in self._namespace]
            if missing:
                return self._report("raised", passed, f"the program does not define {missing[0]}")
            exec(self._setup, self._namespace)
            for text, check in self._tests:
                why = check(self._namespace)
                passed.append(not why)
                detail = detail or (f"{excerpt(text, MAX_DETAIL // 2)}: {why}" if why else "")
        except ProgramTimeout:
            return self._report("timeout", passed, detail)
        except ProgramLost as lost:
            return self._report("lost", passed, detail or str(lost))
        except Exception as raised:
            return self._report("invalid", passed, f"the set-up of the tests failed: {describe_error(raised)}")
        return self._report("done", passed, detail)

    def _report(self, stage: str, passed: list[bool], detail: str) -> dict[str, Any]:
        results = passed + [False] * (len(self._tests) - len(passed))
        return {"kind": "report", "stage": stage, "passed": results, "detail": detail[: 2 * MAX_DETAIL]}


Check = Callable[[dict[str, Any]], str]  # returns why a test failed, or an empty string


def _compiled(test: str | Mapping[str, Any]) -> tuple[str, Check]:
    """Compile a test; returns its text and a function that runs it."""
    if isinstance(test, Mapping):
        call = compile(test["call"].strip(), "<test>", "eval", dont_inherit=True)
        return test["call"], lambda names: _caught(lambda: difference(eval(call, names), test["expected"]))
    tree = ast.parse(test)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Assert) and isinstance(last.test, ast.Compare):
        compared = last.test
        if len(compared.ops) == 1 and isinstance(compared.ops[0], ast.Eq):
            return ast.unparse(compared.left), _equality(tree.body[:-1], compared.left, compared.comparators[0])
    code = compile(tree, "<test>", "exec", dont_inherit=True)
    return test, lambda names: _caught(lambda: exec(code, names))


def _equality(before: list[ast.stmt], left: ast.expr, right: ast.expr) -> Check:
    """A test that ends in `assert left == right`: it says what was compared, instead of the message of the test."""
    prelude = compile(ast.Module(before, []), "<test>", "exec", dont_inherit=True)
    sides = [compile(ast.Expression(side), "<test>", "eval", dont_inherit=True) for side in (left, right)]

    def check(names: dict[str, Any]) -> str:
        exec(prelude, names)
        value, expected = (eval(side, names) for side in sides)
        return "" if value == expected else f"{shown(value)} instead of {shown(expected)}"

    return lambda names: _caught(lambda: check(names))


def _caught(check: Callable[[], str | None]) -> str:
    try:
        return check() or ""
    except AssertionError as error:
        return describe_error(error) if str(error) else "the assertion is false"
    except Exception as error:
        return describe_error(error).removeprefix("ProgramRaised: ")
    except SystemExit:
        return "the test called sys.exit"


def _free_names(sources: Sequence[str]) -> list[str]:
    """Return all names in the tests that are not Python's own: a program must not replace `len` or `set`."""
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and not hasattr(builtins, node.id)}
    return sorted(names)


def run_tests(tests: Mapping[str, Any], connect: Callable[[], ProgramConnection], outgoing: int) -> str:
    """Run tests, send the report, and return its stage; `connect` is called when the tests are known to be valid."""
    try:
        session = TestSession(tests)
        report = session.run(connect())
    except Exception as error:
        detail = f"the tests are invalid: {describe_error(error)}"
        report = {"kind": "report", "stage": "invalid", "passed": [], "detail": detail}
    send_json(outgoing, report)
    return report["stage"]
