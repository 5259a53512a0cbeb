"""The life of the server: binding, signals, serving until asked to stop, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn

from assay.config import HttpConfig
from assay.engine.base import Engine
from assay.engine.client import EngineClient, LocalClient
from assay.server.app import make_app
from assay.server.control import EngineControl
from assay.server.metrics import Metrics
from assay.server.protocol import RequestParser
from assay.server.service import Service
from assay.system.http_server import limit_headers
from assay.text import Renderer

BACKLOG = 4096  # connections that wait to be accepted
KEEP_ALIVE_S = 60
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


class HttpServer(uvicorn.Server):
    """Stops on Ctrl-C or SIGTERM after the running requests; on a second one immediately."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None] = nothing) -> None:
        super().__init__(config)
        self.on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `serve` handles signals: uvicorn would raise them again at the end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


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


def make_http_server(app: Any, cfg: HttpConfig, on_ready: Callable[[], None] = nothing) -> HttpServer:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(int(cfg.drain_s), 1),
    )
    limit_headers(config)
    return HttpServer(config, on_ready)


async def run_server(engine: Engine, serving: Serving, listener: socket.socket) -> None:
    """Serve in this process until Ctrl-C or SIGTERM."""
    client = LocalClient(engine, strict=False)
    with closing(EngineControl(engine)) as control, client.driven_in_thread():
        service = build_service(serving, client, control.call)
        server = make_http_server(make_app(service), serving.cfg, serving.on_ready)
        await serve_until_stopped(server, listener, serving.on_stop)


async def serve_until_stopped(server: HttpServer, listener: socket.socket, on_stop: Callable[[], None]) -> None:
    """`on_stop`: called when the server only finishes the running requests."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.stop()
        on_stop()

    for number in STOP_SIGNALS:
        with suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            loop.add_signal_handler(number, stop)
    await server.serve([listener])
