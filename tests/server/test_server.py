"""Run the server: weights in folders, keys, signals, and requests that finish before it ends."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest
from serve_parts import command, save_folder, serving, tiny_model

from assay.config import HttpConfig
from assay.server.service import api_key_of
from assay.server.trainer_api import FolderWeights
from assay.system import http_server
from assay.types import UserError


def test_only_loopback_may_be_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="set an API key with --api-key-env"):
        api_key_of(HttpConfig(host="0.0.0.0"))
    with pytest.raises(UserError, match="TEST_KEY is not set"):
        api_key_of(HttpConfig(api_key_env="TEST_KEY"))
    monkeypatch.setenv("TEST_KEY", "secret")
    assert api_key_of(HttpConfig(host="0.0.0.0", api_key_env="TEST_KEY")) == "secret"


def test_connections_without_headers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.2)
    with serving() as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
            assert connection.recv(100) == b""
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.slow
def test_running_requests_finish_before_the_server_ends(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(0, 512), tmp_path)
    with command(str(folder), "--name", "tiny") as (process, url):
        body = {"prompt": "Hi", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_second_signal_stops_immediately(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(0, 4096), tmp_path)
    with command(str(folder)) as (process, url):
        body = {"prompt": "Hi", "max_tokens": 4000, "n": 64, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # the connection is closed when this is collected
            next(lines)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None and "stopping" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_missing_and_damaged_weights_are_reported(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path, "do trainer and server share this folder"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(UserError, match=f"cannot read the weights .*{message}"):
            list(FolderWeights(str(folder)).weights())
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="cannot read the weights"):
        list(FolderWeights(str(tmp_path)).weights())
