"""Servers on engine nodes: hosts that only generate and share a folder with the trainer.

Each engine node runs `assay.integrations.slurm.engine_node`. The environment variable `ENGINE_NODES` names the folder:

- `server-N-K.json`: written by node N: URL and log file of its server K, which is not started yet.
- `model/`: written by the trainer: the model that is served, without weights.
- `start-N-K.json`: written by the trainer: command and environment of the server, and the number of its starts.
- `state-N-K.json`: written by the node: the last of these starts, and how the server ended.
- `weights/`: written by the trainer during weight updates.

As on its own host, only the trainer decides when a server is started again (see `supervise`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.config import RemoteEngineConfig
from assay.system.program import last_error
from assay.types import UserError, plural

ENGINE_NODES = "ASSAY_ENGINE_NODES"  # environment variable with the folder
POLL_S = 0.5  # between two looks for files of the nodes


def nodes_folder() -> Path | None:
    """The folder that is shared with engine nodes; None if the job has none."""
    name = os.environ.get(ENGINE_NODES)
    return Path(name).absolute() if name else None


def with_engine_nodes(settings: RemoteEngineConfig) -> RemoteEngineConfig:
    """The settings of servers on engine nodes, if the job has some: weights go through a folder that all nodes see."""
    folder = nodes_folder()
    if folder is None or settings.urls:
        return settings
    return settings.model_copy(update={"transport": "folder", "folder": settings.folder or str(folder / "weights")})


@dataclass
class NodeServer:
    """A server on an engine node, as the trainer sees it."""

    folder: Path
    name: str  # "N-K"
    url: str
    log: Path
    starts: int = 0
    request: dict[str, Any] = field(default_factory=dict)

    def start(self, command: list[str], environment: Mapping[str, str]) -> None:
        """`environment`: complete; the node gets what differs from that of this process."""
        changes = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        self.request = {"command": command, "environment": changes}
        self.restart()

    def restart(self) -> None:
        """Ask the node to kill the server, if it is running, and to start it."""
        self.starts += 1
        write_object(self.folder / f"start-{self.name}.json", {**self.request, "starts": self.starts})

    @property
    def ended(self) -> str | None:
        """How the server ended; None while it is running, and before its node has started it."""
        state = read_object(self.folder / f"state-{self.name}.json")
        return state["ended"] or None if state.get("starts") == self.starts else None

    def tail(self) -> str:
        return last_error(self.log)

    def close(self) -> None:
        """Nothing: the node stops its servers when the job ends."""


def registered_servers(folder: Path, timeout_s: float, section: str) -> list[NodeServer]:
    """The servers of all nodes, when all are registered. `section`: of the settings, for messages."""
    deadline = time.monotonic() + timeout_s
    while True:
        entries = [read_object(file) for file in folder.glob("server-*.json")]
        entries = sorted((entry for entry in entries if entry), key=lambda entry: entry["place"])
        if entries and len(entries) == entries[0]["servers"]:
            names = ["-".join(map(str, entry["place"])) for entry in entries]
            pairs = zip(names, entries, strict=True)
            return [NodeServer(folder, name, entry["url"], Path(entry["log"])) for name, entry in pairs]
        if time.monotonic() > deadline:
            raise UserError(
                f"{plural(len(entries), 'server')} of engine nodes registered in {folder} after {timeout_s:g} s, and "
                f"others are missing: see the logs of the engine nodes, or raise {section}.start_timeout_s"
            )
        time.sleep(POLL_S)


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file at once, readable by this user only: environments hold API keys."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
    partial.rename(path)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if it does not exist yet."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}
