"""How weights get into SGLang servers: from a folder, from shared GPU memory, or through NCCL.

Experimental: NCCL has never been run, because it needs two GPUs.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from assay.config import SGLangConfig
from assay.engine.remote.pausable import WeightSender
from assay.engine.remote.transport import FolderTransport, IpcTransport, NcclTransport, Transport
from assay.types import UserError

GROUP = "assay_weights"  # name of the process group of trainer and servers


@dataclass(frozen=True)
class SGLangServer:
    """What a server reports about itself."""

    info: dict[str, Any]  # /server_info: its arguments, by name, and more
    model: dict[str, Any]  # /model_info

    @property
    def max_prompt(self) -> int:
        """Prompts must be shorter."""
        return int(self.info["max_req_input_len"])

    @property
    def workers(self) -> int:
        return int(self.info.get("tp_size") or 1) * int(self.info.get("pp_size") or 1)


class SGLangSender(WeightSender):
    def choose_transport(
        self, settings: SGLangConfig, device: torch.device, dtype: torch.dtype, size: int, share_gpu: bool
    ) -> Transport:
        """The one in the settings, or the fastest that is possible.

        `size`: bytes of all weights. `share_gpu`: the servers are known to be on the trainer's GPU.
        """
        kind = settings.transport
        single = all(served.workers == 1 for served in self.served.values())
        if kind == "nccl":
            return self.connect(GroupTransport(device, dtype, settings.nccl_host))
        if kind == "ipc" and (device.type != "cuda" or not single):
            need = "servers with one worker each" if device.type == "cuda" else "a GPU"
            raise UserError(f"sglang.transport = 'ipc' needs {need}: use 'folder'")
        if kind == "ipc" or (kind == "auto" and device.type == "cuda" and single and share_gpu):
            return IpcTransport(device, dtype)
        return FolderTransport(settings.folder, dtype, size)

    def _load_folder(self, folder: str, version: int) -> None:
        body = {"model_path": folder, "load_format": "auto", **self._options(version)}
        for answer in self.http.call_all("POST", "/update_weights_from_disk", body):
            self._check(answer)

    def _send_shared(self, transport: IpcTransport, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        for buffer, layout in transport.chunks(weights):
            for server in self.http.servers:
                payload = shared_bucket(buffer, layout)  # each may be opened once
                body = {"load_format": "flattened_bucket", **self._options(version)}
                body["serialized_named_tensors"] = [base64.b64encode(payload).decode()]
                self._check(self.http.call(server, "POST", "/update_weights_from_tensor", body))
        if transport.device.type == "cuda":
            torch.cuda.ipc_collect()

    def _group_request(self, place: dict[str, Any], transport: NcclTransport) -> tuple[str, Any]:
        return "/init_weights_update_group", {**place, "group_name": GROUP, "backend": transport.backend}

    def _update_request(self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int) -> Any:
        layout = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}
        return "/update_weights_from_distributed", layout | self._options(version)

    def _options(self, version: int) -> dict[str, Any]:
        return {"flush_cache": False, "weight_version": str(version)}

    def _check(self, answer: Any) -> None:
        if not self.http.field(answer, "success", bool):
            raise self.http.garbage("an update without success")


class BucketPickler(pickle.Pickler):
    """Pickles CUDA tensors as handles that another process opens.

    The device is the identifier of the GPU, as SGLang expects, because indices differ between processes.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cuda":
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(value)
        gpu = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:6], gpu, *arguments[7:])


def shared_bucket(buffer: Tensor, layout: Mapping[str, list[Any]]) -> bytes:
    """The weights in a buffer (see `IpcTransport.chunks`) in SGLang's format "flattened_bucket".

    SGLang reads attributes of the descriptions, so they need not be instances of its own class.
    """
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)
    descriptions = []
    for name, dtype_name, shape, start in zip(*layout.values(), strict=True):
        dtype, size = getattr(torch, dtype_name), torch.Size(shape)
        end = start + size.numel() * dtype.itemsize
        place = {"start_idx": start, "end_idx": end, "numel": end - start}
        descriptions.append(SimpleNamespace(name=name, shape=size, dtype=dtype, **place))
    stream = io.BytesIO()
    BucketPickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump({"flattened_tensor": buffer, "metadata": descriptions})
    return stream.getvalue()


class GroupTransport(NcclTransport):
    """Broadcasts from this process to the workers of all servers, in a process group of torch.

    Never run with SGLang: it needs a second GPU. The tests join with another process on CPUs (gloo).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, host: str) -> None:
        super().__init__(device, dtype, host)
        self.store: dist.Store | None = dist.TCPStore(host, self.port, None, True, wait_for_workers=False)
        limit = dist.distributed_c10d.default_pg_timeout
        self.client = dist.TCPStore(host, self.port, None, False, limit, wait_for_workers=False)

    def connect(self, world_size: int) -> None:
        self.communicator = weight_group(self.client, 0, world_size, self.backend)

    def abort(self) -> None:
        self.store = None  # ends the wait for other processes in `connect`
        if self.communicator is not None:
            self.communicator.abort()

    def broadcast(self, chunk: Any) -> None:
        for _, tensor in chunk:
            dist.broadcast(tensor, group=self.communicator, group_src=0)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def weight_group(store: dist.Store, rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
    """A process group beside the default one, with processes that are not in the default one.

    torch has no public function for it. SGLang's workers make theirs with the same calls, and keys of the store must be
    the same on both ends.
    """
    from torch.distributed import distributed_c10d as c10d

    limit = c10d.default_pg_timeout
    keys = c10d.PrefixStore(GROUP, store)
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(backend), keys, group_name=c10d.GroupName(GROUP), timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {one: one for one in range(world_size)}
    return group
