"""Processes on the nodes of a Slurm job: servers on engine nodes, and the ranks of a training run.

    python -m assay.integrations.slurm train ...    # torchrun; its exit code tells a requested stop from an error
    python -m assay.integrations.slurm engine ...   # servers

An engine node only generates. `assay.engine.remote.launch` describes the files that it shares with the trainer. The
node registers its servers, starts them when the trainer asks for it, and stops them when its input ends. SIGTERM has no
effect on the servers: Slurm sends it to all processes of a job that has to stop, and the trainer needs the servers
until it has saved.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.engine.remote.launch import nodes_folder, read_object
from assay.system.program import SupervisedProgram, write_object

POLL_S = 0.5  # between two looks for requests of the trainer
PORTS = range(12000, 20000)  # below the ports of rendezvous, and below the ephemeral ports of the system
STOPPED = 143  # exit code of a process that saved and stopped after SIGTERM
FAILED = 200  # above all others: srun returns the highest exit code of all nodes
PAUSE_S = 3.0  # srun kills the other nodes as soon as one ends: time for them to end or to print their errors


class NodeProgram:
    """A server of this node, which the trainer starts. Its registration is written again when its state changes."""

    def __init__(self, folder: Path, name: str, registration: dict[str, Any], devices: str) -> None:
        """`devices`: CUDA_VISIBLE_DEVICES, if the node has GPUs."""
        self.name, self.devices, self.registration = name, devices, {**registration, "starts": 0, "ended": ""}
        self.file, self.request = folder / f"server-{name}.json", folder / f"start-{name}.json"
        self.program: SupervisedProgram | None = None
        write_object(self.file, self.registration)

    def check(self) -> None:
        """Start the server as often as the trainer has asked for, and report its end."""
        request, state = read_object(self.request), self.registration
        if request.get("starts", 0) > state["starts"]:
            if self.program is None:
                environment = {**os.environ, **request["environment"]}
                if self.devices:
                    environment["CUDA_VISIBLE_DEVICES"] = self.devices
                log = Path(state["log"])
                self.program = SupervisedProgram(request["command"], log, environment, block_sigterm=True)
            else:
                if not state["ended"]:
                    say(f"server {self.name}: does not answer to the trainer, and is killed")
                self.program.restart()
            state |= {"starts": request["starts"], "ended": ""}
            say(f"server {self.name}: started, process {self.program.pid}; its output is in {state['log']}")
        elif self.program is not None and not state["ended"] and (ended := self.program.ended):
            say(f"server {self.name}: ended ({ended}): {self.program.tail()}")
            state["ended"] = ended
        else:
            return
        write_object(self.file, state)

    def close(self) -> None:
        if self.program is not None:
            self.program.close()


def register_servers(
    folder: Path, node: int, hosts: Sequence[str], servers: int, gpus: int, logs: str
) -> list[NodeProgram]:
    """`hosts`: of all engine nodes. `servers`, `gpus`: of each node. `logs`: how names of log files begin."""
    programs = []
    for index, (port, devices) in enumerate(zip(free_ports(servers), device_shares(gpus, servers), strict=True)):
        log = str(Path(f"{logs}-engine{node}-server{index}.log").absolute())
        entry = {"servers": servers * len(hosts), "url": f"http://{hosts[node]}:{port}", "log": log}
        programs.append(NodeProgram(folder, f"{node}-{index}", entry, devices))
    return programs


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


def serve(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m assay.integrations.slurm engine")
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--logs", required=True)
    parser.add_argument("hosts", nargs="+", help="of all engine nodes")
    args = parser.parse_args(words)
    folder = nodes_folder()
    assert folder is not None, "the environment names no folder"
    node = int(os.environ["SLURM_NODEID"])
    programs = register_servers(folder, node, args.hosts, args.servers, args.gpus, args.logs)
    say(f"engine node {node} of {len(args.hosts)}: waiting for the trainer")
    try:
        while not input_ended(POLL_S):
            for program in programs:
                program.check()
    finally:
        for program in programs:
            program.close()
    say("the servers have ended")


def train(words: Sequence[str]) -> int:
    """Run torchrun; its exit code tells a requested stop from an error."""
    code = run_torchrun(words)
    if code and os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
        time.sleep(PAUSE_S)
    return code


def run_torchrun(words: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Not SIGTERM: torchrun would stop the processes and allow them only 30 seconds.
    handled = "SIGINT,SIGHUP,SIGQUIT"
    try:
        torchrun(["--node-rank", os.environ["SLURM_NODEID"], "--signals-to-handle", handled, *words])
    except ChildFailedError as error:
        if all(failure.exitcode == STOPPED for failure in error.failures.values()):
            return STOPPED
        print(error, file=sys.stderr, flush=True)
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    raise SystemExit({"train": train, "engine": serve}[kind](arguments))
