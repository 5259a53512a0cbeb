"""Servers that an engine starts, on this host and on engine nodes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_parts import small_decoder, small_spec
from waiting import until

from assay.config import ServerConfig, VLLMConfig
from assay.engine.base import EngineOptions
from assay.engine.remote import launch
from assay.types import UserError

POLICY = small_decoder(small_spec())
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class PythonServers(launch.LaunchedServers):
    kind, section, code = "test", "server", SERVER

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        return [sys.executable, "-c", self.code, str(port), str(max_length)]

    def _environment(self, index: int) -> dict[str, str]:
        return launch.plain_environment()


@contextmanager
def servers(code: str = SERVER, **settings: float) -> Iterator[PythonServers]:
    options = EngineOptions(device="cpu", dtype=torch.float32)
    launched = PythonServers(ServerConfig(**settings), options)  # type: ignore[arg-type]
    launched.code = code
    try:
        yield launched
    finally:
        launched.close()


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of servers that did not start are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def start(launched: PythonServers) -> list[str]:
    return list(launched.start(POLICY, lambda folder: (folder / "tokenizer.json").write_text("{}")))


def test_servers_are_ready_when_start_returns_and_end_with_close() -> None:
    with servers(servers=2) as launched:
        urls = start(launched)
        programs = list(launched.programs.values())
        assert len(set(urls)) == 2 and not any(map(launched.death, urls))
        assert {path.name for path in launched.model_folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert all(program.ended for program in programs) and not launched.folder.exists()


def test_a_server_that_ends_at_once_is_reported_with_the_error_in_its_log() -> None:
    code = "print('ImportError: not here'); raise SystemExit(3)"
    with servers(code) as launched, pytest.raises(UserError) as error:
        start(launched)
    text, _, log = str(error.value).partition(" (see ")
    assert text.startswith("the test server http://127.0.0.1:")
    assert text.endswith(" did not start: it ended (exit code 3): ImportError: not here")
    assert Path(log.rstrip(")")).exists()  # it is kept


def test_a_server_that_does_not_become_ready_is_stopped() -> None:
    with servers("import time; print('loading', flush=True); time.sleep(600)", start_timeout_s=0.8) as launched:
        with pytest.raises(UserError, match=r"not ready after 0.8 s \(last line of .*: loading\): raise server.sta"):
            start(launched)
        assert all(program.ended for program in launched.programs.values())


def test_a_server_that_dies_later_is_reported() -> None:
    with servers() as launched:
        (url,) = start(launched)
        os.kill(launched.programs[url].pid, signal.SIGKILL)
        until(lambda: bool(launched.death(url)), 30)
        assert launched.death(url).startswith("it ended (killed by SIGKILL)") and ".log)" in launched.hint(url)


def register(folder: Path, node: int, index: int) -> None:
    entry = {"place": [node, index], "servers": 2, "url": f"http://n{node}:{1000 + index}", "log": "/logs/0"}
    launch.write_object(folder / f"server-{node}-{index}.json", entry)


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.ENGINE_NODES, raising=False)
    assert launch.nodes_folder() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(launch.ENGINE_NODES, "runs/slurm/a-1-servers")
    assert launch.nodes_folder() == tmp_path / "runs/slurm/a-1-servers"


def test_weights_go_through_the_folder_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.ENGINE_NODES, raising=False)
    assert launch.with_engine_nodes(ServerConfig()) == ServerConfig()
    monkeypatch.setenv(launch.ENGINE_NODES, str(tmp_path))
    placed = launch.with_engine_nodes(VLLMConfig())
    assert (placed.transport, placed.folder) == ("folder", str(tmp_path / "weights"))
    assert launch.with_engine_nodes(ServerConfig(folder="/scratch")).folder == "/scratch"
    running = ServerConfig(urls=["http://n1:8000"])
    assert launch.with_engine_nodes(running) == running


def test_the_servers_of_all_nodes_are_waited_for(tmp_path: Path) -> None:
    register(tmp_path, 10, 0)
    with pytest.raises(UserError, match=r"^1 server of engine nodes .* raise server\.start_timeout_s"):
        launch.registered_servers(tmp_path, 0.0, "server")
    register(tmp_path, 2, 1)
    servers = launch.registered_servers(tmp_path, 0.0, "server")
    assert [(server.name, server.url) for server in servers] == [("2-1", "http://n2:1001"), ("10-0", "http://n10:1000")]


def test_a_start_has_the_command_and_the_changes_of_the_environment(tmp_path: Path) -> None:
    server = launch.NodeServer(tmp_path, "0-1", "http://n0:1000", tmp_path / "log")
    server.start(["serve", "1"], {**os.environ, "KEY": "secret"})
    file, state = tmp_path / "start-0-1.json", tmp_path / "state-0-1.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert launch.read_object(file) == {"command": ["serve", "1"], "environment": {"KEY": "secret"}, "starts": 1}
    assert server.ended is None
    launch.write_object(state, {"starts": 1, "ended": "killed by SIGKILL"})
    assert server.ended == "killed by SIGKILL"
    server.restart()
    assert launch.read_object(file)["starts"] == 2 and server.ended is None  # its node has not answered yet
