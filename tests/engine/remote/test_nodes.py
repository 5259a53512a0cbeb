"""Servers on engine nodes, as the trainer sees them: waiting for nodes, commands, restarts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from assay.config import ServerConfig, VLLMConfig
from assay.engine.remote.nodes import (
    ENGINE_NODES,
    EngineNodes,
    NodeServer,
    nodes_folder,
    read_object,
    restart_file,
    state_file,
    with_engine_nodes,
    write_object,
)
from assay.types import UserError


def announce(folder: Path, node: int, nodes: int = 2) -> None:
    value = {"node": node, "nodes": nodes, "host": f"n{node}", "ports": [1000 + node, 2000 + node]}
    write_object(folder / f"node-{node}.json", {**value, "logs": [f"/logs/{node}-{index}" for index in range(2)]})


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENGINE_NODES, raising=False)
    assert nodes_folder() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENGINE_NODES, "runs/slurm/a-1-servers")
    assert nodes_folder() == tmp_path / "runs/slurm/a-1-servers"


def test_weights_go_through_the_folder_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENGINE_NODES, raising=False)
    assert with_engine_nodes(ServerConfig()) == ServerConfig()
    monkeypatch.setenv(ENGINE_NODES, str(tmp_path))
    placed = with_engine_nodes(VLLMConfig())
    assert (placed.transport, placed.folder) == ("folder", str(tmp_path / "weights"))
    assert with_engine_nodes(ServerConfig(folder="/scratch")).folder == "/scratch"
    running = ServerConfig(urls=["http://n1:8000"])
    assert with_engine_nodes(running) == running


def test_all_nodes_are_waited_for(tmp_path: Path) -> None:
    nodes = EngineNodes(tmp_path)
    with pytest.raises(UserError, match=r"0 engine nodes ready .* raise server\.start_timeout_s"):
        nodes.wait(0.0, "server")
    announce(tmp_path, 1)
    with pytest.raises(UserError, match="1 engine node ready"):
        nodes.wait(0.0, "server")
    announce(tmp_path, 0)
    servers = nodes.wait(0.0, "server")
    assert [server.url for server in servers] == [
        f"http://{place}" for place in ("n0:1000", "n0:2000", "n1:1001", "n1:2001")
    ]
    assert [(server.node, server.index) for server in servers] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_commands_are_written_for_each_node_with_changes_of_the_environment(tmp_path: Path) -> None:
    for node in range(2):
        announce(tmp_path, node)
    nodes = EngineNodes(tmp_path)
    servers = nodes.wait(0.0, "server")
    environments = [{**os.environ, "KEY": f"key {index}"} for index in range(4)]
    nodes.start(servers, [["serve", str(index)] for index in range(4)], environments)
    file = tmp_path / "servers.json"
    assert file.stat().st_mode & 0o777 == 0o600
    specs: dict[str, Any] = json.loads(file.read_text())
    assert specs["1"] == [{"command": ["serve", str(k)], "environment": {"KEY": f"key {k}"}} for k in (2, 3)]


def test_a_server_that_hangs_is_restarted_on_request(tmp_path: Path) -> None:
    server = NodeServer(tmp_path, 0, 1, "n0", 1000, tmp_path / "log")
    state, request = state_file(tmp_path, 0, 1), restart_file(tmp_path, 0, 1)
    assert server.ended is None and read_object(state) == {}

    write_object(state, {"starts": 1, "ended": "killed by SIGKILL"})
    server.restart()  # its node starts it again
    assert server.ended == "killed by SIGKILL" and not request.exists()

    write_object(state, {"starts": 2, "ended": ""})
    server.restart()  # its node has started it again
    assert server.ended is None and not request.exists()

    server.restart()  # it runs since it was last started, and does not answer
    assert request.exists()
    request.unlink()
    write_object(state, {"starts": 3, "ended": ""})
    server.restart()
    assert request.exists()
