"""Programs on the nodes of a cluster, each in an actor: they end with it, and it ends with the process that made it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from assay.engine.remote.launch import write_object
from assay.integrations.ray.cluster import KEEP_SUPERVISORS, ray_package
from assay.system.program import SupervisedProgram, free_port, last_error

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
