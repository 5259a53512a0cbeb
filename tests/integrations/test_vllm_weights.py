"""How weights are sent to vLLM servers: choice of the transport, and what is reported. test_vllm.py sends some."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from engine_parts import small_decoder, small_spec
from http_parts import Answer, small_server
from vllm_parts import FakeVLLM

from assay.config import VLLMConfig
from assay.engine.remote.http import HttpServers
from assay.engine.remote.transport import FolderTransport, NcclTransport
from assay.integrations.vllm.weights import ServedModel, VLLMSender
from assay.integrations.vllm.worker import EXTENSION
from assay.types import UserError

POLICY = small_decoder(small_spec())
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class SomeServers(HttpServers):
    kind, section = "vLLM", "vllm"


def served(extension: str = EXTENSION, **parallel: int) -> ServedModel:
    return ServedModel("policy", 97, {"parallel_config": {"worker_extension_cls": extension, **parallel}})


def test_workers_are_those_of_all_parallel_dimensions() -> None:
    assert served().workers == 1 and served(tensor_parallel_size=4, pipeline_parallel_size=2).workers == 8
    assert served().has_extension and not served("other.Worker").has_extension


@pytest.mark.parametrize(
    ("device", "extension", "message"), [(CPU, EXTENSION, "needs a GPU"), (CUDA, "", "needs servers with --worker-ext")]
)
def test_shared_memory_needs_a_gpu_and_the_extension(device: torch.device, extension: str, message: str) -> None:
    http = SomeServers([])
    sender = VLLMSender(http, {"url": served(extension)})
    with pytest.raises(UserError, match=f"vllm.transport = 'ipc' {message}.*: use 'folder'"):
        sender.choose_transport(VLLMConfig(transport="ipc"), device, torch.float32, 0)
    transport = sender.choose_transport(VLLMConfig(), device, torch.float32, 0)
    assert isinstance(transport, FolderTransport)
    transport.close()
    http._disconnect()


class BlockedTransport(NcclTransport):
    """Its broadcasts wait for workers that never join."""

    def __init__(self) -> None:
        super().__init__(CPU, torch.float32, "127.0.0.1")
        self.aborted = threading.Event()

    def broadcast(self, chunk: Any) -> None:
        assert self.aborted.wait(60)
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self.aborted.set()


def test_a_server_that_refuses_a_broadcast_is_reported_at_once() -> None:
    def refuse(path: str, body: Any) -> Answer:
        return (500, {"error": {"message": "no memory"}}) if path == "/update_weights" else (200, {})

    with small_server(refuse) as server:
        http = SomeServers([server.url])
        sender = VLLMSender(http, {server.url: served()})
        with pytest.raises(UserError, match="/update_weights answered 500: no memory"):
            sender.send(BlockedTransport(), iter(POLICY.weights()), 1)
        assert "assay-collective" not in {thread.name for thread in threading.enumerate()}
        http._disconnect()


def test_a_trainer_that_cannot_join_does_not_wait_for_the_servers() -> None:
    released = threading.Event()

    def join(path: str, body: Any) -> Answer:
        released.wait(60)  # until the trainer joins
        return 200, {}

    with small_server(join) as server:
        http = SomeServers([server.url])
        with pytest.raises(UserError, match="transport 'nccl' needs vLLM in this environment"):
            VLLMSender(http, {server.url: served()}).choose_transport(
                VLLMConfig(transport="nccl"), CPU, torch.float32, 0
            )
        released.set()
        http._disconnect()


@pytest.mark.parametrize("extension", [EXTENSION, ""])
def test_weights_are_loaded_from_a_folder(extension: str) -> None:
    other = small_decoder(small_spec(), seed=7)
    fake = FakeVLLM(POLICY, str, extension=extension)
    with small_server(fake) as server:
        http = SomeServers([server.url])
        sender = VLLMSender(http, {server.url: served(extension)})
        transport = FolderTransport("", torch.float32)
        sender.send(transport, iter(other.weights()), 1)
        expected: dict[str, Any] = dict(other.weights())
        assert all(torch.equal(weight, expected[name]) for name, weight in fake.model.weights())
        with pytest.raises(UserError, match=r"cannot load the weights .*: it must serve the same model"):
            sender.send(transport, iter([("model.norm.weight", torch.zeros(2))]), 2)
        transport.close()
        http._disconnect()
