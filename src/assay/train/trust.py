"""Code that a run folder names is imported only with the user's consent.

A run's config.toml can name Python code (tasks, environments, rewards, losses, engines), and a run folder may come from
anybody. Consent is remembered in the user's state directory, never in the run folder: one file for each combination of
the settings that reach code, the paths of the files that they name, and the content of these files. Runs that the user
began are remembered by settings and paths alone, so that users can edit their own files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any

from assay.config import TrainConfig
from assay.rewards import importing
from assay.tasks.reasoning_gym import PREFIX as REASONING_GYM
from assay.types import UserError

Ask = Callable[[str], bool]  # puts a question to the person at the terminal

_unconfirmed: list[RunCode] = []  # runs whose code may not be imported yet


class RunCode:
    """The code that one run folder names."""

    def __init__(self, cfg: TrainConfig, folder: Path, typed: Iterable[str], ask: Ask | None, allow: str) -> None:
        self.folder = folder
        self._cfg, self._ask, self._allow = cfg, ask, allow
        named = {importing.normalized(text) for text in code_names(cfg)}
        self._named = named - {importing.normalized(text) for text in typed}

    def check(self, path: str) -> None:
        """Raise unless the user agrees that this object is imported."""
        if importing.normalized(path) in self._named:
            self._confirm(f"imports Python code, {describe(path)}")

    def check_remote_code(self) -> None:
        if self._cfg.model.trust_remote_code:
            self._confirm("runs Python code that comes with its model (model.trust_remote_code)")

    def _confirm(self, what: str) -> None:
        if self._ask is None or not self._ask(f"{self.folder} {what}. Trust it?"):
            raise UserError(f"{self.folder} {what}: read it, and allow it with {self._allow} if you trust it")
        remember(self._cfg)
        forget_question(self.folder)


def guard_run(
    cfg: TrainConfig,
    folder: Path,
    *,
    typed: Iterable[str] = (),
    trust: bool = False,
    ask: Ask | None = None,
    allow: str = "--trust",
) -> RunCode | None:
    """From now on, import code that this run's settings name only with consent. None: the user has given it already.

    `typed`: what the user named in this very command, which is consent. `allow`: how to say that a run is trusted.
    """
    forget_question(folder)
    if trust:
        remember(cfg)
    if trust or is_remembered(cfg):
        return None
    run = RunCode(cfg, folder, typed, ask, allow)
    _unconfirmed.append(run)
    importing.guard = check_import
    return run


def forget_question(folder: Path) -> None:
    _unconfirmed[:] = [run for run in _unconfirmed if run.folder != folder]


def check_import(path: str) -> None:
    for run in list(_unconfirmed):
        run.check(path)


def remember(cfg: TrainConfig, begun: bool = False) -> None:
    """The user trusts a run with these settings, or has `begun` it: its code may be imported without a question."""
    names = list(code_names(cfg))
    if not names and not cfg.model.trust_remote_code:
        return
    with suppress(OSError, RuntimeError):  # without a home directory the question is asked again, that is all
        file = record_of(cfg, contents=not begun)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text("".join(f"{describe(name)}\n" for name in names), encoding="utf-8", errors="backslashreplace")


def is_remembered(cfg: TrainConfig) -> bool:
    try:
        return any(record_of(cfg, contents).is_file() for contents in (True, False))
    except (OSError, RuntimeError):
        return False


def record_of(cfg: TrainConfig, contents: bool) -> Path:
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = given if given.is_absolute() else Path.home() / ".local" / "state"
    return state / "assay" / "trusted" / digest(cfg, contents)


def digest(cfg: TrainConfig, contents: bool) -> str:
    """Of all settings that reach code, arguments included, and of the paths, or `contents`, of the files they name."""
    files = {
        name: [str(file := code_file(name)), content_hash(file) if contents else "any"] for name in code_names(cfg)
    }
    text = json.dumps([code_settings(cfg), files], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def code_settings(cfg: TrainConfig) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "task": cfg.task.model_dump(mode="json", exclude_none=True),
        "env": cfg.env.model_dump(mode="json", include={"name", "path", "args"}, exclude_none=True),
        "reward": cfg.reward.function,
        "algo": cfg.algo.code(),
        "sft": cfg.sft.model_dump(mode="json", include={"args"}, exclude_none=True),
    }
    if ":" in cfg.engine.name:  # else it is left out, as in the records of versions without engines by path
        chosen["engine"] = cfg.engine.name
    if cfg.model.trust_remote_code:
        chosen["model"] = cfg.model.model_dump(mode="json")
    return chosen


def code_names(cfg: TrainConfig) -> Iterator[str]:
    """Every text in those settings that has the form of a path to an object: file.py:name or package.module:name."""
    model = code_settings(cfg) | {"model": None}
    return (text for text in texts(model) if ":" in text.strip(":") and not names_data_set(text))


def names_data_set(text: str) -> bool:
    """Whether this is one of reasoning-gym's data sets, and not a path that only begins like one."""
    return text.startswith(REASONING_GYM) and text.removeprefix(REASONING_GYM).isidentifier()


def texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from texts(value)


def describe(path: str) -> str:
    file = code_file(path)
    return f"{path} ({file})" if file is not None else path


def code_file(path: str) -> Path | None:
    """The file that importing this object would run; found without importing anything."""
    place = path.rpartition(":")[0]
    if place.endswith(".py"):
        try:
            return Path(place).expanduser().resolve()
        except (OSError, ValueError, RuntimeError):  # no path at all: a null byte, a loop of links
            return None
    search: Any = None
    origin = None
    for name in accumulate(place.split("."), "{}.{}".format):
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
