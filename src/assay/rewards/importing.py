"""Import users' classes and functions by "package.module:name" or "path/to/file.py:name"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.types import UserError

guard: Callable[[str], None] | None = None  # called before an object is imported; raises if that is not allowed


def load_object(path: str) -> Any:
    """Import the object at "package.module:name" or "file.py:name"."""
    module, name = split_path(path)
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
