"""Ray clusters of several nodes on this machine, with loopback addresses of their own, and runs on them."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from process_tree import table
from small_run import SmallRuns

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # Ray reads these when it is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
MARK = f"ASSAY_TEST_CLUSTERS={secrets.token_hex(8)}"  # in the environment of all processes that these tests start
os.environ |= [MARK.split("=")]
SOURCE = str(Path(__file__).parents[2] / "src")
HALF = ["--cluster.cpus_per_learner", "0.5", "--cluster.cpus_per_engine", "0.5"]


class Nodes:
    """A cluster. Its nodes are numbered from 0, which is the head."""

    def __init__(self, count: int = 3) -> None:
        from ray._private import services
        from ray.cluster_utils import Cluster

        services.resolve_ip_for_localhost = lambda host: host  # or all nodes would have the same address
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
        self.cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **self._node(0)})
        self.nodes = [self.cluster.head_node]
        self.lost: set[int] = set()
        for _ in range(1, count):
            self.add()

    def _node(self, number: int) -> dict[str, Any]:
        return {"num_cpus": 1, "node_ip_address": f"127.0.0.{number + 1}", "object_store_memory": 80 << 20}

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(**self._node(len(self.nodes))))

    def kill(self, number: int) -> None:
        """End the processes of a node, as if its power failed."""
        self.lost.add(number)
        self.cluster.remove_node(self.nodes[number], allow_graceful=False)

    @property
    def address(self) -> str:
        return self.cluster.address

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(Exception):
            self.cluster.shutdown()


class SeparateNodes:
    """A cluster of a head and a node that share no files: memory is mounted over `hidden` folders and /dev/shm.

    `cpus`: of the two. `hidden`: also has the temporary files of both, Ray's too. The head has the address of this
    machine that others reach, and the node a loopback address of its own.
    """

    NODE = "127.0.0.2"

    def __init__(self, cpus: tuple[int, int], hidden: Sequence[Path], output: Path) -> None:
        from ray.cluster_utils import Cluster

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
        head = {"num_cpus": cpus[0], "node_ip_address": outer_address(), "object_store_memory": 80 << 20}
        self.cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
        mounts = " && ".join(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in [*hidden, "/dev/shm"])
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={self.address}"]
        ray += [f"--node-ip-address={self.NODE}", f"--num-cpus={cpus[1]}", f"--object-store-memory={80 << 20}"]
        with output.open("w") as file:
            self.node = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", f"{mounts} && exec {shlex.join(ray)}"],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        return self.cluster.address

    def close(self) -> None:
        self.node.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.node.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.node.pid, signal.SIGKILL)
        with suppress(Exception):
            self.cluster.shutdown()


def outer_address() -> str:
    """The address of this machine for other machines."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return probe.getsockname()[0]


class ClusterRun:
    """`assay train` with cluster.kind = "ray", in a process of its own."""

    def __init__(self, runs: SmallRuns, *words: object, name: str = "small") -> None:
        self.runs, self.name, self.output = runs, name, runs.folder / f"{name}.txt"
        self.process = self.start("train", runs.config, "--name", name, "--cluster.kind", "ray", *HALF, *words)

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "assay", *map(str, words), "--runs_dir", str(self.runs.runs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
        del environment["RAY_USAGE_STATS_ENABLED"]  # which assay sets
        with self.output.open("a") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=self.runs.folder)

    @property
    def path(self) -> Path:
        return self.runs.runs / self.name

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def last(self) -> dict[str, Any]:
        return self.runs.last_metrics(self.name)

    @property
    def steps(self) -> int:
        return int(self.last.get("step", 0))

    def wait_until(self, reached: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, f"the run has ended: {self.said[-4000:]}"
            assert time.monotonic() < deadline, f"not reached after step {self.steps}: {self.said[-4000:]}"
            time.sleep(0.05)

    def reach(self, step: int, serving: int = 0) -> None:
        self.wait_until(lambda: self.steps >= step and self.last.get("servers/serving", 0) >= serving)

    def ended(self, seconds: float = 180.0) -> int:
        return self.process.wait(seconds)

    # -- its processes

    def servers(self, module: str = "assay serve") -> list[int]:
        return self._programs(module)

    def learners(self) -> list[int]:
        return [pid for pid in self._programs("assay train") if actor_of(pid)]

    def judges(self) -> list[int]:
        """Actors, whose title replaces their environment in /proc."""
        actors = {pid: parent for pid, (parent, _, line) in table().items() if line.startswith("ray::NodePool")}
        return [pid for pid, parent in actors.items() if MARK.encode() in environment(parent)]

    def _programs(self, module: str) -> list[int]:
        mine = re.compile(rf"^\S*python\S* -m {re.escape(module)}[ .]")
        return [pid for pid, line in commands().items() if mine.match(line) and MARK.encode() in environment(pid)]

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def actor_of(pid: int) -> int:
    """The actor that hosts a program; 0 if there is none."""
    processes = table()
    while pid and not processes.get(pid, (0, "", ""))[2].startswith("ray::"):
        pid = processes.get(pid, (0, "", ""))[0]
    return pid


def environment(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def commands() -> dict[int, str]:
    """Command lines of all processes that run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found
