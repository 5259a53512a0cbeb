"""The connection to Ray: a Ray of this run alone, or a running cluster that it joins.

Also programs on the nodes, each in an actor: they end with it, and it ends with the process that made it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.config import CLUSTER_MEMBER
from assay.system.program import SupervisedProgram, free_port, last_error, write_object
from assay.system.spawn import handlers_restored
from assay.types import UserError, describe_error, missing_extra, plural

NAMESPACE = "assay"
LOOPBACK = "127.0.0.1"
# When an actor ends, Ray would kill its child processes: those that end what servers, judges and tools have started.
KEEP_SUPERVISORS = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
CONNECT_S = 10.0  # time limit of a connection to the head
LOGS = "see gcs_server.err and raylet.err in /tmp/ray/session_latest/logs"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ray_package(setting: str = "cluster.kind") -> ModuleType:
    """The package, without reports of its use to its makers. A call before or after a connection is an error: Ray would
    connect by itself, to any cluster that it finds.

    `setting`: that needs it, for messages.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
    except ImportError:
        raise missing_extra(f"{setting} = 'ray'", "ray") from None
    return ray


def membership() -> dict[str, Any] | None:
    """What a process of a run must know of its cluster; None outside of a cluster."""
    text = os.environ.get(CLUSTER_MEMBER)
    return json.loads(text) if text else None


def connect(address: str, say: Callable[[str], None] | None = None) -> str:
    """Connect this process, unless it is connected; the address of the cluster.

    `address`: of a running cluster, or "auto" for the one that RAY_ADDRESS names or that runs on this machine; empty
    for a new Ray on this machine, which ends with this process. `say` gets what joining a cluster exposes.
    """
    if not address and "ray" not in sys.modules:  # Ray reads these when it is imported
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = ray_package()
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    check_reachable(address)
    given: dict[str, Any] = {"address": address or "local"}
    local = not address or address.startswith(LOOPBACK)
    if not address:
        given["include_dashboard"] = False
    if node := (membership() or {}).get("node") or (LOOPBACK if local else ""):
        given["_node_ip_address"] = node
    if local:  # Ray would replace the address by another one of this machine, and listen on all
        ray._private.services.resolve_ip_for_localhost = lambda host: host
    try:
        with handlers_restored(SIGNALS):  # Ray replaces them
            ray.init(**given, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        where = f"cluster.address = '{address}'" if address else "a Ray on this machine"
        remedy = "start a cluster with `ray start --head`, or leave cluster.address empty" if address else LOGS
        raise UserError(f"cannot connect to {where} ({describe_error(error)[:300]}): {remedy}") from error
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # deaths are reported by those who watch
    found = ray.get_runtime_context().gcs_address
    if say is not None and (address or not found.startswith(LOOPBACK)):
        say(exposure(found))
    return found


def check_reachable(address: str) -> None:
    """Raise a `UserError` at once if nothing answers there: Ray tries for minutes."""
    if "://" in address:
        raise UserError(f"cluster.address = '{address}': give host:port of the cluster's head, without a scheme")
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({describe_error(error)}): start one with `ray start --head`, or "
            "correct cluster.address (or RAY_ADDRESS)"
        ) from error


def exposure(address: str) -> str:
    """What a run opens to others when it joins a cluster that was started by somebody else."""
    return (
        f"joining the Ray cluster at {address}: whoever can submit jobs there can run programs as you on its machines, "
        "read the prompts, answers and weights of this run, and stop it"
    )


def nodes() -> list[dict[str, Any]]:
    """The nodes that are alive."""
    return [node for node in ray_package().nodes() if node["Alive"]]


def describe_resources(resources: Mapping[str, float]) -> str:
    """E.g. "8 CPUs and 1 GPU"."""
    shown = [plural(int(resources.get(kind, 0)), kind) for kind in ("CPU", "GPU")]
    return " and ".join(shown)


MAX_OUTPUT = 1 << 20  # bytes of a log that are sent at once


class HostedProgram:
    """The class of the actors. Its methods are called from other processes."""

    def __init__(self, name: str) -> None:
        self.log = logs_folder() / f"assay-{name}.log"
        self.program: SupervisedProgram | None = None

    def place(self, ports: int = 1) -> dict[str, Any]:
        """Where the actor is: address and name of its node, free ports there, and its GPUs."""
        ray = ray_package()
        address = ray.util.get_node_ip_address()
        return {
            "node": address,
            "node_id": ray.get_runtime_context().get_node_id(),
            "host": socket.gethostname(),
            "ports": [free_port(address) for _ in range(ports)],
            "devices": ",".join(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", []))),
            "log": str(self.log),
        }

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        block_sigterm: bool = False,
        key: str = "",
        key_file: str = "",
    ) -> str:
        """Start the program with more variables than this process has.

        `key`: name of the variable with the API key of a server, which is made here, so that it is in no argument, and
        returned. `key_file`: a file that gets it, for servers that read no variable.
        """
        secret = secrets.token_urlsafe(16) if key else ""
        if key_file:
            Path(key_file).parent.mkdir(parents=True, exist_ok=True)
            write_object(Path(key_file), {"api-key": secret})
        self.log.write_bytes(b"")
        variables = {**os.environ, **environment, **({key: secret} if key else {})}
        self.program = SupervisedProgram(command, self.log, variables, block_sigterm)
        return secret

    def enter(self, folder: str) -> str:
        """Use a working directory. Returns the name of the node if it has no such directory."""
        try:
            os.chdir(folder)
        except OSError:
            return socket.gethostname()
        return ""

    def write(self, folder: str, files: Mapping[str, Any]) -> None:
        """Write files, unless the folder exists: then this node is the one that sent them, or shares its folders.

        `files`: bytes, or references to them in the object store.
        """
        target = Path(folder)
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        for name, content in files.items():
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else ray_package().get(content))
        try:
            partial.rename(target)
        except OSError:  # another actor of this node was faster
            self.remove(str(partial))

    def remove(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def ended(self) -> str | None:
        return self.program.ended if self.program is not None else None

    def state(self, offset: int = 0) -> tuple[str | None, bytes]:
        """How the program has ended, and what it has written after this number of bytes."""
        ended = self.ended()
        with self.log.open("rb") as file:
            file.seek(offset)
            return ended, file.read(MAX_OUTPUT)

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def tail(self) -> str:
        return last_error(self.log)

    def signal(self, number: int) -> None:
        if self.program is not None and self.program.ended is None:
            with suppress(ProcessLookupError):
                os.kill(self.program.pid, number)


def hosted_program(name: str, **options: Any) -> Any:
    """A new actor. `options`: of Ray."""
    return ray_package().remote(HostedProgram).options(runtime_env=KEEP_SUPERVISORS, **options).remote(name)


def logs_folder() -> Path:
    """The folder of Ray's logs on this node, which its dashboard and `ray logs` show."""
    with suppress(Exception):
        from ray._private import worker

        node: Any = worker._global_node
        return Path(node.get_logs_dir_path())
    return Path(tempfile.gettempdir())
