"""How weights get into vLLM servers: from a folder, from shared GPU memory, or through NCCL.

Experimental: NCCL has never been run, because it needs two GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.config import VLLMConfig
from assay.engine.remote.http import HttpServers, Server, ServerError, ServerUnreachable
from assay.engine.remote.transport import FolderTransport, IpcTransport, NcclTransport, ipc_handle
from assay.engine.remote.vllm.worker import EXTENSION
from assay.types import UserError

Transport = FolderTransport | IpcTransport | NcclTransport


@dataclass(frozen=True)
class ServedModel:
    """What a server reports about itself."""

    name: str
    max_length: int
    config: dict[str, Any]  # vLLM's, by section

    def setting(self, section: str, name: str) -> Any:
        return (self.config.get(section) or {}).get(name)

    @property
    def has_extension(self) -> bool:
        return str(self.setting("parallel_config", "worker_extension_cls") or "").endswith(EXTENSION)

    @property
    def workers(self) -> int:
        parallel = self.config.get("parallel_config") or {}
        return int(parallel.get("tensor_parallel_size") or 1) * int(parallel.get("pipeline_parallel_size") or 1)


class WeightSender:
    """Sends weights to all servers, and calls methods of the extension on them."""

    def __init__(self, http: HttpServers, models: Mapping[str, ServedModel]) -> None:
        """`models`: what each server reports about itself, by URL."""
        self.http, self.models = http, models

    def choose_transport(self, settings: VLLMConfig, device: torch.device, dtype: torch.dtype, size: int) -> Transport:
        """The one in the settings, or the fastest that is possible. `size`: bytes of all weights."""
        kind = settings.transport
        extended = all(served.has_extension for served in self.models.values())
        if kind == "nccl":
            return self._connect_nccl(NcclTransport(device, dtype, settings.nccl_host))
        if kind in ("auto", "ipc") and device.type == "cuda" and extended:
            shared = IpcTransport(device, dtype)
            with self.http.reading("no description of its GPU"):
                gpus = {str(worker["uuid"]) for answer in self.rpc("assay_gpu") for worker in answer}
            if gpus == {shared.gpu}:
                return shared
            if kind == "ipc":
                raise UserError("transport 'ipc' needs servers on the trainer's GPU: use 'folder' or 'nccl'")
        elif kind == "ipc":
            need = f"servers with --worker-extension-cls {EXTENSION}" if device.type == "cuda" else "a GPU"
            raise UserError(f"vllm.transport = 'ipc' needs {need}: use 'folder'")
        return FolderTransport(settings.folder, dtype, size)

    def send(self, transport: Transport, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        match transport:
            case FolderTransport():
                with transport.written(weights, version) as folder:
                    self._load_folder(str(folder))
            case IpcTransport():
                self._send_shared(transport, weights)
            case NcclTransport():
                self._broadcast(transport, weights)

    def _load_folder(self, folder: str) -> None:
        def body(server: Server) -> dict[str, Any]:
            extended = self.models[server.url].has_extension
            method, name = ("assay_load_folder", "folder") if extended else ("reload_weights", "weights_path")
            return {"method": method, "kwargs": {name: folder}}

        try:
            self.http.call_all("POST", "/collective_rpc", body)
        except ServerUnreachable:
            raise
        except ServerError as error:
            raise UserError(
                f"a vLLM server cannot load the weights in {folder} ({error}): it must serve the same model and see "
                "the same folder (vllm.folder); its log has the cause"
            ) from None

    def _send_shared(self, transport: IpcTransport, weights: Iterator[tuple[str, Tensor]]) -> None:
        first = True
        for buffer, layout in transport.chunks(weights):
            for server in self.http.servers:
                arguments = {"chunk": {**layout, "handle": ipc_handle(buffer)}, "first": first}
                self.http.call(server, "POST", "/collective_rpc", {"method": "assay_load_shared", "kwargs": arguments})
            first = False
        self.rpc("assay_finish_loading")
        torch.cuda.ipc_collect()

    def _connect_nccl(self, transport: NcclTransport) -> NcclTransport:
        world = 1 + sum(served.workers for served in self.models.values())
        offset, posts = 1, {}
        for server in self.http.servers:
            info = {"master_address": transport.host, "master_port": transport.port, "world_size": world}
            posts[server] = "/init_weight_transfer_engine", {"init_info": {**info, "rank_offset": offset}}
            offset += self.models[server.url].workers
        self.http.call_during(partial(transport.connect, world), posts, abort=transport.abort)
        return transport

    def _broadcast(self, transport: NcclTransport, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.http.call_all("POST", "/start_weight_update", {})
        for chunk in transport.chunks(weights):
            layout = {
                "names": [name for name, _ in chunk],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
                "shapes": [list(tensor.shape) for _, tensor in chunk],
            }
            posts = dict.fromkeys(self.http.servers, ("/update_weights", {"update_info": layout}))
            self.http.call_during(partial(transport.broadcast, chunk), posts, abort=transport.abort)
        self.http.call_all("POST", "/finish_weight_update", {})

    def rpc(self, method: str) -> list[list[Any]]:
        """Call a method of the extension on all servers; for each, the results of its workers."""
        answers = self.http.call_all("POST", "/collective_rpc", {"method": method})
        return [self.http.field(answer, "results", list) for answer in answers]
