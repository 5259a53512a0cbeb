"""Servers on engine nodes, as the trainer sees them: waiting for nodes, starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from assay.config import ServerConfig, VLLMConfig
from assay.engine.remote.launch import (
    ENGINE_NODES,
    NodeServer,
    nodes_folder,
    read_object,
    registered_servers,
    with_engine_nodes,
    write_object,
)
from assay.types import UserError


def register(folder: Path, node: int, index: int) -> None:
    entry = {"place": [node, index], "servers": 2, "url": f"http://n{node}:{1000 + index}", "log": "/logs/0"}
    write_object(folder / f"server-{node}-{index}.json", entry)


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


def test_the_servers_of_all_nodes_are_waited_for(tmp_path: Path) -> None:
    register(tmp_path, 10, 0)
    with pytest.raises(UserError, match=r"^1 server of engine nodes .* raise server\.start_timeout_s"):
        registered_servers(tmp_path, 0.0, "server")
    register(tmp_path, 2, 1)
    servers = registered_servers(tmp_path, 0.0, "server")
    assert [(server.name, server.url) for server in servers] == [("2-1", "http://n2:1001"), ("10-0", "http://n10:1000")]


def test_a_start_has_the_command_and_the_changes_of_the_environment(tmp_path: Path) -> None:
    server = NodeServer(tmp_path, "0-1", "http://n0:1000", tmp_path / "log")
    server.start(["serve", "1"], {**os.environ, "KEY": "secret"})
    file, state = tmp_path / "start-0-1.json", tmp_path / "state-0-1.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_object(file) == {"command": ["serve", "1"], "environment": {"KEY": "secret"}, "starts": 1}
    assert server.ended is None
    write_object(state, {"starts": 1, "ended": "killed by SIGKILL"})
    assert server.ended == "killed by SIGKILL"
    server.restart()
    assert read_object(file)["starts"] == 2 and server.ended is None  # its node has not answered yet
