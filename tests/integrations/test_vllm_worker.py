"""What runs inside vLLM, without vLLM: staging, names of fused layers, access control."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect
from torch import nn

from assay.engine.remote.server_side import KEY
from assay.integrations.vllm_worker import KeyCheck, stage, unfused

WORKER = "assay.integrations.vllm_worker"


class Fused(nn.Module):
    """A layer with the attributes of vLLM's."""

    def __init__(self, *parts: torch.Tensor, **attributes: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat(parts), requires_grad=False)
        self.__dict__.update(attributes)


def test_staged_modules_can_be_imported_without_the_rest_of_the_package(tmp_path: Path) -> None:
    stage(tmp_path)
    code = (
        f"import sys; from {WORKER} import AssayWorker, EXTENSION; import assay; print(EXTENSION); "
        f"assert not [m for m in sys.modules if m.startswith('assay.') and not '{WORKER}'.startswith(m) "
        "and not 'assay.models.fingerprint'.startswith(m) "
        "and m not in ('assay.models', 'assay.models.fingerprint')]; "
        "print(assay.__path__[0])"
    )
    shown = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert shown.stdout.decode().split() == [f"{WORKER}.AssayWorker", str(tmp_path / "assay")]


def test_fused_layers_are_split_and_padding_is_removed() -> None:
    parts = [torch.randn(n, 4) for n in (4, 2, 2, 6, 6)]
    model = nn.Module()
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model.attn, model.mlp = nn.Module(), nn.Module()
    model.attn.qkv_proj = Fused(*parts[:3], output_sizes=[4, 2, 2])
    model.mlp.gate_up_proj = Fused(*parts[3:], output_sizes=[6, 6])
    model.embed_tokens = Fused(torch.ones(8, 4), org_vocab_size=5)
    model.norm = nn.LayerNorm(4, bias=False)
    weights = dict(unfused(model))
    names = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    for name, part in zip(names, parts, strict=True):
        weight = weights.pop(f"{name}.weight")
        assert weight is not None and torch.equal(weight, part)
    assert {name: tuple(weight.shape) for name, weight in weights.items() if weight is not None} == {
        "embed_tokens.weight": (5, 4),
        "norm.weight": (4,),
    }
    model.attn.qkv_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # repacked for a CPU
    assert dict(unfused(model))["attn.k_proj.weight"] is None


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
