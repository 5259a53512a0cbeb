"""Servers on engine nodes: hosts that only generate and share a folder with the trainer.

Each engine node runs `assay.cli.slurm.engine_node`. Both sides write JSON files into the folder, which the environment
variable `ENGINE_NODES` names:

- `node-N.json`: written by node N when it is ready: its host, the ports of its servers and their log files.
- `model/`: written by the trainer: the model that is served, without weights.
- `servers.json`: written by the trainer: command and environment of each server, by node.
- `server-N-K.json`: written by node N: how often server K was started, and how it ended.
- `restart-N-K`: written by the trainer: server K of node N does not answer and has to be started again.
- `weights/`: written by the trainer during weight updates.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.config import RemoteEngineConfig
from assay.process.program import last_error
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
    node: int
    index: int  # among the servers of the node
    host: str
    port: int
    log: Path
    known_starts: int = 1

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def state(self) -> dict[str, Any]:
        return read_object(state_file(self.folder, self.node, self.index))

    @property
    def ended(self) -> str | None:
        """How the server ended; None while it is running, and before its node has started it."""
        return self.state.get("ended") or None

    def tail(self) -> str:
        return last_error(self.log)

    def restart(self) -> None:
        """Ask the node to start the server again, unless the node has noticed by itself that the server has ended."""
        state = self.state
        if state.get("ended"):
            return
        starts = state.get("starts", 0)
        if starts <= self.known_starts:
            restart_file(self.folder, self.node, self.index).touch()
            starts = self.known_starts + 1
        self.known_starts = starts

    def close(self) -> None:
        """Nothing: the node stops its servers when the job ends."""


class EngineNodes:
    """The engine nodes of a job, as the trainer sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wait(self, timeout_s: float, section: str) -> list[NodeServer]:
        """All servers, when all nodes are ready. `section`: of the settings, for messages."""
        deadline = time.monotonic() + timeout_s
        while True:
            nodes = [read_object(file) for file in self.folder.glob("node-*.json")]
            nodes = sorted((node for node in nodes if node), key=lambda node: node["node"])
            if nodes and len(nodes) == nodes[0]["nodes"]:
                return [server for node in nodes for server in servers_of(self.folder, node)]
            if time.monotonic() > deadline:
                raise UserError(
                    f"{plural(len(nodes), 'engine node')} ready in {self.folder} after {timeout_s:g} s, and others are "
                    f"missing: see the logs of the engine nodes, or raise {section}.start_timeout_s"
                )
            time.sleep(POLL_S)

    def start(
        self, servers: Sequence[NodeServer], commands: Sequence[list[str]], environments: Sequence[Mapping[str, str]]
    ) -> None:
        """Ask the nodes to start all servers. `environments`: complete; nodes get what differs from that of here."""
        by_node: dict[str, list[dict[str, Any]]] = {}
        for server, command, environment in zip(servers, commands, environments, strict=True):
            changes = {name: value for name, value in environment.items() if os.environ.get(name) != value}
            by_node.setdefault(str(server.node), []).append({"command": command, "environment": changes})
        write_object(self.folder / "servers.json", by_node)


def servers_of(folder: Path, node: Mapping[str, Any]) -> list[NodeServer]:
    """`node`: as it has announced itself."""
    places = enumerate(zip(node["ports"], node["logs"], strict=True))
    return [NodeServer(folder, node["node"], index, node["host"], port, Path(log)) for index, (port, log) in places]


def state_file(folder: Path, node: int, index: int) -> Path:
    return folder / f"server-{node}-{index}.json"


def restart_file(folder: Path, node: int, index: int) -> Path:
    return folder / f"restart-{node}-{index}"


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
