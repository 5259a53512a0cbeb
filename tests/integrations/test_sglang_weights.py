"""How weights are sent to SGLang servers: choice of the transport, and formats. test_sglang_engine.py sends some."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_parts import small_decoder, small_spec
from http_parts import small_server
from sglang_parts import FakeSGLang

from assay.config import SGLangConfig
from assay.engine.remote.http import HttpServers
from assay.engine.remote.transport import FolderTransport, IpcTransport
from assay.integrations.sglang.weights import GROUP, GroupTransport, SGLangSender, SGLangServer, weight_group
from assay.models.fingerprint import fingerprint
from assay.types import UserError

POLICY = small_decoder(small_spec())
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class TwoServers(HttpServers):
    kind, section = "SGLang", "sglang"


def served(**info: int) -> SGLangServer:
    return SGLangServer({"max_req_input_len": 97, **info}, {})


def test_workers_are_those_of_all_parallel_dimensions() -> None:
    assert served().workers == 1 and served(tp_size=4, pp_size=2).workers == 8


@pytest.mark.parametrize(
    ("kind", "device", "share_gpu", "workers", "expected"),
    [
        ("auto", CUDA, True, 1, IpcTransport),
        ("auto", CUDA, False, 1, FolderTransport),
        ("auto", CUDA, True, 2, FolderTransport),
        ("auto", CPU, True, 1, FolderTransport),
        ("ipc", CUDA, False, 1, IpcTransport),
        ("folder", CUDA, True, 1, FolderTransport),
        ("ipc", CUDA, True, 2, "needs servers with one worker each: use 'folder'"),
        ("ipc", CPU, True, 1, "needs a GPU: use 'folder'"),
    ],
)
def test_gpu_memory_is_used_for_servers_on_the_same_gpu(
    kind: Any, device: torch.device, share_gpu: bool, workers: int, expected: Any
) -> None:
    http = TwoServers([])
    sender = SGLangSender(http, {"url": served(tp_size=workers)})
    arguments = (SGLangConfig(transport=kind), device, torch.float32, 0, share_gpu)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            sender.choose_transport(*arguments)
    else:
        transport = sender.choose_transport(*arguments)
        assert isinstance(transport, expected)
        if isinstance(transport, FolderTransport):
            transport.close()
    http._disconnect()


@pytest.mark.parametrize(("chunk_bytes", "dtype"), [(256, torch.float32), (10_000, torch.bfloat16)])
def test_buckets_hold_all_weights(chunk_bytes: int, dtype: torch.dtype) -> None:
    """The stand-in reads them as SGLang does, and loads only the modules that SGLang allows."""
    other = small_decoder(small_spec(), seed=7)
    fake = FakeSGLang(POLICY, str)
    with small_server(fake) as server:
        http = TwoServers([server.url])
        SGLangSender(http, {server.url: served()}).send(IpcTransport(CPU, dtype, chunk_bytes), iter(other.weights()), 4)
        http._disconnect()
    assert fingerprint(fake.model.weights(), dtype) == fingerprint(other.weights(), dtype)
    assert fake.version == "4" and not fake.refused


@pytest.mark.parametrize("status", [400, 200])
def test_a_server_that_refuses_to_join_the_group_is_reported_at_once(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupTransport, "backend", "gloo")
    answer = {"success": False, "message": "no NCCL here"}
    with small_server(lambda path, body: (status, answer)) as server:
        http = TwoServers([server.url])
        sender = SGLangSender(http, {server.url: served()})
        with pytest.raises(UserError, match="no NCCL here" if status == 400 else "an update without success"):
            sender.choose_transport(SGLangConfig(transport="nccl"), CPU, torch.float32, 0, False)
        assert "assay-collective" not in {thread.name for thread in threading.enumerate()}
        http._disconnect()


def join_group(port: int, results: Any) -> None:
    """A worker of a server: receives all weights through a process group, which it joins as SGLang's workers do."""
    store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
    group = weight_group(store, 1, 2, "gloo")
    for _ in range(2):
        tensor = torch.zeros(3)
        dist.broadcast(tensor, group=group, group_src=0)
        results.put(tensor.tolist())


def test_a_process_that_is_not_in_the_default_group_receives_broadcasts() -> None:
    assert GROUP
    transport = GroupTransport(CPU, torch.float32, "127.0.0.1")
    transport.backend = "gloo"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=join_group, args=(transport.port, results), daemon=True)
    worker.start()
    transport.connect(2)
    (chunk,) = transport.chunks(iter([("a", torch.tensor([1.0, 2.0, 3.0])), ("b", torch.tensor([4.0, 5.0, 6.0]))]))
    transport.broadcast(chunk)
    received = [results.get(timeout=60) for _ in range(2)]
    worker.join(60)
    assert received == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]] and os.getpid() != worker.pid
