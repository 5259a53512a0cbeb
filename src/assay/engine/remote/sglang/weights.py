"""How weights get into SGLang servers: from a folder, from shared GPU memory, or through NCCL.

Experimental: NCCL has never been run, because it needs two GPUs.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from assay.config import SGLangConfig
from assay.engine.remote.http import HttpServers, Server, ServerError, ServerUnreachable
from assay.engine.remote.transport import FolderTransport, IpcTransport, NcclTransport
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


class SGLangSender:
    """Sends weights to all servers."""

    def __init__(self, http: HttpServers, served: Mapping[str, SGLangServer]) -> None:
        """`served`: what each server reports about itself, by URL."""
        self.http, self.served = http, served

    def choose_transport(
        self, settings: SGLangConfig, device: torch.device, dtype: torch.dtype, size: int, share_gpu: bool
    ) -> FolderTransport | IpcTransport | NcclTransport:
        """The one in the settings, or the fastest that is possible.

        `size`: bytes of all weights. `share_gpu`: the servers are known to be on the trainer's GPU.
        """
        kind = settings.transport
        single = all(served.workers == 1 for served in self.served.values())
        if kind == "nccl":
            return self._connect(GroupTransport(device, dtype, settings.nccl_host))
        if kind == "ipc" and (device.type != "cuda" or not single):
            need = "servers with one worker each" if device.type == "cuda" else "a GPU"
            raise UserError(f"sglang.transport = 'ipc' needs {need}: use 'folder'")
        if kind == "ipc" or (kind == "auto" and device.type == "cuda" and single and share_gpu):
            return IpcTransport(device, dtype)
        return FolderTransport(settings.folder, dtype, size)

    def send(
        self,
        transport: FolderTransport | IpcTransport | NcclTransport,
        weights: Iterator[tuple[str, Tensor]],
        version: int,
    ) -> None:
        """Replace all weights. Cached prefixes are not dropped."""
        match transport:
            case FolderTransport():
                with transport.written(weights, version) as folder:
                    body = {"model_path": str(folder), "load_format": "auto", "flush_cache": False}
                    self._update_all("/update_weights_from_disk", {**body, "weight_version": str(version)})
            case IpcTransport():
                for buffer, layout in transport.chunks(weights):
                    for server in self.http.servers:
                        payload = shared_bucket(buffer, layout)  # each may be opened once
                        body = {"serialized_named_tensors": [base64.b64encode(payload).decode()]}
                        body |= {"load_format": "flattened_bucket", "flush_cache": False}
                        self._update(server, "/update_weights_from_tensor", {**body, "weight_version": str(version)})
                if transport.device.type == "cuda":
                    torch.cuda.ipc_collect()
            case NcclTransport():
                self._broadcast(transport, weights, version)

    def _update(self, server: Server, path: str, body: dict[str, Any]) -> None:
        with explained():
            self._check(self.http.call(server, "POST", path, body))

    def _update_all(self, path: str, body: dict[str, Any]) -> None:
        with explained():
            for answer in self.http.call_all("POST", path, body):
                self._check(answer)

    def _check(self, answer: Any) -> None:
        if not self.http.field(answer, "success", bool):
            raise self.http.garbage("an update without success")

    def _connect(self, transport: GroupTransport) -> GroupTransport:
        world = 1 + sum(served.workers for served in self.served.values())
        offset, posts = 1, {}
        for server in self.http.servers:
            body = {"master_address": transport.host, "master_port": transport.port, "rank_offset": offset}
            body |= {"world_size": world, "group_name": GROUP, "backend": transport.backend}
            posts[server] = "/init_weights_update_group", body
            offset += self.served[server.url].workers
        self._update_during(partial(transport.connect, world), posts, transport)
        return transport

    def _broadcast(self, transport: NcclTransport, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        for chunk in transport.chunks(weights):
            body = {
                "names": [name for name, _ in chunk],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
                "shapes": [list(tensor.shape) for _, tensor in chunk],
                "group_name": GROUP,
                "flush_cache": False,
                "weight_version": str(version),
            }
            posts = dict.fromkeys(self.http.servers, ("/update_weights_from_distributed", body))
            self._update_during(partial(transport.broadcast, chunk), posts, transport)

    def _update_during(
        self, work: Callable[[], None], posts: Mapping[Server, tuple[str, Any]], transport: NcclTransport
    ) -> None:
        with explained():
            self.http.call_during(work, posts, self._check, transport.abort)


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

    backend = "nccl"

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


@contextmanager
def explained() -> Iterator[None]:
    """Errors of an update say what may be wrong."""
    try:
        yield
    except ServerUnreachable:
        raise
    except ServerError as error:
        raise UserError(
            f"an SGLang server cannot load the weights ({error}): it must serve the same model, and for the transport "
            "folder see the same folder (sglang.folder); its log has the cause"
        ) from None


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
