"""Processes that handle HTTP in front of the engine's process.

Tokenization, text, JSON and sockets take as much Python time as the engine's own work when thousands of streams run.
Each frontend is a process with an event loop of its own. It sends requests to the engine's process and receives all
events of an engine step as one message. The kernel distributes connections over the sockets of the frontends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import queue
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from assay.engine.base import Engine, Event, Failed, Finished, Request, TokenChunk
from assay.process.messages import receive, send
from assay.process.spawn import ChildProcess, ignore_stop_signals, take_pipes
from assay.serve.app import make_app
from assay.serve.bridge import EngineBridge
from assay.serve.control import EngineControl
from assay.serve.engine_thread import EngineThread
from assay.serve.metrics import SIZE, Metrics
from assay.serve.server import STOP_SIGNALS, Serving, build_service, make_http_server, nothing, run_server
from assay.types import UserError, describe_error

CALLS = 4  # threads for calls of the engine that wait

Record = tuple[Any, ...]  # an event as a tuple, which is pickled faster than a dataclass


@dataclass
class FrontendSetup:
    """What a frontend needs to serve."""

    serving: Serving
    info: dict[str, Any]  # of the engine
    listener: int  # descriptor of its listening socket
    metrics: int  # descriptor of the shared counters
    part: int  # index of this frontend
    parts: int


def to_record(event: Event, key: int) -> Record:
    if isinstance(event, TokenChunk):
        return key, event.sample, event.token_ids, event.logprobs
    if isinstance(event, Finished):
        return key, event.sample, event.completion
    return key, event.error


def from_record(record: Record) -> Event:
    if len(record) == 4:
        return TokenChunk(*record)
    return Finished(*record) if len(record) == 3 else Failed(*record)


def shared_counters(descriptor: int, parts: int) -> Any:
    return memoryview(mmap.mmap(descriptor, 8 * SIZE * parts)).cast("d")


# -- in the engine's process


class FrontendProcess:
    """A frontend, as the engine's process sees it."""

    def __init__(self, control: EngineControl, setup: FrontendSetup, report: Callable[[str, int], None]) -> None:
        """`report`: called with "ready" and with how the process ended, and the index of the frontend."""
        self.part, self._report = setup.part, report
        self._control = control
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._keys: dict[int, int] = {}  # the frontend's key by request id
        self._ids: dict[int, int] = {}  # the reverse
        self._unfinished: dict[int, int] = {}  # number of samples by key
        self._lock = threading.Lock()  # guards the three above
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="engine-call")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        fds = (setup.listener, setup.metrics)
        self._child = ChildProcess(__name__, environment=environment, pass_fds=fds)
        self._client = control.thread.connect(self._on_events)
        self._child.send(setup)
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"frontend-{setup.part}", daemon=True).start()

    def stop(self) -> None:
        """Ask it to finish its requests and end."""
        self._outgoing.put(("stop", None))

    def close(self) -> str:
        """Kill it if it is running; returns how it ended."""
        self._client.close()
        self._outgoing.put(None)
        self._threads.shutdown(wait=False, cancel_futures=True)
        return self._child.close()

    def _on_events(self, events: Sequence[Event]) -> None:
        """Called by the engine's thread after each step."""
        with self._lock:
            records = [to_record(event, self._key_of(event)) for event in events if event.request_id in self._keys]
        self._outgoing.put(("events", records))

    def _key_of(self, event: Event) -> int:
        """The frontend's key of the event's request, which is forgotten with its last event."""
        key = self._keys[event.request_id]
        if not isinstance(event, TokenChunk):
            self._unfinished[key] -= self._unfinished[key] if isinstance(event, Failed) else 1
            if not self._unfinished[key]:
                self._forget(key)
        return key

    def _forget(self, key: int) -> int | None:
        """Forget a request; returns its id, or None if it is finished."""
        request_id = self._ids.pop(key, None)
        if request_id is not None:
            del self._keys[request_id], self._unfinished[key]
        return request_id

    def _read(self) -> None:
        try:
            while True:
                kind, value = self._child.receive()
                if kind == "add":
                    self._add(*value)
                elif kind == "abort":
                    with self._lock:
                        ids = [self._forget(key) for key in value]
                    self._client.abort(one for one in ids if one is not None)
                elif kind == "call":
                    self._threads.submit(self._call, *value)
                else:
                    self._report(kind, self.part)
        except (EOFError, OSError, RuntimeError):  # it has ended, or the engine is closed
            self._report("ended", self.part)

    def _add(self, keys: Sequence[int], requests: Sequence[Request]) -> None:
        with self._lock:  # until the ids are known, because events may arrive immediately
            for key, request, request_id in zip(keys, requests, self._client.add(requests), strict=True):
                self._keys[request_id], self._ids[key] = key, request_id
                self._unfinished[key] = max(request.params.n, 1)

    def _call(self, number: int, name: str, args: Sequence[Any]) -> None:
        try:
            self._outgoing.put(("result", (number, getattr(self._control, name)(*args), None)))
        except UserError as error:
            self._outgoing.put(("result", (number, None, UserError(str(error)))))
        except Exception as error:
            self._outgoing.put(("result", (number, None, RuntimeError(describe_error(error)))))

    def _write(self) -> None:
        """Send messages; those that have arrived meanwhile are sent together."""
        while (first := self._outgoing.get()) is not None:
            messages = [first]
            while not self._outgoing.empty():
                messages.append(self._outgoing.get())
            try:
                self._child.send([message for message in messages if message is not None])
            except (OSError, ValueError):  # it has ended
                return
            if messages[-1] is None:
                return


def listeners_of(listener: socket.socket, number: int) -> list[socket.socket]:
    """Sockets on the address of `listener`, one per frontend. The kernel distributes connections over them."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise UserError("this system cannot share a port between processes: set http.frontends to 0")
    address = listener.getsockname()[:2]
    family = listener.family
    listener.close()
    listeners = []
    for _ in range(number):
        own = socket.socket(family)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(address)
        listeners.append(own)
    return listeners


def serve(engine: Engine, serving: Serving, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM; must be called in the main thread."""
    thread = EngineThread(engine)
    try:
        if serving.cfg.frontends:
            serve_with_frontends(thread, serving, listener)
        else:
            asyncio.run(run_server(thread, serving, listener))
    finally:
        listener.close()
        thread.close()


def serve_with_frontends(thread: EngineThread, serving: Serving, listener: socket.socket) -> None:
    number = serving.cfg.frontends
    messages: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    listeners = listeners_of(listener, number)
    frontends: list[FrontendProcess] = []
    control = EngineControl(thread)
    info, plain = control.info(), replace(serving, on_ready=nothing, on_stop=nothing)
    before = {one: signal.signal(one, lambda *_: messages.put(("stop", -1))) for one in STOP_SIGNALS}
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(8 * SIZE * number)
            for part, own in enumerate(listeners):
                setup = FrontendSetup(plain, info, own.fileno(), file.fileno(), part, number)
                frontends.append(FrontendProcess(control, setup, lambda kind, one: messages.put((kind, one))))
            wait_for_end(messages, frontends, serving)
    finally:
        for own in listeners:
            own.close()
        for frontend in frontends:
            frontend.close()
        for one, handler in before.items():
            signal.signal(one, handler)


def wait_for_end(
    messages: queue.SimpleQueue[tuple[str, int]], frontends: Sequence[FrontendProcess], serving: Serving
) -> None:
    """Until all frontends have ended after a signal, or a second signal."""
    ready = ended = 0
    stopping = False
    while ended < len(frontends):
        kind, part = messages.get()
        if kind == "ready":
            ready += 1
            if ready == len(frontends):
                serving.on_ready()
        elif kind == "ended":
            ended += 1
            if not stopping:
                reason = frontends[part].close()
                raise UserError(f"a process that handles HTTP has ended ({reason}): see the lines above; start again")
        elif stopping:
            return
        else:
            stopping = True
            serving.on_stop()
            for frontend in frontends:
                frontend.stop()


# -- in a frontend


class RemotePort:
    """The engine in another process."""

    def __init__(self, bridge: EngineBridge, loop: asyncio.AbstractEventLoop, incoming: int, outgoing: int) -> None:
        self._bridge, self._loop = bridge, loop
        self._incoming, self._outgoing = incoming, outgoing
        self._keys, self._calls = count(), count()
        self._results: dict[int, asyncio.Future[Any]] = {}
        self.on_stop: Callable[[], None] = lambda: None
        bridge.port = self

    def start(self) -> None:
        threading.Thread(target=self._read, name="engine-events", daemon=True).start()
        self._send("ready", None)

    def add(self, requests: Sequence[Request]) -> list[int]:
        keys = [next(self._keys) for _ in requests]
        self._send("add", (keys, requests))
        return keys

    def abort(self, ids: Iterable[int]) -> None:
        self._send("abort", list(ids))

    async def call(self, name: str, *args: Any) -> Any:
        number = next(self._calls)
        self._results[number] = self._loop.create_future()
        self._send("call", (number, name, args))
        return await self._results[number]

    def _send(self, kind: str, value: Any) -> None:
        send(self._outgoing, (kind, value))

    def _read(self) -> None:
        try:
            while True:
                messages = receive(self._incoming)
                self._loop.call_soon_threadsafe(self._handle, messages)
        except (EOFError, OSError):  # the engine's process has ended
            os._exit(1)
        except RuntimeError:  # the loop is closed
            return

    def _handle(self, messages: Sequence[tuple[str, Any]]) -> None:
        for kind, value in messages:
            if kind == "events":
                self._bridge.receive(map(from_record, value))
            elif kind == "stop":
                self.on_stop()
            else:
                number, result, error = value
                future = self._results.pop(number)
                if future.cancelled():
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)


async def run_frontend(setup: FrontendSetup, incoming: int, outgoing: int) -> None:
    metrics = Metrics(shared_counters(setup.metrics, setup.parts), setup.part)
    service = build_service(setup.serving, setup.info, metrics)
    port = RemotePort(service.bridge, asyncio.get_running_loop(), incoming, outgoing)
    server = make_http_server(make_app(service), setup.serving.cfg, on_ready=port.start)
    port.on_stop = server.stop
    await server.serve([socket.socket(fileno=setup.listener)])


def main() -> None:
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    asyncio.run(run_frontend(receive(incoming), incoming, outgoing))
    os._exit(0)  # the reading thread still waits
