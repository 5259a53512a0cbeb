"""Nodes of a Slurm job: servers that the trainer asks for, failures, restarts, and the end; exit codes of torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import until

from assay.config import ServerConfig
from assay.engine.base import EngineOptions
from assay.engine.remote.launch import ENGINE_NODES, LaunchedServers, plain_environment, read_object, write_object
from assay.integrations import slurm
from assay.integrations.slurm import PORTS, EngineNode, device_shares, free_ports
from assay.models import build_preset
from assay.types import UserError

SLEEP = [sys.executable, "-S", "-c", "import time; print('ready', flush=True); time.sleep(600)"]
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@contextmanager
def node_with(folder: Path, *commands: list[str], gpus: int = 0) -> Iterator[EngineNode]:
    node = EngineNode(folder, 0, ["127.0.0.1"], len(commands), gpus, str(folder / "job"))
    for index, command in enumerate(commands):
        ask(folder, index, command, 1)
    try:
        yield node
    finally:
        node.close()


def ask(folder: Path, index: int, command: list[str], starts: int) -> None:
    request = {"command": command, "environment": {"ADDED": "yes"}, "starts": starts}
    write_object(folder / f"start-0-{index}.json", request)


def check_until(node: EngineNode, true: Callable[[], bool]) -> None:
    until(lambda: (node.check(), true())[1])


def state(folder: Path, index: int = 0) -> dict[str, Any]:
    return read_object(folder / f"state-0-{index}.json")


def test_a_server_is_started_as_often_as_the_trainer_asks(tmp_path: Path) -> None:
    with node_with(tmp_path, SLEEP, SLEEP) as node:
        node.check()
        first, second = (program.program for program in node.programs)
        assert first and second and [state(tmp_path, k) for k in range(2)] == [{"starts": 1, "ended": ""}] * 2
        os.kill(first.pid, signal.SIGKILL)
        check_until(node, lambda: state(tmp_path)["ended"] == "killed by SIGKILL")
        node.check()
        assert node.programs[0].program is None
        for index in range(2):  # the second one is killed first
            ask(tmp_path, index, SLEEP, 2)
        check_until(node, lambda: all(state(tmp_path, k) == {"starts": 2, "ended": ""} for k in range(2)))
        assert second.ended and all(program.program is not None for program in node.programs)


def test_servers_get_the_environment_of_the_node_and_equal_shares_of_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert device_shares(4, 2) == ["4,5", "6,7"] and device_shares(0, 2) == ["", ""]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_shares(2, 2) == ["0", "1"]
    show = [
        sys.executable,
        "-S",
        "-c",
        "import os; print(*map(os.environ.get, ('ADDED', 'OWN', 'CUDA_VISIBLE_DEVICES')))",
    ]
    monkeypatch.setenv("OWN", "too")
    with node_with(tmp_path, show, show, gpus=2) as node:
        logs = [program.log for program in node.programs]
        check_until(node, lambda: all(log.exists() and log.read_text().strip() for log in logs))
    assert [log.read_text().split()[:3] for log in logs] == [["yes", "too", "0"], ["yes", "too", "1"]]


def test_ports_in_use_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "PORTS", PORTS[:8])
    with socket.socket() as taken:
        ports = free_ports(3)
        taken.bind(("", ports[0]))
        taken.listen()
        assert ports[0] not in free_ports(5) and len(set(free_ports(5))) == 5
    with pytest.raises(RuntimeError, match="no 9 free ports"):
        free_ports(9)


def test_servers_survive_sigterm_and_end_with_the_input(tmp_path: Path) -> None:
    words = ["--servers", "1", "--gpus", "0", "--logs", str(tmp_path / "job"), "127.0.0.1"]
    program = [sys.executable, "-m", "assay.integrations.slurm", "engine", *words]
    command = ["bash", "-c", 'trap "" TERM; exec "$@"', "node", *program]
    environment = {**os.environ, "SLURM_NODEID": "0", ENGINE_NODES: str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as node:  # type: ignore[call-overload]
        until((tmp_path / "server-0-0.json").exists)
        ask(tmp_path, 0, SLEEP, 1)
        log = Path(read_object(tmp_path / "server-0-0.json")["log"])
        assert log == tmp_path / "job-engine0-server0.log"
        until(lambda: log.exists() and log.read_text() == "ready\n")
        pid = next(int(line.split("process ")[1].split(";")[0]) for line in node.stdout if "process " in line)
        for one in (node.pid, pid):
            os.kill(one, signal.SIGTERM)
        time.sleep(0.5)
        assert node.poll() is None and Path(f"/proc/{pid}/stat").exists() and state(tmp_path)["starts"] == 1
        rest, _ = node.communicate(timeout=30)
    assert node.returncode == 0 and "the servers have ended" in rest and not Path(f"/proc/{pid}").exists()


class EchoServers(LaunchedServers):
    kind, section = "test", "server"
    code = SERVER

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        return [sys.executable, "-S", "-c", self.code, self.host, str(port)]

    def _environment(self, index: int) -> dict[str, str]:
        return plain_environment()


@contextmanager
def trainer_and_nodes(folder: Path, code: str = SERVER) -> Iterator[tuple[EchoServers, list[EngineNode]]]:
    """The trainer's side in this thread, and two nodes with two servers each in another one."""
    nodes = [EngineNode(folder, node, ["127.0.0.1"] * 2, 2, 0, str(folder / "job")) for node in range(2)]
    ended = threading.Event()

    def serve() -> None:
        while not ended.wait(0.05):
            for node in nodes:
                node.check()

    thread = threading.Thread(target=serve)
    thread.start()
    launched = EchoServers(ServerConfig(start_timeout_s=60), EngineOptions(device="cpu", dtype=torch.float32))
    launched.code = code
    try:
        yield launched, nodes
    finally:
        launched.close()
        ended.set()
        thread.join()
        for node in nodes:
            node.close()


def start(launched: EchoServers) -> list[str]:
    policy = build_preset("nano", 32, 64, 0)
    return list(launched.start(policy, lambda folder: (folder / "tokenizer.json").write_text("{}")))


def test_an_engine_starts_its_servers_on_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINE_NODES, str(tmp_path))
    with trainer_and_nodes(tmp_path) as (launched, nodes):
        urls = start(launched)
        assert len(set(urls)) == 4
        assert launched.model_folder == tmp_path / "model" and (launched.model_folder / "config.json").exists()
        program = nodes[1].programs[0].program
        os.kill(program.pid, signal.SIGKILL)
        until(lambda: "killed by SIGKILL" in launched.death(urls[2]))
        launched.restart(urls[2])
        launched._wait(urls[2])
    assert tmp_path.exists() and all(program.program is None for node in nodes for program in node.programs)


def test_a_server_that_does_not_start_on_its_node_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINE_NODES, str(tmp_path))
    code = "raise SystemExit('MemoryError: no memory')"
    with trainer_and_nodes(tmp_path, code) as (launched, _), pytest.raises(UserError) as error:
        start(launched)
    assert "did not start: it ended (exit code 1): MemoryError: no memory (see " in str(error.value)


# The launcher sends SIGTERM to the other rank as soon as one has ended; `assay` ignores it once it is about to exit.
# Ranks stop together, so none of them may still be starting then.
STOP = "signal.signal(signal.SIGTERM, signal.SIG_IGN); meet(); sys.exit(143)"
MEET = """
def meet():
    open(f"{sys.argv[0]}-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"{sys.argv[0]}-{rank}") for rank in (0, 1)):
        time.sleep(0.01)
"""
ENDS = {  # code of ranks 0 and 1, and the resulting exit code
    "stopped": ([STOP, STOP], 143),
    "killed": ([STOP, "meet(); os.kill(os.getpid(), 9)"], 200),
}


def launch(folder: Path, name: str) -> subprocess.Popen[str]:
    script = folder / f"{name}.py"
    script.write_text(f"import os, signal, sys, time\n{MEET}\nexec({ENDS[name][0]}[int(os.environ['RANK'])])\n")
    words = ["--standalone", "--nproc-per-node", "2", str(script)]
    command = [sys.executable, "-m", "assay.integrations.slurm", "train", *words]
    environment = {**os.environ, "SLURM_NODEID": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_exit_code_distinguishes_stopped_from_failed(tmp_path: Path) -> None:
    started = {name: launch(tmp_path, name) for name in ENDS}
    output = {name: process.communicate(timeout=100)[1] for name, process in started.items()}
    assert {name: process.returncode for name, process in started.items()} == {n: code for n, (_, code) in ENDS.items()}
    assert "Signal 9 (SIGKILL)" in output["killed"] and "rank      : 1" in output["killed"]
    assert "Traceback" not in output["killed"]
