"""Access control of vLLM servers: every request needs the key."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from assay.engine.remote.server_side import KEY
from assay.integrations.vllm.access import KeyCheck


async def load_weights(request: object) -> PlainTextResponse:
    return PlainTextResponse("loaded")


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.close()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv(KEY, "secret")
    app = Starlette(routes=[Route("/collective_rpc", load_weights, methods=["POST"]), WebSocketRoute("/talk", talk)])
    app.add_middleware(KeyCheck)
    return TestClient(app)


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "secret", "Basic secret"])
def test_requests_without_the_key_are_refused(client: TestClient, given: str) -> None:
    headers = [(b"authorization", given.encode())] if given else []
    response = client.request("POST", "/collective_rpc", headers=headers)
    assert response.status_code == 401
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/talk", headers={"authorization": given}):
        pass


def test_requests_with_the_key_are_served(client: TestClient) -> None:
    headers = {"authorization": "Bearer secret"}
    assert client.post("/collective_rpc", headers=headers).text == "loaded"
    assert client.post("/collective_rpc", headers=httpx.Headers([*headers.items()] * 2)).status_code == 401
    with client.websocket_connect("/talk", headers=headers):
        pass
    assert client.options("/collective_rpc").status_code == 401


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(KeyError):
        KeyCheck(None)
