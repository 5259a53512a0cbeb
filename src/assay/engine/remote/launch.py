"""Servers that an engine starts, supervises and stops: on this host, or on engine nodes.

Engine nodes are hosts that only generate and share a folder with the trainer. Each of them runs
`assay.integrations.slurm`. The environment variable `ENGINE_NODES` names the folder:

- `server-N-K.json`: written by node N: URL and log file of its server K, the last of its starts, and how it ended.
- `model/`: written by the trainer: the model that is served, without weights.
- `start-N-K.json`: written by the trainer: command and environment of the server, and the number of its starts.
- `weights/`: written by the trainer during weight updates.

As on its own host, only the trainer decides when a server is started again (see `SupervisedServers`).

On a Ray cluster, which the environment variable `CLUSTER_MEMBER` describes, `assay.integrations.ray.servers` starts
them. Their number may change, and a server that is started again has another URL.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch

from assay.config import CLUSTER_MEMBER, RemoteEngineConfig
from assay.engine.base import EngineOptions
from assay.models.base import PolicyModel
from assay.models.export import save_config
from assay.system.openai_client import key_of, new_client, opened
from assay.system.program import SupervisedProgram, free_port, last_error, write_object
from assay.types import UserError, plural

MAX_RESTARTS = 20  # of a server that fails again and again
HEALTH_S = 5.0  # time limit of the answer to this question
POLL_S = 0.1  # between two questions whether a server has started
ENGINE_NODES = "ASSAY_ENGINE_NODES"  # environment variable with the folder
NODES_POLL_S = 0.5  # between two looks for files of the nodes
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SaveTokenizer = Callable[[Path], object]  # writes the tokenizer into a folder


def nodes_folder() -> Path | None:
    """The folder that is shared with engine nodes; None if the job has none."""
    name = os.environ.get(ENGINE_NODES)
    return Path(name).absolute() if name else None


def cluster_engines() -> int:
    """The number of servers that the run starts with on a Ray cluster; 0 outside of one."""
    return json.loads(os.environ[CLUSTER_MEMBER])["cluster"]["engines"] if os.environ.get(CLUSTER_MEMBER) else 0


def with_engine_nodes(settings: RemoteEngineConfig) -> RemoteEngineConfig:
    """The settings of servers on engine nodes, if the job has some: weights go through a folder that all nodes see."""
    folder = nodes_folder()
    if folder is None or settings.urls:
        return settings
    return settings.model_copy(update={"transport": "folder", "folder": settings.folder or str(folder / "weights")})


@dataclass
class NodeServer:
    """A server on an engine node, as the trainer sees it."""

    file: Path
    url: str
    log: Path
    request: dict[str, Any] = field(default_factory=dict)

    def start(self, command: list[str], environment: Mapping[str, str]) -> None:
        """`environment`: complete; the node gets the variables that differ from the environment of this process."""
        changes = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        self.request = {"command": command, "environment": changes, "starts": 0}
        self.restart()

    def restart(self) -> None:
        """Ask the node to kill the server, if it is running, and to start it."""
        self.request["starts"] += 1
        write_object(self.file.with_name(self.file.name.replace("server", "start")), self.request)

    @property
    def ended(self) -> str | None:
        """How the server ended; None while it is running, and before its node has started it."""
        state = read_object(self.file)
        return state["ended"] or None if state.get("starts") == self.request["starts"] else None

    def tail(self) -> str:
        return last_error(self.log)

    def close(self) -> None:
        """Nothing: the node stops its servers when the job ends."""


def registered_servers(folder: Path, timeout_s: float, section: str) -> list[NodeServer]:
    """The servers of all nodes, when all are registered. `section`: of the settings, for messages."""
    deadline = time.monotonic() + timeout_s
    while True:
        # In the order of the nodes, and of the servers on a node.
        files = sorted(folder.glob("server-*.json"), key=lambda file: [int(part) for part in file.stem.split("-")[1:]])
        if files and len(files) == (entries := [read_object(file) for file in files])[0]["servers"]:
            return [NodeServer(f, entry["url"], Path(entry["log"])) for f, entry in zip(files, entries, strict=True)]
        if time.monotonic() > deadline:
            raise UserError(
                f"{plural(len(files), 'server')} of engine nodes registered in {folder} after {timeout_s:g} s, and "
                f"others are missing: see the logs of the engine nodes, or raise {section}.start_timeout_s"
            )
        time.sleep(NODES_POLL_S)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if it does not exist yet."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


class LaunchedServers(ABC):
    """Servers that belong to this process and end with it. A backend implements `_command` and `_environment`."""

    kind: ClassVar[str]  # name of the server in messages
    section: ClassVar[str]  # section of its settings
    key_file: Path | None = None  # of a server that reads its key from a file

    def __init__(self, settings: Any, options: EngineOptions) -> None:
        """`settings`: the section of the backend, a `RemoteEngineConfig`."""
        self.settings, self.options = settings, options
        self.key = key_of(settings.api_key_env, self.section) or secrets.token_urlsafe(16)  # no other is accepted
        self.nodes = nodes_folder()
        self.cluster: Any = None  # the `RayServers` of a run on a cluster
        self.elsewhere = bool(self.nodes or cluster_engines())  # servers may be on other hosts
        self.host = "0.0.0.0" if self.elsewhere else "127.0.0.1"  # address on which servers listen
        self.folder = self.nodes or Path(tempfile.mkdtemp(prefix="assay-servers-"))
        self.model_folder = self.folder / "model"
        self.programs: dict[str, Any] = {}  # by URL: `SupervisedProgram`, `NodeServer` or `RayServer`
        self.restarts: dict[str, int] = {}  # by URL
        remove = (lambda: None,) if self.nodes else (shutil.rmtree, self.folder, True)
        self._remove = weakref.finalize(self, *remove)

    @abstractmethod
    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        """Program and arguments of a server, which serves `model_folder`."""

    @abstractmethod
    def _environment(self, index: int) -> Mapping[str, str]: ...

    def _check(self, model: PolicyModel) -> None:  # noqa: B027
        """Raise a `UserError` if the servers cannot serve this model, or prepare for it."""

    def start(self, model: PolicyModel, save_tokenizer: SaveTokenizer | None) -> dict[str, str]:
        """Start all servers, without the model's weights: the first update sends them. Returns their keys, by URL.

        When it returns, the servers are ready. If one of them does not start, all are stopped.
        """
        assert save_tokenizer is not None, "the engine needs the tokenizer to start servers"
        try:
            self._check(model)
            self.model_folder.mkdir()
            save_config(model, self.model_folder, self.options.dtype)
            save_tokenizer(self.model_folder)
            max_length = min(model.max_length, self.options.max_length or model.max_length)
            if cluster_engines():
                self._start_on_cluster(max_length)
            elif self.nodes is not None:
                self._start_on_nodes(self.nodes, max_length)
            else:
                self._start_here(max_length)
            for url in self.programs:
                self._wait(url)
        except BaseException:
            self.close()
            raise
        return self.keys()

    def keys(self) -> dict[str, str]:
        """The keys of all servers that have been started, by URL."""
        return dict.fromkeys(self.programs, self.key) if self.cluster is None else self.cluster.keys()

    def refresh(self) -> dict[str, str]:
        """On a cluster, start and stop servers as the settings demand now. Returns `keys`."""
        if self.cluster is not None:
            self.programs = self.cluster.refresh()
        return self.keys()

    def refuse_changes(self, notify: Callable[[str], None]) -> None:
        """Say once that the number of servers cannot change, if the settings demand another one now."""
        if self.cluster is not None:
            self.cluster.refuse_changes(notify)

    def _start_here(self, max_length: int) -> None:
        for index in range(self.settings.servers):
            port = self.settings.port + index if self.settings.port else free_port()
            command, log = self._command(index, port, max_length), self.folder / f"server-{index}.log"
            self.programs[f"http://127.0.0.1:{port}"] = SupervisedProgram(command, log, self._environment(index))

    def _start_on_nodes(self, folder: Path, max_length: int) -> None:
        servers = registered_servers(folder, self.settings.start_timeout_s, self.section)
        for index, server in enumerate(servers):
            port = urlsplit(server.url).port or 80
            server.start(self._command(index, port, max_length), self._environment(index))
            self.programs[server.url] = server

    def _start_on_cluster(self, max_length: int) -> None:
        make = importlib.import_module("assay.integrations.ray.servers").RayServers
        self.cluster = make(self, lambda index, port: self._command(index, port, max_length))
        self.programs = self.cluster.start(self.settings.start_timeout_s)

    # -- for backends

    def _interpreter(self) -> str:
        """The interpreter that runs the servers, whose package is named like the section of their settings."""
        if not self.settings.python:
            spec = importlib.util.find_spec(self.section)
            if spec is None or spec.origin is None:  # no origin: a folder of this name that is not a package
                raise UserError(
                    f"{self.kind} is not installed in this environment: set {self.section}.python to the interpreter "
                    f"of an environment that has it, or {self.section}.urls to running servers"
                )
            return sys.executable
        found = shutil.which(os.path.expanduser(self.settings.python))
        if found is None:
            given = f"{self.section}.python = '{self.settings.python}'"
            raise UserError(f"{given} is not a program: give the path of an interpreter")
        return found

    def _visible_devices(self, index: int) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of server `index`, if it differs from the value in this process."""
        devices, device = self.settings.devices, torch.device(self.options.device)
        if devices:
            return {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]}
        if device.type == "cuda" and device.index:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            return {"CUDA_VISIBLE_DEVICES": visible[device.index] if visible[0] else str(device.index)}
        return {}

    # -- while they run

    def _wait(self, url: str) -> None:
        """Wait until a server is ready."""
        limit = self.settings.start_timeout_s
        if not becomes_healthy(url, self.keys()[url], limit, lambda: bool(self.death(url))):
            if death := self.death(url):
                raise UserError(f"the {self.kind} server {url} did not start: {death}")
            raise UserError(
                f"the {self.kind} server {url} was not ready after {limit:g} s (last line of "
                f"{self._kept_log(url)}: {self.programs[url].tail()}): raise {self.section}.start_timeout_s"
            )

    def restart(self, url: str) -> None:
        """Start a failed server again, without waiting until it is ready. After `MAX_RESTARTS` it stays away."""
        if url not in self.programs:  # its successor is being started
            return
        self.restarts[url] = self.restarts.get(url, 0) + 1
        if self.restarts[url] <= MAX_RESTARTS:
            self.programs[url].restart()

    def death(self, url: str) -> str:
        """How a server ended, with the last error in its log; empty while it runs."""
        program = self.programs.get(url)
        if program is None or program.ended is None:
            return ""
        return f"it ended ({program.ended}): {program.tail()} (see {self._kept_log(url)})"

    def hint(self, url: str) -> str:
        """The last error in the log of a server, and where the log is."""
        return f"; {self.programs[url].tail()} (see {self._kept_log(url)})" if url in self.programs else ""

    def _kept_log(self, url: str) -> Path:
        """The log, whose folder is not removed any more."""
        self._remove.detach()
        return self.programs[url].log

    def close(self) -> None:
        for program in self.programs.values():
            program.close()
        if self.cluster is not None:
            self.cluster.close()
        self._remove()


async def is_healthy(url: str, key: str) -> bool:
    import httpx

    try:
        async with (
            asyncio.timeout(HEALTH_S),
            new_client(url, key, proxies=False) as client,
            opened(client, "GET", "/health", None) as response,
        ):
            return response.status_code == 200
    except (TimeoutError, httpx.TransportError):
        return False


def becomes_healthy(url: str, key: str, seconds: float, has_ended: Callable[[], bool]) -> bool:
    """Wait until a server answers. False if it has ended, or does not answer within this time."""
    from assay.engine.client import run_sync

    deadline = time.monotonic() + seconds
    while not has_ended():
        if run_sync(is_healthy(url, key)):
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return False


def plain_environment() -> dict[str, str]:
    """The environment of this process without the variables of torchrun."""
    prefixes = ("TORCHELASTIC_", "GROUP_", "ROLE_")
    return {name: os.environ[name] for name in os.environ if name not in TORCHRUN and not name.startswith(prefixes)}


def module_environment() -> dict[str, str]:
    """`plain_environment`, with which `python -m` finds the same modules as this process."""
    return {**plain_environment(), "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
