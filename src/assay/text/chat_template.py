"""Chat templates with resource limits: a template comes with a model, and may be malicious or broken.

transformers renders templates in a sandbox without access to the system. Here loops, calls and sizes are limited too,
so that rendering always terminates, and every failure is a one-line error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from assay.types import Message, UserError

MAX_WORK = 1_000_000  # work units per rendering: loop iterations and items passed to calls; usual are thousands
CALL_UNITS = 10  # work units per call
MAX_CHARACTERS = 5_000_000  # of any intermediate text: far more than fits into a context
CHARACTERS_PER_UNIT = 1_000  # characters of text arguments that count as one work unit
MAX_INT_BITS = 1_000
DATE = datetime(2024, 7, 26)  # today, for templates that ask (Llama 3.2, SmolLM3): prompts must not change by the day
LOOP, JOIN = "assay_loop", "assay_join"  # filters inserted around the iterables of loops and instead of `~`
WIDE_FORMAT = re.compile(r"\{[^}]*\d{6}")  # in str.format
WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*(?:\*|\d{6})")


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        with template_errors("is not valid"):
            self._environment = limited_environment()
            self._template: Template = self._environment.from_string(source)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        self._environment.work = 0
        with template_errors(f"refuses these messages ({', '.join(m['role'] for m in messages[:20])})"):
            text = self._template.render(messages=[dict(message) for message in messages], **variables)
            return self._environment.checked(text)


@contextmanager
def template_errors(what: str) -> Iterator[None]:
    """Convert every exception of a template into a one-line UserError."""
    try:
        yield
    except RecursionError as error:
        raise UserError("the chat template is nested too deeply or recurses infinitely") from error
    except Exception as error:
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise UserError(f"the chat template {what}: {kind}{str(error)[:500]}") from error


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja sandbox with a work budget per rendering and size limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    work: int

    def spend(self, units: int = 1) -> None:
        self.work += units
        if self.work > MAX_WORK:
            raise SecurityError(f"it exceeds the limit of {MAX_WORK:,} steps")

    def count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend()
            yield item

    def checked(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > MAX_CHARACTERS:
            raise SecurityError(f"it creates a text of more than {MAX_CHARACTERS:,} characters")
        if isinstance(value, (list, tuple, dict)) and len(value) > MAX_WORK:
            raise SecurityError(f"it creates a list of more than {MAX_WORK:,} items")
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise SecurityError("a number is too large")
        return value

    def charged(self, name: str, args: Sequence[Any]) -> list[Any]:
        """Charge the work of a call or filter and check the sizes of its arguments; returns the arguments."""
        self.spend(CALL_UNITS)
        for arg in args:
            if isinstance(arg, str):
                self.spend(len(arg) // CHARACTERS_PER_UNIT)
            elif isinstance(arg, (list, tuple, dict, range)):
                self.spend(len(arg))
            elif isinstance(arg, int) and abs(arg) > MAX_CHARACTERS:
                raise SecurityError(f"an argument of {name or 'a call'} is too large")
        given = [list(self.count(arg)) if isinstance(arg, GeneratorType) else arg for arg in args]
        if text_size(name, given) > MAX_CHARACTERS:
            raise SecurityError(f"it creates a text of more than {MAX_CHARACTERS:,} characters")
        return given

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if name in ("format", "format_map") and isinstance(owner, str) and WIDE_FORMAT.search(owner):
            raise SecurityError("it formats a text of too many characters")
        _, *given = self.charged(name, [owner, *args, *kwargs.values()])
        args, kwargs = tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))
        if isinstance(function, LoopContext):  # a recursive loop: loop(children)
            args = tuple(Counted(self, arg) for arg in args)
        return self.checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, (str, list, tuple)) and isinstance(times, int) and len(some) * times > MAX_WORK:
                    raise SecurityError("it repeats a text or a list too often")
        if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= MAX_INT_BITS):
            raise SecurityError("a number is too large")
        is_format = operator == "%" and isinstance(left, str)
        if is_format and (WIDE_PERCENT.search(left) or text_size("format", [left, right]) > MAX_CHARACTERS):
            raise SecurityError("it formats a text of too many characters")
        return self.checked(super().call_binop(context, operator, left, right))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        InsertLimits().visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)


def text_size(name: str, args: Sequence[Any]) -> int:
    """Upper bound of the result size of methods and filters that can create a long text from short ones."""
    texts = [arg for arg in args if isinstance(arg, str)]
    if name == "replace" and len(texts) == 3:
        return texts[0].count(texts[1]) * len(texts[2])
    if name == "join":
        between = sum(map(len, texts))
        return sum(between + content_size(item) for arg in args if isinstance(arg, (list, tuple)) for item in arg)
    if name in ("format", "format_map") and texts:
        return (texts[0].count("{") + texts[0].count("%")) * sum(map(content_size, args[1:]))
    if name in ("expandtabs", "indent", "wordwrap") and texts:
        widths = [len(text) for text in texts[1:]]
        widths += [arg for arg in args if isinstance(arg, int) and name != "wordwrap"]
        return texts[0].count({"expandtabs": "\t", "indent": "\n"}.get(name, "")) * max(widths, default=0)
    return 0


def content_size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(content_size, value))
    if isinstance(value, dict):
        return sum(map(content_size, value.values()))
    return len(value) if isinstance(value, str) else 1


class Counted:
    """Iterable of a loop that charges the work budget per item."""

    def __init__(self, environment: LimitedEnvironment, items: Any) -> None:
        self._environment, self._items = environment, items

    def __iter__(self) -> Iterator[Any]:
        return self._environment.count(self._items)

    def __len__(self) -> int:
        return len(self._items)  # `loop.length` expects a TypeError if there is no length


def limited_environment() -> LimitedEnvironment:
    """The environment that transformers creates for chat templates (filters, globals, extensions), with limits."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    limited: LimitedEnvironment = object.__new__(LimitedEnvironment)
    limited.__dict__.update(_compile_jinja_template("").environment.overlay().__dict__)
    limited.work = 0
    limited.globals = {name: value for name, value in limited.globals.items() if name != "lipsum"}  # unbounded text
    limited.globals["strftime_now"] = DATE.strftime
    limited.extensions = {key: extension.bind(limited) for key, extension in limited.extensions.items()}
    limited.filters = {name: limited_filter(limited, name, function) for name, function in limited.filters.items()}
    limited.filters[LOOP] = lambda items: Counted(limited, items)
    limited.filters[JOIN] = lambda parts: limited.checked("".join(map(str, parts)))
    return limited


def limited_filter(environment: LimitedEnvironment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the attributes by which Jinja passes its context
    def limited(*args: Any, **kwargs: Any) -> Any:
        given = environment.charged(name, [*args, *kwargs.values()])
        named = dict(zip(kwargs, given[len(args) :], strict=True))
        return environment.checked(function(*given[: len(args)], **named))

    return limited


class InsertLimits(NodeTransformer):
    """Counts the items of each loop, and replaces each `a ~ b` by a filter that checks the size."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = as_filter(node.iter, LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return as_filter(nodes.List(node.nodes, lineno=node.lineno), JOIN)


def as_filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
