"""The engine's side of the server: calls that are not requests, in the engine's process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.engine.base import Engine, EngineLoad, Request, TopLogprobs
from assay.engine.remote.server_side import shared_buffer, weights_of_buffer
from assay.serve.bridge import EngineBridge
from assay.serve.engine_thread import EngineThread
from assay.types import UserError, describe_error

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
    """Calls of the engine that wait for a step boundary. They run in threads of the engine's process."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self._chunked: ChunkedUpdate | None = None
        self._updating = threading.Lock()

    @property
    def engine(self) -> Engine:
        return self.thread.engine

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

    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        return self.engine.score(sequences, temperature)

    def top_logprobs(
        self, sequences: list[list[int]], starts: list[int], count: int, temperature: float
    ) -> list[TopLogprobs]:
        return self.engine.top_logprobs(sequences, starts, count, temperature)

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

    def fingerprint(self) -> str | None:
        return self.engine.fingerprint()

    def digests(self) -> dict[str, str] | None:
        return self.engine.digests()

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()


class LocalPort:
    """The engine in this process. Its thread hands all events of a step to the event loop at once."""

    def __init__(self, control: EngineControl, bridge: EngineBridge, loop: asyncio.AbstractEventLoop) -> None:
        self._control, self._loop = control, loop
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="engine-call")
        self._client = control.thread.connect(lambda events: self._post(bridge.receive, events))
        bridge.port = self

    def add(self, requests: Sequence[Request]) -> list[int]:
        return self._client.add(requests)

    def abort(self, ids: Iterable[int]) -> None:
        self._client.abort(ids)

    async def call(self, name: str, *args: Any) -> Any:
        method = getattr(self._control, name)
        if name in ("load", "version", "info"):  # they do not wait for the engine
            return method(*args)
        return await self._loop.run_in_executor(self._threads, method, *args)

    def close(self) -> None:
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, function: Callable[[Any], None], events: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits for events any more
            self._loop.call_soon_threadsafe(function, events)
