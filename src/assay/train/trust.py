"""Code that a run directory names is imported only with the user's consent.

The config.toml of a run can name Python code (tasks, environments, rewards, losses, engines) and programs (servers of
an engine), and a run directory may come from anyone. Consent is stored in the user's state directory, never in the run
directory: one file for each combination of the settings that reach code, the paths of the files that they name, and the
content of these files. Runs that the user started are stored by settings and paths alone, so that users can edit their
own files.
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
from assay.tasks.datasets import PREFIX as REASONING_GYM
from assay.types import UserError

SERVER_SECTIONS = {"assay": "server", "vllm": "vllm", "sglang": "sglang"}  # of engines that are programs or servers
Ask = Callable[[str], bool]  # asks the user a yes-or-no question

_unconfirmed: list[RunCode] = []  # runs whose code may not be imported yet


class RunCode:
    """The code that the settings of one run directory name."""

    def __init__(self, cfg: TrainConfig, folder: Path, typed: Iterable[str], ask: Ask | None, allow: str) -> None:
        self.folder = folder
        self._cfg, self._ask, self._allow = cfg, ask, allow
        named = {importing.normalized(text) for text in code_names(cfg)}
        self._named = named - {importing.normalized(text) for text in typed}

    def check(self, path: str) -> None:
        """Raise unless the user consents to the import of this object."""
        if importing.normalized(path) in self._named:
            self._confirm(f"imports Python code, {describe(path)}")

    def check_remote_code(self) -> None:
        if self._cfg.model.trust_remote_code:
            self._confirm("runs Python code that comes with its model (model.trust_remote_code)")
        if uses_servers(self._cfg):
            self._confirm("starts programs, or sends its weights to servers, that its settings name")

    def _confirm(self, what: str) -> None:
        if self._ask is None or not self._ask(f"{self.folder} {what}. Trust it?"):
            raise UserError(f"{self.folder} {what}: read it, and allow it with {self._allow} if you trust it")
        remember_trust(self._cfg)
        remove_guard(self.folder)


def guard_run(
    cfg: TrainConfig,
    folder: Path,
    *,
    typed: Iterable[str] = (),
    trust: bool = False,
    ask: Ask | None = None,
    allow: str = "--trust",
) -> RunCode | None:
    """From now on, ask before importing code that the settings of this run name. None: the user has consented already.

    `typed`: settings of the current command, which imply consent. `allow`: the option that the error message suggests.
    """
    remove_guard(folder)
    if trust:
        remember_trust(cfg)
    if trust or is_trusted(cfg):
        return None
    run = RunCode(cfg, folder, typed, ask, allow)
    _unconfirmed.append(run)
    importing.guard = check_import
    return run


def remove_guard(folder: Path) -> None:
    _unconfirmed[:] = [run for run in _unconfirmed if run.folder != folder]


def check_import(path: str) -> None:
    for run in list(_unconfirmed):
        run.check(path)


def remember_trust(cfg: TrainConfig, started: bool = False) -> None:
    """Store that the user trusts a run with these settings, or has `started` it."""
    names = list(code_names(cfg))
    if not names and not cfg.model.trust_remote_code and not uses_servers(cfg):
        return
    with suppress(OSError, RuntimeError):  # without a home directory, the user is asked again
        file = trust_file(cfg, contents=not started)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text("".join(f"{describe(name)}\n" for name in names), encoding="utf-8", errors="backslashreplace")


def is_trusted(cfg: TrainConfig) -> bool:
    try:
        return any(trust_file(cfg, contents).is_file() for contents in (True, False))
    except (OSError, RuntimeError):
        return False


def trust_file(cfg: TrainConfig, contents: bool) -> Path:
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = given if given.is_absolute() else Path.home() / ".local" / "state"
    return state / "assay" / "trusted" / digest(cfg, contents)


def digest(cfg: TrainConfig, contents: bool) -> str:
    """A hash of all settings that reach code, and of the paths, or `contents`, of the files that they name."""
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
    if cfg.reward.functions:  # else left out, as in the records of versions with one function
        chosen["rewards"] = cfg.reward.functions
    if ":" in cfg.engine.name:  # else it is left out, as in the records of versions without engines by path
        chosen["engine"] = cfg.engine.name
    if uses_servers(cfg):
        chosen["servers"] = getattr(cfg, SERVER_SECTIONS[cfg.engine.name]).model_dump(mode="json")
    if cfg.model.trust_remote_code:
        chosen["model"] = cfg.model.model_dump(mode="json")
    return chosen


def uses_servers(cfg: TrainConfig) -> bool:
    """Whether the run starts programs that its settings name, or sends its weights to servers."""
    return cfg.engine.name in SERVER_SECTIONS


def code_names(cfg: TrainConfig) -> Iterator[str]:
    """Every string in these settings that has the form of a path to an object: file.py:name or package.module:name."""
    chosen = code_settings(cfg) | {"model": None, "servers": None}
    return (text for text in strings(chosen) if ":" in text.strip(":") and not is_data_set(text))


def is_data_set(text: str) -> bool:
    """Whether this names a data set of reasoning-gym, and is not a path that only begins like one."""
    return text.startswith(REASONING_GYM) and text.removeprefix(REASONING_GYM).isidentifier()


def strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from strings(value)


def describe(path: str) -> str:
    file = code_file(path)
    return f"{path} ({file})" if file is not None else path


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
