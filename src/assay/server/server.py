"""Run the server: calls of the engine that are not requests, signals, serving until asked to stop, shutdown."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.config import HttpConfig
from assay.engine.base import Engine, EngineLoad
from assay.engine.client import EngineClient, LocalClient
from assay.engine.remote.server_side import shared_buffer, weights_of_buffer, weights_of_folder
from assay.server.app import make_app
from assay.server.metrics import Metrics
from assay.server.protocol import RequestParser
from assay.server.service import Service
from assay.system import http_server
from assay.system.http_server import serve_until_stopped
from assay.text import Renderer
from assay.types import UserError, describe_error

BACKLOG = 4096  # connections that wait to be accepted
KEEP_ALIVE_S = 60
CALLS = 4  # threads for calls of the engine that wait
CHUNK_S = 60.0  # seconds after which an update without further weights is given up
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def nothing() -> None: ...


@dataclass
class Serving:
    """A model and how it is served."""

    renderer: Renderer
    cfg: HttpConfig
    name: str  # of the model, in requests
    has_chat: bool = True  # whether there is a template for chats
    on_ready: Callable[[], None] = nothing  # called when connections are accepted
    on_stop: Callable[[], None] = nothing  # called when it only finishes the running requests


class FolderWeights:
    """The weights in the safetensors files of a folder, as a `WeightSource`."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError

        try:
            yield from weights_of_folder(self.folder)
        except (OSError, ValueError, SafetensorError) as error:  # e.g. a path that is too long
            raise UserError(f"cannot read the weights in {str(self.folder)[:300]}: {describe_error(error)}") from None


class ChunkedUpdate:
    """A weight update that arrives in chunks of GPU memory of another process, as a `WeightSource`."""

    def __init__(self, engine: Engine, version: int) -> None:
        self.version, self._device = version, engine.info.device
        self._chunks: queue.SimpleQueue[tuple[dict[str, Any], Future[None]] | None] = queue.SimpleQueue()
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, args=(engine,), name="weight-update", daemon=True).start()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._next()) is not None:
            chunk, copied = item
            yield from weights_of_buffer(shared_buffer(chunk["handle"], self._device), chunk)
            torch.cuda.synchronize(self._device)
            copied.set_result(None)

    def load(self, chunk: dict[str, Any]) -> None:
        """Returns when the engine has copied these weights, so that the sender can use the memory again."""
        copied: Future[None] = Future()
        self._chunks.put((chunk, copied))
        wait([copied, self._done], return_when=FIRST_COMPLETED)
        if not copied.done():
            self._done.result()
            raise UserError("the weight update ended before all weights were copied")

    def finish(self) -> None:
        self._chunks.put(None)
        self._done.result()

    def _next(self) -> tuple[dict[str, Any], Future[None]] | None:
        try:
            return self._chunks.get(timeout=CHUNK_S)
        except queue.Empty:
            raise UserError(f"no further weights arrived for {CHUNK_S:g} s: has the trainer ended?") from None

    def _run(self, engine: Engine) -> None:
        try:
            engine.update_weights(self, self.version)
            self._done.set_result(None)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            known = error if isinstance(error, UserError) else UserError(f"damaged weights: {describe_error(error)}")
            self._done.set_exception(known)
        except BaseException as error:
            self._done.set_exception(error)


class EngineControl:
    """Calls of the engine that are not requests. Those that wait for a step boundary run in threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._chunked: ChunkedUpdate | None = None
        self._updating = threading.Lock()
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="engine-call")

    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of this object, or else of the engine."""
        if name in ("load", "version", "info"):  # they do not wait for the engine
            return getattr(self, name)()
        method = self.update_weights if name == "update_weights" else getattr(self.engine, name)
        return await asyncio.get_running_loop().run_in_executor(self._threads, method, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def load(self) -> EngineLoad:
        return self.engine.load

    def version(self) -> int:
        return self.engine.info.version

    def info(self) -> dict[str, Any]:
        info = self.engine.info
        capabilities = asdict(info.capabilities) | {"handles": False}
        sizes = {"max_length": info.max_length, "max_batch": info.max_batch, "vocab_size": info.vocab_size}
        dtype = str(info.dtype).removeprefix("torch.")
        gpu = str(torch.cuda.get_device_properties(info.device).uuid) if info.device.type == "cuda" else ""
        return {"version": info.version, **sizes, "dtype": dtype, "gpu": gpu, "capabilities": capabilities}

    def update_weights(self, source: dict[str, Any], version: int) -> None:
        """`source`: a folder, or one chunk of weights in GPU memory; without either, the chunks are complete."""
        with self._updating:
            if source["transport"] == "folder":
                self.engine.update_weights(FolderWeights(source["path"]), version)
                return
            if self.engine.info.device.type != "cuda":
                raise UserError("the server's engine is not on a GPU: use the transport 'folder'")
            update = self._chunked
            if update is None or update.version != version:
                update = self._chunked = ChunkedUpdate(self.engine, version)
            try:
                update.finish() if source["chunk"] is None else update.load(source["chunk"])
            except BaseException:
                self._chunked = None
                raise
            if source["chunk"] is None:
                self._chunked = None


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def build_service(
    serving: Serving, client: EngineClient, call: Callable[..., Awaitable[Any]], metrics: Metrics | None = None
) -> Service:
    """`call`: of an `EngineControl`."""
    cfg, info = serving.cfg, client.info
    return Service(
        serving.name,
        cfg,
        info.max_batch + cfg.queue,
        metrics or Metrics(),
        renderer=serving.renderer,
        parser=RequestParser(serving.renderer, info, cfg, serving.name, serving.has_chat),
        client=client,
        call=call,
    )


def make_http_server(app: Any, cfg: HttpConfig, on_ready: Callable[[], None] = nothing) -> Any:
    return http_server.make_http_server(
        app,
        on_ready,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(int(cfg.drain_s), 1),
    )


async def run_server(engine: Engine, serving: Serving, listener: socket.socket) -> None:
    """Serve in this process until Ctrl-C or SIGTERM."""
    client = LocalClient(engine, strict=False)
    with closing(EngineControl(engine)) as control, client.driven_in_thread():
        service = build_service(serving, client, control.call)
        server = make_http_server(make_app(service), serving.cfg, serving.on_ready)
        await serve_until_stopped(server, listener, serving.on_stop)
