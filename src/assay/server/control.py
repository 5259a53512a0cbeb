"""The engine's side of the server: calls that are not requests, in the engine's process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import Engine, EngineLoad
from assay.engine.remote.server_side import shared_buffer, weights_of_buffer
from assay.types import UserError, describe_error

CALLS = 4  # threads for calls of the engine that wait
CHUNK_S = 60.0  # seconds after which an update without further weights is given up


class FolderWeights:
    """The weights in the safetensors files of a folder, as a `WeightSource`."""

    def __init__(self, folder: str) -> None:
        try:
            self.files = sorted(Path(folder).glob("*.safetensors"))
        except (OSError, ValueError) as error:  # e.g. a path that is too long
            raise UserError(f"cannot read the folder of the weights: {describe_error(error)}") from None
        if not self.files:
            message = f"there are no safetensors files in {folder[:300]}: the server must see the trainer's folder"
            raise UserError(message)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        for path in self.files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot read the weights in {path}: {error}") from None


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
