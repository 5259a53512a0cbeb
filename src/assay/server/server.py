"""Run the server: in this process, or in several processes that handle HTTP in front of the engine's process.

Tokenization, text, JSON and sockets take as much Python time as the engine's own work when thousands of streams run.
Each frontend is a process with an event loop of its own. It sends requests to the engine's process and receives all
events of an engine step as one message. The kernel distributes connections over the sockets of the frontends.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from assay.config import HttpConfig
from assay.engine.base import Engine, EngineInfo, Event, Failed, Finished, Request, TokenChunk, WeightSource
from assay.engine.client import EngineClient, LocalClient
from assay.server.app import make_app
from assay.server.protocol import RequestParser
from assay.server.service import SIZE, Metrics, Service, failure
from assay.server.trainer_api import EngineControl
from assay.system import http_server
from assay.system.http_server import serve_until_stopped
from assay.system.spawn import ChildProcess, LoopPipe, ignore_stop_signals, receive, take_pipes
from assay.text import Renderer
from assay.types import Completion, UserError, describe_error

BACKLOG = 4096  # connections that wait to be accepted
KEEP_ALIVE_S = 60
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EVENTS = {"chunk": TokenChunk, "finished": Finished, "failed": Failed}  # by the kinds of their messages


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


@dataclass
class FrontendSetup:
    """What a frontend needs to serve."""

    serving: Serving
    info: EngineInfo
    listener: int  # descriptor of its listening socket
    metrics: int  # descriptor of the shared counters
    part: int  # index of this frontend


# -- in the engine's process


class PipeServer:
    """Serves the requests of a `PipeEngine` in another process through the client of this one."""

    def __init__(self, client: EngineClient, control: EngineControl, pipe: LoopPipe) -> None:
        self._client, self._control, self._pipe = client, control, pipe
        self._futures: dict[int, list[asyncio.Future[Completion]]] = {}  # of unfinished requests, by their ids there
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Handle messages until the other process ends. `on_ready`: called when it is ready."""
        with suppress(EOFError, OSError):
            while True:
                self._handle(await self._pipe.receive(), on_ready)

    def close(self) -> None:
        """Abort all requests."""
        self._abort(*self._futures)

    def _handle(self, messages: Sequence[tuple[Any, ...]], on_ready: Callable[[], None]) -> None:
        for kind, *values in messages:
            if kind == "add":
                self._add(*values)
            elif kind == "abort":
                self._abort(*values)
            elif kind == "call":
                call = asyncio.ensure_future(self._call(*values))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            else:
                on_ready()

    def _add(self, request_id: int, request: Request) -> None:
        futures = self._futures[request_id] = self._client.submit(request, partial(self._send_chunk, request_id))
        for sample, future in enumerate(futures):
            future.add_done_callback(partial(self._send_result, request_id, sample))

    def _abort(self, *ids: int | tuple[int, int]) -> None:
        for key in ids:
            request_id, aborted = key if isinstance(key, tuple) else (key, None)
            for sample, future in enumerate(self._futures.get(request_id, ())):
                if aborted in (None, sample):
                    future.cancel()

    def _send_chunk(self, request_id: int, chunk: TokenChunk) -> None:
        self._pipe.send(("chunk", request_id, chunk.sample, chunk.token_ids, chunk.logprobs))

    def _send_result(self, request_id: int, sample: int, future: asyncio.Future[Completion]) -> None:
        if all(other.done() for other in self._futures.get(request_id, ())):
            self._futures.pop(request_id, None)
        if future.cancelled():
            return
        if error := future.exception():
            self._pipe.send(("failed", request_id, failure(error).message))
        else:
            self._pipe.send(("finished", request_id, sample, future.result()))

    async def _call(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            result = await self._control.call(name, *args)
        except Exception as raised:
            for_user = isinstance(raised, UserError)
            error = UserError(str(raised)) if for_user else RuntimeError(describe_error(raised))
        self._pipe.send(("result", number, result, error))


class FrontendProcess:
    """A frontend, as the engine's process sees it."""

    def __init__(self, client: EngineClient, control: EngineControl, setup: FrontendSetup) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._child = ChildProcess(__name__, environment=environment, pass_fds=(setup.listener, setup.metrics))
        process = self._child.process
        assert process.stdin is not None and process.stdout is not None
        self._pipe, self._setup = LoopPipe(process.stdout, process.stdin), setup
        self._server = PipeServer(client, control, self._pipe)

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve its requests until it ends."""
        await self._pipe.open()
        self._pipe.send(self._setup)
        await self._server.run(on_ready)

    def stop(self) -> None:
        """Ask it to finish its requests and end."""
        self._pipe.send(("stop",))

    def close(self) -> str:
        """Abort its requests, and kill it if it is running; returns how it ended."""
        self._server.close()
        self._pipe.close()
        return self._child.close()


def listeners_of(listener: socket.socket, number: int) -> list[socket.socket]:
    """Sockets on the address of `listener`, one per frontend. The kernel distributes connections over them."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise UserError("this system cannot share a port between processes: set http.frontends to 0")
    address = listener.getsockname()[:2]
    family = listener.family
    listener.close()
    listeners = []
    for _ in range(number):
        shared = socket.socket(family)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(address)
        listeners.append(shared)
    return listeners


def serve(engine: Engine, serving: Serving, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM; must be called in the main thread."""
    run = run_with_frontends if serving.cfg.frontends else run_server
    gc.collect()
    gc.freeze()  # modules and weights stay: collections that many requests cause need not look at them
    try:
        asyncio.run(run(engine, serving, listener))
    finally:
        listener.close()
        engine.close()


async def run_with_frontends(engine: Engine, serving: Serving, listener: socket.socket) -> None:
    number, plain = serving.cfg.frontends, replace(serving, on_ready=nothing, on_stop=nothing)
    client = LocalClient(engine, strict=False)
    with ExitStack() as stack:
        control = stack.enter_context(closing(EngineControl(engine)))
        listeners = [stack.enter_context(shared) for shared in listeners_of(listener, number)]
        counters = stack.enter_context(tempfile.TemporaryFile())
        counters.truncate(8 * SIZE * number)
        stack.enter_context(client.driven_in_thread())
        frontends: list[FrontendProcess] = []
        for part, shared in enumerate(listeners):
            setup = FrontendSetup(plain, engine.info, shared.fileno(), counters.fileno(), part)
            frontends.append(FrontendProcess(client, control, setup))
            stack.callback(frontends[-1].close)
        await run_until_stopped(frontends, serving)


async def run_until_stopped(frontends: list[FrontendProcess], serving: Serving) -> None:
    """Until all frontends have ended after a signal, or a second signal."""
    loop, signals, ready = asyncio.get_running_loop(), asyncio.Queue[None](), count(1)
    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, signals.put_nowait, None)

    def on_ready() -> None:
        if next(ready) == len(frontends):
            serving.on_ready()

    running = [asyncio.ensure_future(frontend.run(on_ready)) for frontend in frontends]
    stop = asyncio.ensure_future(signals.get())
    await asyncio.wait([stop, *running], return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        ended = next(index for index, task in enumerate(running) if task.done())
        running[ended].result()
        reason = frontends[ended].close()
        raise UserError(f"a process that handles HTTP has ended ({reason}): see the lines above; start again")
    serving.on_stop()
    for frontend in frontends:
        frontend.stop()
    stop = asyncio.ensure_future(signals.get())
    all_ended: asyncio.Future[Any] = asyncio.gather(*running)
    await asyncio.wait({stop, all_ended}, return_when=asyncio.FIRST_COMPLETED)


# -- in a frontend


class PipeEngine(Engine):
    """The engine in another process, for an `EngineClient` without a driver: `run` delivers the events."""

    def __init__(self, pipe: LoopPipe, info: EngineInfo) -> None:
        self.info, self._pipe = info, pipe
        self._ids, self._calls = count(), count()
        self._events: list[Event] = []
        self._results: dict[int, asyncio.Future[Any]] = {}

    def add(self, request: Request) -> int:
        request_id = next(self._ids)
        self._pipe.send(("add", request_id, request))
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        events, self._events = self._events, []
        return events

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        self._pipe.send(("abort", *ids))

    def update_weights(self, source: WeightSource, version: int) -> None:
        raise NotImplementedError("use `call`")

    def close(self) -> None:
        self._pipe.close()

    async def call(self, name: str, *args: Any) -> Any:
        """As `EngineControl.call`."""
        number = next(self._calls)
        self._results[number] = asyncio.get_running_loop().create_future()
        self._pipe.send(("call", number, name, args))
        return await self._results[number]

    async def run(self, client: LocalClient, on_stop: Callable[[], None]) -> None:
        """Handle messages until the engine's process ends."""
        with suppress(EOFError, OSError):
            while True:
                self._handle(await self._pipe.receive(), on_stop)
                client.deliver(self.step())

    def _handle(self, messages: Sequence[tuple[Any, ...]], on_stop: Callable[[], None]) -> None:
        for kind, *values in messages:
            if kind in EVENTS:
                self._events.append(EVENTS[kind](*values))
            elif kind == "stop":
                on_stop()
            else:
                self._set_result(*values)

    def _set_result(self, number: int, result: Any, error: Exception | None) -> None:
        future = self._results.pop(number)
        if not future.cancelled():
            future.set_result(result) if error is None else future.set_exception(error)


async def run_frontend(setup: FrontendSetup, pipe: LoopPipe) -> None:
    await pipe.open()
    engine = PipeEngine(pipe, setup.info)
    client = LocalClient(engine, strict=False)
    counters: Any = memoryview(mmap.mmap(setup.metrics, 8 * SIZE * setup.serving.cfg.frontends)).cast("d")
    service = build_service(setup.serving, client, engine.call, Metrics(counters, setup.part))
    server = make_http_server(make_app(service), setup.serving.cfg, on_ready=lambda: pipe.send(("ready",)))
    reading = asyncio.ensure_future(engine.run(client, server.stop))
    reading.add_done_callback(lambda task: None if task.cancelled() else os._exit(1))  # the engine's process has ended
    await server.serve([socket.socket(fileno=setup.listener)])
    reading.cancel()


def main() -> None:
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    (setup,) = receive(incoming)
    asyncio.run(run_frontend(setup, LoopPipe(os.fdopen(incoming, "rb", 0), os.fdopen(outgoing, "wb", 0))))
