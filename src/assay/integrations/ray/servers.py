"""Engine servers as programs in actors, for the main rank of a run on a cluster (see `assay.engine.remote.launch`).

Only the engine decides when a server is started again: Ray is then asked for a new actor, which may be on another node.
The number of servers follows `cluster.engines` in the run's config.toml, at each update of the weights. API keys are
made on the nodes, so that they are in no arguments of actors.

Weights that do not go through GPU memory or a shared folder are written on this node; the object store of Ray copies
the files to the other nodes.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.engine.remote.launch import MAX_RESTARTS, LaunchedServers
from assay.engine.remote.server_side import KEY
from assay.engine.remote.transport import FolderTransport
from assay.integrations.ray.cluster import connect, hosted_program, membership, ray_package
from assay.types import UserError, describe_error, plural

ANSWER_S = 3.0  # time limit of an actor's answer to a question
POLL_S = 0.1
RETRY_S = 5.0  # between two requests for an actor that Ray could not create
LOST = "its node or its process was lost"
Command = Callable[[int, int], list[str]]  # of index and port


class RayServer:
    """A server on the cluster, from the request for an actor to its end."""

    def __init__(self, servers: RayServers, index: int, starts: int = 1) -> None:
        self.servers, self.index, self.starts = servers, index, starts
        self.url = self.key = self.node = ""
        self.log = Path()
        self.actor, self.asked = servers.new_actor(index), time.monotonic()
        self.placed = self.actor.place.remote()
        self.started: Any = None

    def advance(self) -> bool:
        """Start the program as soon as Ray has created the actor. Returns whether it is started."""
        ray = self.servers.ray
        if self.started is None:
            if not ray.wait([self.placed], timeout=0)[0]:
                return False
            place = ray.get(self.placed)
            self.node, self.log, port = place["node"], Path(place["log"]), place["ports"][0]
            for folder, files in self.servers.files.items():
                self.actor.write.remote(folder, files)
            launched = self.servers.launched
            launched.host = self.node
            command, environment = self.servers.command(self.index, port), dict(launched._environment(self.index))
            changes = {name: value for name, value in environment.items() if os.environ.get(name) != value}
            changes.pop(KEY, None)
            changes["CUDA_VISIBLE_DEVICES"] = self.servers.devices(self.index) or place["devices"]
            self.started = self.actor.start.remote(command, changes, True, KEY, str(launched.key_file or ""))
            self.url = f"http://{place['node']}:{port}"
        if not self.key and ray.wait([self.started], timeout=0)[0]:
            self.key = ray.get(self.started)
        return bool(self.key)

    @property
    def ended(self) -> str | None:
        try:
            return self.servers.ray.get(self.actor.ended.remote(), timeout=ANSWER_S)
        except self.servers.ray.exceptions.GetTimeoutError:
            return None
        except Exception:  # not only RayActorError: an actor may be unknown by now
            return LOST

    def tail(self) -> str:
        try:
            return self.servers.ray.get(self.actor.tail.remote(), timeout=ANSWER_S)
        except Exception:
            return "its log cannot be read"

    def restart(self) -> None:
        """Ask for another actor in its place, which gets another URL."""
        self.servers.replace(self)

    def close(self) -> None:
        with suppress(Exception):  # of a cluster that has gone
            self.servers.ray.kill(self.actor)


class RayServers:
    def __init__(self, launched: LaunchedServers, command: Command) -> None:
        self.ray, self.launched, self.command = ray_package(), launched, command
        self.member = membership() or {}
        self.node: str = self.member["node"]
        connect(self.member["address"])
        self.settings: dict[str, Any] = self.member["cluster"]
        self.files = {str(folder): read_files(folder) for folder in launched.folder.iterdir() if folder.is_dir()}
        self.slots: dict[int, RayServer] = {}
        self.leaving: list[RayServer] = []  # closed when the engine does not use them any more
        self.refused = 0  # number of servers that was refused
        self._group = self.ray.util.get_placement_group(self.member["group"])

    # -- where servers are

    def new_actor(self, index: int) -> Any:
        settings, colocated = self.settings, self.settings["place"] == "colocated"
        options: dict[str, Any] = {"num_cpus": settings["cpus_per_engine"]}
        options["num_gpus"] = 0 if colocated else settings["gpus_per_engine"]
        learners = len(self.member["devices"])
        if colocated or index < settings["engines"]:
            strategies = self.ray.util.scheduling_strategies
            bundle = index % learners if colocated else learners + index
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
        elif settings["spread"]:
            options["scheduling_strategy"] = "SPREAD"
        name = f"{Path(self.member['run']).name}-server-{index}"
        return hosted_program(name, **options)

    def devices(self, index: int) -> str:
        """The GPUs of the learner beside this server."""
        if self.settings["place"] != "colocated":
            return ""
        devices: list[str] = self.member["devices"]
        return devices[index % len(devices)]

    # -- their number

    def wanted(self) -> int:
        """`cluster.engines` as it is in the run's config.toml now."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = (Path(self.member["run"]) / "config.toml").read_text(encoding="utf-8")
            wanted = tomllib.loads(text)["cluster"]["engines"]
            if type(wanted) is int and wanted > 0:
                return wanted
        return max(len(self.slots), 1)

    def start(self, timeout_s: float) -> dict[str, RayServer]:
        """Start all servers, and wait until their programs run."""
        self.slots = {index: RayServer(self, index) for index in range(self.settings["engines"])}
        deadline = time.monotonic() + timeout_s
        while True:
            started = [self.advance(server) for server in list(self.slots.values())]
            if all(started):
                return self.running()
            if time.monotonic() > deadline:
                missing = f"{started.count(False)} of {plural(len(started), 'engine server')}"
                raise UserError(
                    f"{missing} got no place on the cluster within {timeout_s:g} s: see `ray status`, or raise "
                    f"{self.launched.section}.start_timeout_s"
                )
            time.sleep(POLL_S)

    def advance(self, server: RayServer) -> bool:
        """Start a program as soon as its actor exists. An actor that is lost before that is asked for again."""
        try:
            return server.advance()
        except self.ray.exceptions.RayError:  # e.g. Ray has not noticed yet that its node is lost
            if not server.key and time.monotonic() > server.asked + RETRY_S:
                server.close()
                self.slots[server.index] = RayServer(self, server.index, server.starts)
            return bool(server.key)

    def refresh(self) -> dict[str, RayServer]:
        """Start or stop servers, as their number demands. Returns `running`."""
        wanted = self.wanted()
        for server in self.leaving:
            server.close()
        self.leaving = [self.slots.pop(index) for index in list(self.slots) if index >= wanted]
        for index in range(wanted):
            if index not in self.slots:
                self.slots[index] = RayServer(self, index)
        for server in list(self.slots.values()):
            self.advance(server)
        return self.running()

    def running(self) -> dict[str, RayServer]:
        """The servers whose programs run, by URL."""
        return {server.url: server for server in self.slots.values() if server.key}

    def refuse_changes(self, notify: Callable[[str], None]) -> None:
        wanted = self.wanted()
        if wanted not in (len(self.slots), self.refused):
            self.refused = wanted
            notify(
                f"cluster.engines = {wanted} is not applied: with the transport nccl, servers cannot change during a "
                "run; stop and resume it, or use another transport"
            )

    def replace(self, server: RayServer) -> None:
        server.close()
        if server.starts <= MAX_RESTARTS:
            self.slots[server.index] = RayServer(self, server.index, server.starts + 1)

    def keys(self) -> dict[str, str]:
        return {url: server.key for url, server in self.running().items()}

    def close(self) -> None:
        for server in (*self.slots.values(), *self.leaving):
            server.close()

    # -- weights

    def transport(self, dtype: torch.dtype, size: int) -> FolderTransport:
        return CopiedFolder(self, "", dtype, size)


class CopiedFolder(FolderTransport):
    """A folder on this node, whose files are copied to all nodes with servers through the object store."""

    def __init__(self, servers: RayServers, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._servers = servers

    @contextmanager
    def written(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[Path]:
        ray = self._servers.ray
        with super().written(weights, version) as folder:
            servers = [server for server in self._servers.slots.values() if server.key]
            by_node = {server.node: server for server in servers}  # one of each
            others = [server for node, server in by_node.items() if node != self._servers.node]
            files = {file.name: ray.put(file.read_bytes()) for file in sorted(folder.iterdir())} if others else {}
            copies = [server.actor.write.remote(str(folder), files) for server in others]
            try:
                for server, copy in zip(others, copies, strict=True):
                    self._check(server, copy)
                yield folder
            finally:
                for server in others:
                    server.actor.remove.remote(str(folder))

    def _check(self, server: RayServer, copy: Any) -> None:
        errors = self._servers.ray.exceptions
        try:
            self._servers.ray.get(copy)
        except errors.RayTaskError as error:
            raise UserError(
                f"cannot write weights on node {server.node} ({describe_error(error.cause)}): free some space there, "
                f"or set {self._servers.launched.section}.folder to a folder that all nodes share"
            ) from error
        except errors.RayError:
            pass  # the node is lost: its servers fail to load the folder


def read_files(folder: Path) -> Mapping[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
