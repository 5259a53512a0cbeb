"""Import users' classes and functions by "package.module:name" or "path/to/file.py:name".

Objects of a Python program, such as a reward function in a notebook, get a path as well: "python-HASH:name". It can be
loaded as long as the program runs; HASH is of the object's source.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from assay.types import UserError

guard: Callable[[str], None] | None = None  # called before an object is imported; raises if that is not allowed
OBJECT = "python-"  # at the start of paths of objects of this program
_objects: dict[str, Any] = {}  # by path


def register(value: Any) -> str:
    """Return a path for an object of this program."""
    source = source_of(value)
    name = re.sub(r"\W+", "", getattr(value, "__name__", type(value).__name__)) or "object"
    path = f"{OBJECT}{hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}:{name}"
    _objects[path] = value
    return path


def registered(path: str) -> Any:
    """The object that was registered under this path; None if there is none."""
    return _objects.get(path)


def source_of(value: Any) -> str:
    """What identifies an object in another session: the source of its function or class, and simple values in it."""
    if isinstance(value, partial):
        inner = (*value.args, *value.keywords.items())
        return f"{source_of(value.func)}{list(map(_simple, inner))}"
    definition = inspect.unwrap(value) if inspect.isroutine(value) or isinstance(value, type) else type(value)
    code = getattr(definition, "__code__", None)
    try:
        if getattr(definition, "__name__", "") == "<lambda>":  # its source is the statement around it
            raise OSError
        text = inspect.getsource(definition)
    except (OSError, TypeError):  # typed into an interpreter, or not written in Python
        text = _compiled(code) if code else f"{definition.__module__}.{definition.__qualname__}"
    cells = inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {}
    fields = {} if inspect.isroutine(value) or isinstance(value, type) else getattr(value, "__dict__", {})
    return f"{text}{[(name, _simple(inner)) for name, inner in sorted({**cells, **fields}.items())]}"


def _compiled(code: CodeType) -> str:
    constants = [_compiled(value) if inspect.iscode(value) else repr(value) for value in code.co_consts]
    return f"{code.co_code!r}{code.co_names}{code.co_varnames}{constants}"


def _simple(value: Any) -> Any:
    """The value, if its representation is the same in every session; else its type."""
    if isinstance(value, tuple | list):
        return [_simple(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


def load_object(path: str) -> Any:
    """Import the object at "package.module:name" or "file.py:name", or return a registered one."""
    if path in _objects:
        return _objects[path]
    module, name = split_path(path)
    if module.startswith(OBJECT):
        raise UserError(
            f"{name} ({path}) is an object of the Python program that started the run: pass it again, unchanged, to "
            "assay.train(resume=...) or assay.evaluate(...), or name a function in a file instead"
        )
    if guard is not None:
        guard(path)
    loaded: Any = _load_file(Path(module)) if module.endswith(".py") else _load_module(module)
    for part in name.split("."):
        if not hasattr(loaded, part):
            raise UserError(f"'{module}' has no '{part}': check the name after ':' in '{path}'")
        loaded = getattr(loaded, part)
    return loaded


def split_path(path: str) -> tuple[str, str]:
    """Split into module or file, and name."""
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        raise UserError(f"'{path}' does not name an object: write package.module:name or file.py:name")
    return module, name


def normalized(path: str) -> str:
    """Return one form for all spellings of a file's path; text that names no object is returned unchanged."""
    module, colon, name = path.rpartition(":")
    try:
        return f"{Path(module).resolve()}:{name}" if colon and module.endswith(".py") else path
    except (OSError, ValueError, RuntimeError):  # not a path: a null byte, a loop of links
        return path


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            advice = "check the name, or give the file as path/to/file.py:name"
            raise UserError(f"there is no module '{name}': {advice}") from None
        raise UserError(f"importing '{name}' failed: it needs the module '{missing}', which is not installed") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"'{name}' is not the name of a module: {error}") from None
    except Exception as error:
        raise UserError(f"importing '{name}' failed: {type(error).__name__}: {error}") from error


def _load_file(file: Path) -> ModuleType:
    try:
        file = file.expanduser().resolve()
        is_file = file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links, a name that is too long
        raise UserError(f"'{str(file)[:200]}' is not the path of a file ({error})") from error
    if not is_file:
        raise UserError(f"there is no file '{file}': check the path before ':'")
    name = f"{file.stem}_{hashlib.sha256(str(file).encode(errors='surrogateescape')).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"'{file}' cannot be loaded as Python code")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # so that it can import other files of its folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look up their module by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"running '{file}' failed: {type(error).__name__}: {error}") from error
    return module
