"""What the settings of a run name outside of its folder is used only with the user's consent.

A run directory may come from anyone, and its config.toml can name Python code, programs, hosts, environment variables
and files. The fields of the settings declare which of these they name (`Resource`). Consent is stored in the user's
state directory, never in the run directory: one file for each combination of the settings that name something, the
paths of the files, and the content of code. Runs that the user started are stored by settings and paths of code alone,
so that users can edit their own files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python

from assay.config import TrainConfig
from assay.config.settings import Resource, keys, resource_of
from assay.rewards import functions
from assay.runs.console import asker
from assay.runs.files import user_folder
from assay.tasks.datasets import PREFIX as REASONING_GYM
from assay.types import UserError

PATHS = (Resource.FILE, Resource.DATA)
NOT_CHECKED_AT_START = (Resource.CODE, Resource.DATA)  # code is checked when it is imported
UNCONFINED = "allow_unconfined"  # argument of tasks with which programs that a model wrote can do anything

_unconfirmed: list[ForeignRun] = []  # runs whose code may not be imported yet


class Named(NamedTuple):
    """Something that a setting names."""

    key: str
    resource: Resource
    text: str


class ForeignRun:
    """A run directory that the user has neither started nor trusted."""

    def __init__(self, cfg: TrainConfig, folder: Path, typed: Mapping[str, Any], allow: str) -> None:
        self.folder = folder
        self._cfg, self._typed, self._allow = cfg, typed, allow
        code = {functions.normalized(text) for text in code_names(cfg)}
        self._code = code - {functions.normalized(text) for _, text in leaves("", dict(typed))}

    def check_import(self, path: str) -> None:
        """Raise unless the user consents to the import of this object."""
        if functions.normalized(path) in self._code:
            self._confirm()

    def check_settings(self, used: Iterable[str] | None) -> None:
        """Raise unless the user consents to the programs, hosts, environment variables and files that settings name."""
        for entry in named_outside(self._cfg, self.folder):
            if entry.resource in NOT_CHECKED_AT_START or is_within(entry.key, self._typed):
                continue
            if used is None or is_within(entry.key, used):
                return self._confirm()

    def _confirm(self) -> None:
        what, ask = describe(self._cfg, self.folder), asker()
        if ask is None or not ask(f"{self.folder} {what}. Trust it?"):
            raise UserError(f"{self.folder} {what}: read its config.toml, and add {self._allow} if you trust it")
        remember_trust(self._cfg)
        remove_guard(self.folder)


def guard_run(
    cfg: TrainConfig,
    folder: Path,
    *,
    typed: Mapping[str, Any] | None = None,
    trust: bool = False,
    used: Iterable[str] | None = None,
    allow: str = "--trust",
) -> None:
    """Raise unless the user consents to what the settings of this run name. Ask for code later, before its import.

    `typed`: settings of the current command, which imply consent. `used`: keys of the settings that the command uses;
    None: all of them. `allow`: the option that the error message suggests.
    """
    remove_guard(folder)
    if trust:
        remember_trust(cfg)
    if trust or is_trusted(cfg):
        return
    run = ForeignRun(cfg, folder, typed or {}, allow)
    _unconfirmed.append(run)
    functions.guard = check_import
    run.check_settings(used)


def remove_guard(folder: Path) -> None:
    _unconfirmed[:] = [run for run in _unconfirmed if run.folder != folder]


def check_import(path: str) -> None:
    for run in list(_unconfirmed):
        run.check_import(path)


def remember_trust(cfg: TrainConfig, started: bool = False) -> None:
    """Store that the user trusts a run with these settings, or has `started` it."""
    entries = [entry for entry in named_in(cfg) if entry.resource is not Resource.DATA]
    if not entries:
        return
    with suppress(OSError, RuntimeError):  # without a home directory, the user is asked again
        file = trust_file(cfg, contents=not started)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = "".join(f"{show(entry)}\n" for entry in entries)
        file.write_text(text, encoding="utf-8", errors="backslashreplace")


def extend_trust(before: TrainConfig, after: TrainConfig) -> None:
    """Trust in a run covers the settings that the user has changed in a command."""
    for contents in (True, False):
        with suppress(OSError, RuntimeError):
            if trust_file(before, contents).is_file():
                remember_trust(after, started=not contents)


def is_trusted(cfg: TrainConfig) -> bool:
    try:
        return any(trust_file(cfg, contents).is_file() for contents in (True, False))
    except (OSError, RuntimeError):
        return False


def trust_file(cfg: TrainConfig, contents: bool) -> Path:
    return user_folder("XDG_STATE_HOME", ".local/state") / "trusted" / digest(cfg, contents)


def digest(cfg: TrainConfig, contents: bool) -> str:
    """A hash of all settings that name something, of the paths of code, and of its `contents` and all other paths."""
    settings = {key: to_jsonable_python(value, fallback=str) for key, _, value in named_settings(cfg)}
    files = {
        name: [str(file := code_file(name)), content_hash(file) if contents else "any"] for name in code_names(cfg)
    }
    paths = [location(entry) for entry in named_in(cfg)] if contents else []
    text = json.dumps([settings, files, paths], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def named_settings(cfg: TrainConfig) -> Iterator[tuple[str, Resource, Any]]:
    """The settings that declare a `Resource`, with their values; default values name nothing."""
    for key, resource, usual in declared_resources():
        if (value := attrgetter(key)(cfg)) != usual:
            yield key, resource, value


@cache
def declared_resources() -> list[tuple[str, Resource, Any]]:
    """The settings that declare a `Resource`, with their default values."""
    declared = [(key, resource_of(field)) for key, field in keys(TrainConfig)]
    default = TrainConfig()
    return [(key, resource, attrgetter(key)(default)) for key, resource in declared if resource is not None]


def named_in(cfg: TrainConfig) -> Iterator[Named]:
    """Everything that the settings name."""
    for key, resource, value in named_settings(cfg):
        for path, text in leaves(key, value):
            if resource is Resource.CODE and path.endswith(f".{UNCONFINED}"):
                yield Named(path, Resource.PROGRAM, text)
            elif resource is Resource.CODE and not is_code(text):  # a path among the arguments, or a plain name
                yield Named(path, Resource.DATA, text)
            else:
                yield Named(path, resource, text)


def leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """All values in a setting as texts, with their keys, except empty ones, 0 and false."""
    if isinstance(value, dict | list | tuple):
        for name, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{key}.{name}", below)
    elif value and isinstance(value, str | int | float):
        yield key, str(value)


def code_names(cfg: TrainConfig) -> list[str]:
    return [entry.text for entry in named_in(cfg) if entry.resource is Resource.CODE]


def is_code(text: str) -> bool:
    """Whether this has the form of a path to an object: file.py:name or package.module:name."""
    data_set = text.startswith(REASONING_GYM) and text.removeprefix(REASONING_GYM).isidentifier()
    return ":" in text.strip(":") and not data_set


def named_outside(cfg: TrainConfig, folder: Path) -> Iterator[Named]:
    """Everything that the settings name, except what is in the run folder, and data that are not on this machine."""
    for entry in named_in(cfg):
        if entry.resource not in PATHS or ((path := location(entry)) and leads_outside(Path(path), folder)):
            yield entry


def leads_outside(path: Path, folder: Path) -> bool:
    """Whether a path is outside of a folder, or is a folder in it with links that lead outside."""
    inner = os.path.realpath(folder)
    if not path.is_relative_to(inner):
        return True
    return any(not Path(os.path.realpath(link)).is_relative_to(inner) for link in path.rglob("*") if link.is_symlink())


def location(entry: Named) -> str:
    """The absolute path that a setting names, without links. Empty if it names none, or data not on this machine."""
    try:
        path = os.path.realpath(os.path.expanduser(entry.text))
    except ValueError:  # not a valid path: a null byte
        return ""
    return path if entry.resource is Resource.FILE or (entry.resource is Resource.DATA and os.path.exists(path)) else ""


def is_within(key: str, sections: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def describe(cfg: TrainConfig, folder: Path) -> str:
    """What a run does with everything that its settings name outside of its folder."""
    shown: dict[Resource, list[str]] = {}
    for entry in named_outside(cfg, folder):
        shown.setdefault(entry.resource, []).append(show(entry))
    return "; ".join(f"{resource.value} ({', '.join(shown[resource])})" for resource in Resource if resource in shown)


def show(entry: Named) -> str:
    where = str(code_file(entry.text) or "") if entry.resource is Resource.CODE else location(entry)
    text = f"{entry.key} = {entry.text}" + f" ({where})" * (where not in ("", entry.text))
    return text if text.isprintable() else ascii(text)


def code_file(path: str) -> Path | None:
    """The file that importing this object would execute; found without importing anything."""
    module = path.rpartition(":")[0]
    if module.endswith(".py"):
        try:
            return Path(module).expanduser().resolve()
        except (OSError, ValueError, RuntimeError):  # not a valid path: a null byte, a loop of links
            return None
    search: Any = None
    origin = None
    for name in accumulate(module.split("."), "{}.{}".format):
        try:
            spec = PathFinder.find_spec(name, search)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return None
        origin, search = spec.origin, spec.submodule_search_locations
    return Path(origin).resolve() if origin else None


def content_hash(file: Path | None) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""
