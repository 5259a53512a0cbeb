"""The engine's side of the server: calls that are not requests, in the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.engine.base import Engine, EngineLoad, Request
from assay.engine.dispatch import Dispatcher
from assay.serve.bridge import EngineBridge
from assay.types import UserError


class FolderWeights:
    """The weights in the safetensors files of a folder, as a `WeightSource`."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.safetensors"))
        if not self.files:
            raise UserError(f"there are no safetensors files in {folder}: the server must see the trainer's folder")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        for path in self.files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot read the weights in {path}: {error}") from None


class EngineControl:
    """Calls of the engine that wait for a step boundary. They run in threads of the engine's process."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    @property
    def engine(self) -> Engine:
        return self.dispatcher.engine

    def load(self) -> EngineLoad:
        return getattr(self.engine, "load", EngineLoad(0, 0))

    def version(self) -> int:
        return self.engine.info.version

    def info(self) -> dict[str, Any]:
        info = self.engine.info
        capabilities = asdict(info.capabilities) | {"handles": False}
        sizes = {"max_length": info.max_length, "max_batch": info.max_batch}
        sizes["vocab_size"] = getattr(self.engine, "vocab_size", 0)
        dtype = str(info.dtype).removeprefix("torch.")
        return {"version": info.version, **sizes, "dtype": dtype, "capabilities": capabilities}

    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        return self.engine.score(sequences, temperature)

    def update_weights(self, source: dict[str, Any], version: int) -> None:
        self.engine.update_weights(FolderWeights(source["path"]), version)

    def fingerprint(self) -> str | None:
        return self.engine.fingerprint()

    def sleep(self) -> None:
        self.dispatcher.sleep()

    def wake(self) -> None:
        self.dispatcher.wake()

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()


class LocalPort:
    """The engine in this process. Its thread hands all events of a step to the event loop at once."""

    def __init__(self, dispatcher: Dispatcher, bridge: EngineBridge, loop: asyncio.AbstractEventLoop) -> None:
        self._control = EngineControl(dispatcher)
        self._loop = loop
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="engine-call")
        self._client = dispatcher.connect(lambda events: self._post(bridge.receive, events))
        bridge.port = self

    def add(self, request: Request) -> int:
        return self._client.add(request)

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
