"""How weights get into vLLM servers: from a folder, from shared GPU memory, or through NCCL.

Experimental: NCCL has never been run, because it needs two GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.config import VLLMConfig
from assay.engine.remote.http import Server
from assay.engine.remote.pausable import WeightSender
from assay.engine.remote.transport import FolderTransport, IpcTransport, NcclTransport, Transport, ipc_handle
from assay.integrations.vllm.worker import EXTENSION
from assay.types import UserError


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


class VLLMSender(WeightSender):
    """Sends weights, and calls methods of the extension on all servers."""

    def choose_transport(self, settings: VLLMConfig, device: torch.device, dtype: torch.dtype, size: int) -> Transport:
        """The one in the settings, or the fastest that is possible. `size`: bytes of all weights."""
        kind = settings.transport
        extended = all(served.has_extension for served in self.served.values())
        if kind == "nccl":
            return self.connect(NcclTransport(device, dtype, settings.nccl_host))
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

    def _load_folder(self, folder: str, version: int) -> None:
        def body(server: Server) -> dict[str, Any]:
            extended = self.served[server.url].has_extension
            method, name = ("assay_load_folder", "folder") if extended else ("reload_weights", "weights_path")
            return {"method": method, "kwargs": {name: folder}}

        self.http.call_all("POST", "/collective_rpc", body)

    def _send_shared(self, transport: IpcTransport, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        first = True
        for buffer, layout in transport.chunks(weights):
            for server in self.http.servers:
                arguments = {"chunk": {**layout, "handle": ipc_handle(buffer)}, "first": first}
                self.http.call(server, "POST", "/collective_rpc", {"method": "assay_load_shared", "kwargs": arguments})
            first = False
        self.rpc("assay_finish_loading")
        torch.cuda.ipc_collect()

    def _group_request(self, place: dict[str, Any], transport: NcclTransport) -> tuple[str, Any]:
        return "/init_weight_transfer_engine", {"init_info": place}

    def _update_request(self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int) -> Any:
        return "/update_weights", {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}

    def _broadcast(self, transport: NcclTransport, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.http.call_all("POST", "/start_weight_update", {})
        super()._broadcast(transport, weights, version)
        self.http.call_all("POST", "/finish_weight_update", {})

    def rpc(self, method: str) -> list[list[Any]]:
        """Call a method of the extension on all servers; for each, the results of its workers."""
        answers = self.http.call_all("POST", "/collective_rpc", {"method": method})
        return [self.http.field(answer, "results", list) for answer in answers]
