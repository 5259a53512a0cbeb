"""Servers that an engine starts: waiting, failures with the error in the log, and the end."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_parts import small_decoder, small_spec

from assay.config import ServerConfig
from assay.engine.base import EngineOptions
from assay.engine.remote.launch import LaunchedServers, plain_environment
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


class PythonServers(LaunchedServers):
    kind, section, code = "test", "server", SERVER

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        return [sys.executable, "-c", self.code, str(port), str(max_length)]

    def _environment(self, index: int) -> dict[str, str]:
        return plain_environment()


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
    return launched.start(POLICY, lambda folder: (folder / "tokenizer.json").write_text("{}"))[0]


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
    with servers("import time; print('loading', flush=True); time.sleep(600)", start_timeout_s=1.5) as launched:
        with pytest.raises(UserError, match=r"not ready after 1.5 s \(last line of .*: loading\): raise server.sta"):
            start(launched)
        assert all(program.ended for program in launched.programs.values())


def test_a_server_that_dies_later_is_reported() -> None:
    with servers() as launched:
        (url,) = start(launched)
        os.kill(launched.programs[url].pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not launched.death(url):
            assert time.monotonic() < deadline
        assert launched.death(url).startswith("it ended (killed by SIGKILL)") and ".log)" in launched.hint(url)


def test_the_environment_is_without_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    environment = plain_environment()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert environment["PATH"] == os.environ["PATH"]
