"""The life of the server: binding, signals, serving until asked to stop, and an orderly end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from assay.config import HttpConfig
from assay.engine.base import Engine
from assay.engine.client import EngineClient, LocalClient
from assay.server.app import make_app
from assay.server.control import EngineControl
from assay.server.metrics import Metrics
from assay.server.protocol import RequestParser
from assay.server.service import Service
from assay.system import http_server
from assay.system.http_server import serve_until_stopped
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
