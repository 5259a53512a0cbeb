"""Functions for worker pools, in a module that workers import quickly."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from assay.system.sandbox import time_limit_paused


def work(command: str, argument: Any = None) -> Any:
    if command == "sleep":
        time.sleep(argument)
    if command == "exit":
        os._exit(argument)
    if command == "raise":
        raise KeyError(argument)
    if command == "pause":
        with time_limit_paused():
            time.sleep(argument)
    return {"set": {1}}.get(command, command)


class FailsToLoad:
    def prepare(self) -> None:
        raise ImportError("no such library")

    def __call__(self) -> None: ...


def imports(folder: str, name: str) -> str:
    sys.path.append(folder)
    return str(__import__(name).__name__)
