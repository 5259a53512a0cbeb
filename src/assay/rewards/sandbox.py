"""How far judging processes are confined, and what they find in their environment.

strict  judges of this package and the Python tool: no network, no new processes, no changes to files, and reads only of
        what imports need
basic   users' own code: a process namespace, few environment variables, resource limits; files and network as usual
off     on request: the whole environment, and no limits but time and memory

At every level a worker and everything it started is killed together.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from assay.rewards.function import FunctionJudge
from assay.types import UserError

Level = Literal["strict", "basic", "off"]
Sandbox = Literal["auto", "strict", "off"]  # what users may choose

_PYTHON = (
    "PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX "
    "PYTHONWARNINGS PYTHONFAULTHANDLER PYTHONMALLOC PYTHONUNBUFFERED PYTHONNOUSERSITE PYTHONUSERBASE"
)
_ALWAYS = f"PATH LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX {_PYTHON}".split()
_USER = "HOME USER LOGNAME SHELL XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE SSL_CERT_FILE SSL_CERT_DIR"
_FOR_USERS = f"CUDA_VISIBLE_DEVICES CUDA_HOME {_USER}".split()
_PATTERN = re.compile(r"LC_[A-Z]+|[A-Z]+_NUM_THREADS")


def level_for(judge: Any, sandbox: Sandbox) -> Level:
    if sandbox != "auto":
        return sandbox
    return "basic" if is_user_code(judge) else "strict"


def is_user_code(judge: Any) -> bool:
    """Whether judging runs code that is not part of this package."""
    inner = getattr(judge, "judge", None)
    if inner is not None and not isinstance(judge, FunctionJudge):
        return _is_foreign(judge) or is_user_code(inner)
    return isinstance(judge, FunctionJudge) or _is_foreign(judge)


def _is_foreign(judge: Any) -> bool:
    module = judge.__module__ if hasattr(judge, "__qualname__") else type(judge).__module__
    return module.partition(".")[0] != "assay"


def environment(level: Level, pass_env: Sequence[str] = ()) -> dict[str, str]:
    """The environment variables of a worker: no tokens or keys but those the user names."""
    missing = [name for name in pass_env if name not in os.environ]
    if missing:
        raise UserError(f"reward.pass_env names {missing[0]}, which is not set: set it, or leave it out")
    if level == "off":
        return {"OMP_NUM_THREADS": "1", **os.environ}
    names = {*_ALWAYS, *pass_env, *(_FOR_USERS if level == "basic" else ())}
    passed = {name: value for name, value in os.environ.items() if name in names or _PATTERN.fullmatch(name)}
    # With a fixed hash seed, sets of texts have the same order in every process.
    return {"OMP_NUM_THREADS": "1", "HOME": "/", "PYTHONHASHSEED": "0", **passed}


def with_hint(detail: str, level: Level, passed: Mapping[str, str]) -> str:
    """A failure that comes from confinement says which setting allows what was tried."""
    if level == "off":
        return detail
    for name in re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\b[A-Z]{5,}\b", detail):
        if name in os.environ and name not in passed:
            return f'{detail} (judging processes do not see {name}: set reward.pass_env = ["{name}"])'
    if level == "strict" and re.search(
        r"PermissionError|Errno 1[,\]]|Errno 13\b|Permission denied|not permitted", detail
    ):
        return f"{detail} (the sandbox allows no network, files or new processes: see reward.sandbox)"
    return detail


class _Findings:
    """What this system refuses, as workers report it; said once per process."""

    def __init__(self) -> None:
        self.no_namespaces: str | None = None
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def missing(self, level: Level, names: Iterable[str]) -> None:
        names = list(names)
        if not names:
            return
        text = f"judging processes ({level} sandbox) run without {', and without '.join(names)}"
        with self._lock:
            if text in self._told:
                return
            self._told.add(text)
        warnings.warn(f"{text}: this system does not offer it (docs/tasks.md, 'Isolation')", stacklevel=2)


FINDINGS = _Findings()
