"""RequestLimits of the server: hostile bodies, overload, keys and host names."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest
from serve_parts import NAME, RunningServer, serving, tiny_model

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def raw(server: RunningServer, data: bytes, wait_s: float = 30) -> bytes:
    """The response to these bytes, until the server closes the connection."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if b"\r\n\r\n" in received and b"content-length" in received.lower() and received.endswith(b"}"):
                break
        return received


def post(server: RunningServer, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **options)


def is_well(server: RunningServer) -> bool:
    answer = post(server, {"prompt": "Hi", "max_tokens": 2})
    return answer.status_code == 200 and httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_hostile_bodies_do_not_harm_the_server(server: RunningServer) -> None:
    url = f"{server.url}/v1/completions"
    headers = {"Content-Type": "application/json"}
    for body, status in [
        (b"[" * 200_000, 400),
        (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413),
        (json.dumps({"prompt": "a" * 100_000}).encode(), 400),
    ]:
        answer = httpx.post(url, content=body, headers=headers, timeout=60)
        assert answer.status_code == status and answer.json()["error"]["message"], body[:40]
    assert is_well(server)


def test_a_body_in_chunks_is_limited_too(server: RunningServer) -> None:
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    answer = raw(server, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 70)
    assert b" 413 " in answer.splitlines()[0]
    assert is_well(server)


def test_other_content_types_paths_and_methods_are_rejected(server: RunningServer) -> None:
    assert httpx.post(f"{server.url}/v1/completions", data={"prompt": "a"}).status_code == 415
    for method, path, status in [("GET", "/v1/completions", 405), ("POST", "/nope", 404), ("POST", "/health", 405)]:
        answer = httpx.request(method, f"{server.url}{path}")
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_slow_body_is_given_up() -> None:
    with serving(http={"body_timeout_s": 0.3}) as server:
        answer = raw(server, f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in answer.splitlines()[0] and b"0.3 seconds" in answer
        assert is_well(server)


def test_overload_is_answered_with_429_and_ends(server: RunningServer) -> None:
    with serving(tiny_model(0, 4096), max_length=4096, max_batch=2, http={"queue": 1}) as server:
        long = {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{server.url}/v1/completions", json=long):
            assert post(server, {"prompt": "Hi", "n": 2, "max_tokens": 1}).status_code == 200
            answer = post(server, {"prompt": "Hi", "n": 3, "max_tokens": 1})
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        deadline = time.monotonic() + 30
        while post(server, {"prompt": "Hi", "n": 3, "max_tokens": 1}).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_foreign_host_names_are_rejected(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example"})
    assert answer.status_code == 403 and "evil.example" in answer.json()["error"]["message"]
    for name in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": name}).status_code == 200


def test_a_key_is_required_everywhere_but_for_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "secret")
    with serving(http={"api_key_env": "TEST_KEY"}) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/engine/info"):
            assert httpx.get(f"{server.url}{path}").status_code == 401
            assert httpx.get(f"{server.url}{path}", headers={"Authorization": "Bearer secre"}).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=right).json()["data"][0]["id"] == NAME
        assert post(server, {"prompt": "Hi", "max_tokens": 2}, headers=right).status_code == 200
