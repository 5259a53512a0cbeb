"""Servers on an engine node of a Slurm job, which only generates. `assay.engine.remote.nodes` describes the files.

The node starts the servers that the trainer asks for, starts them again when they end, and stops them when its input
ends. SIGTERM has no effect on the servers: Slurm sends it to all processes of a job that has to stop, and the trainer
needs the servers until it has saved.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.engine.remote.nodes import nodes_folder, read_object, restart_file, state_file, write_object
from assay.process.program import SupervisedProgram

POLL_S = 0.5
PORTS = range(12000, 20000)  # below those of rendezvous, and below the ephemeral ports of the system
MAX_FAILURES = 10  # in a row, after which a server is not started again
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0  # before a failed server is started again: doubled with each failure in a row
LONG_S = 600.0  # a server that ran this long has not failed in a row


class NodeProgram:
    """A server of this node, which is started again when it ends."""

    def __init__(self, node: int, index: int, spec: Mapping[str, Any], devices: str, log: Path, folder: Path) -> None:
        """`spec`: command and environment. `devices`: CUDA_VISIBLE_DEVICES, if the node has GPUs."""
        self.name, self.log, self.command = f"server {index}", log, spec["command"]
        self.environment = {**os.environ, **spec["environment"]}
        if devices:
            self.environment["CUDA_VISIBLE_DEVICES"] = devices
        self.state, self.request = state_file(folder, node, index), restart_file(folder, node, index)
        self.starts = self.failures = 0
        self.start_at = 0.0  # time of the next start
        self.program: SupervisedProgram | None = None
        self._start()

    def _start(self) -> None:
        self.program = SupervisedProgram(self.command, self.log, self.environment, block_sigterm=True)
        self.starts += 1
        self.started_at = time.monotonic()
        write_object(self.state, {"starts": self.starts, "ended": ""})
        say(f"{self.name}: started, process {self.program.pid}; its output is in {self.log}")

    def check(self) -> None:
        """Notice that the server has ended, and start it again after a pause."""
        if self.request.exists():
            self.request.unlink()
            if self.program is not None:
                say(f"{self.name}: does not answer to the trainer, and is killed")
                self.program.kill()
        if self.program is not None and (ended := self.program.ended):
            self._end(self.program, ended)
        if self.program is None and self.failures < MAX_FAILURES and time.monotonic() >= self.start_at:
            self._start()

    def _end(self, program: SupervisedProgram, ended: str) -> None:
        program.close()
        self.program = None
        self.failures = 1 if time.monotonic() - self.started_at > LONG_S else self.failures + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (self.failures - 1), MAX_PAUSE_S)
        self.start_at = time.monotonic() + pause_s
        write_object(self.state, {"starts": self.starts, "ended": ended})
        what = f"is started again in {pause_s:g} s"
        if self.failures == MAX_FAILURES:
            what = f"has failed {MAX_FAILURES} times in a row, and is not started again"
        say(f"{self.name}: ended ({ended}): {program.tail()}; it {what}")

    def close(self) -> None:
        if self.program is not None:
            self.program.close()


class EngineNode:
    def __init__(self, folder: Path, node: int, hosts: Sequence[str], servers: int, gpus: int, logs: str) -> None:
        """`hosts`: of all engine nodes. `servers`, `gpus`: of this node. `logs`: how names of log files begin."""
        self.folder, self.node, self.hosts = folder, node, hosts
        self.devices = device_shares(gpus, servers)
        self.logs = [Path(f"{logs}-engine{node}-server{index}.log").absolute() for index in range(servers)]
        self.ports = free_ports(servers)
        self.programs: list[NodeProgram] = []

    def announce(self) -> None:
        logs = [str(log) for log in self.logs]
        place = {"node": self.node, "nodes": len(self.hosts), "host": self.hosts[self.node], "ports": self.ports}
        write_object(self.folder / f"node-{self.node}.json", {**place, "logs": logs})
        say(f"engine node {self.node} of {len(self.hosts)}: waiting for the trainer; ports {self.ports}")

    def check(self) -> None:
        if not self.programs:
            specs = read_object(self.folder / "servers.json").get(str(self.node), [])
            places = zip(specs, self.devices, self.logs, strict=bool(specs))
            self.programs = [NodeProgram(self.node, k, *place, self.folder) for k, place in enumerate(places)]
        for program in self.programs:
            program.check()

    def run(self) -> None:
        """Serve until the input ends."""
        self.announce()
        try:
            while not input_ended(POLL_S):
                self.check()
        finally:
            for program in self.programs:
                program.close()
        say("the servers have ended")


def device_shares(gpus: int, servers: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each server: equal shares of the GPUs of this node; empty without GPUs."""
    if not gpus:
        return [""] * servers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = visible if visible[0] else [str(index) for index in range(gpus)]
    share = max(1, len(visible) // servers)
    return [",".join(visible[index * share : (index + 1) * share]) for index in range(servers)]


def free_ports(count: int) -> list[int]:
    """Ports that no program uses now. They start at a random one: another job may be starting on this node."""
    ports: list[int] = []
    first = random.randrange(len(PORTS))
    for port in (*PORTS[first:], *PORTS[:first]):
        if len(ports) == count:
            return ports
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            ports.append(port)
    raise RuntimeError(f"no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")


def input_ended(timeout_s: float) -> bool:
    """Wait, at most until our input ends."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


def say(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", flush=True)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--logs", required=True)
    parser.add_argument("hosts", nargs="+", help="of all engine nodes")
    args = parser.parse_args(words)
    folder = nodes_folder()
    assert folder is not None, "the environment names no folder"
    node = int(os.environ["SLURM_NODEID"])
    EngineNode(folder, node, args.hosts, args.servers, args.gpus, args.logs).run()


if __name__ == "__main__":
    main(sys.argv[1:])
