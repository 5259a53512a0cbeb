"""A model behind an HTTP server of its own process: `assay.serve`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import weakref
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.api.arguments import overrides_of, settings_of
from assay.api.models import source_of
from assay.config import ServeConfig
from assay.config.settings import toml_value
from assay.types import Closeable, UserError, missing_extra

if TYPE_CHECKING:
    from assay.system.program import SupervisedProgram

SHORT = {name: f"http.{name}" for name in ("host", "name", "api_key_env")}
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address of this machine, for servers that listen on all
_running: set[ModelServer] = set()  # so that a server without another reference is not stopped


class ModelServer(Closeable):
    """A server with the interface of the OpenAI API, in a process that ends with this program.

    In a `with` block, it is stopped at the end.
    """

    def __init__(self, program: SupervisedProgram, url: str, model: str) -> None:
        self._program = program
        self._remove = weakref.finalize(self, shutil.rmtree, program.log.parent, True)
        self._last_log = ""
        self.url = url
        self.model = model
        """the model's name in requests"""

    @property
    def openai_base_url(self) -> str:
        """For OpenAI's client: `OpenAI(base_url=server.openai_base_url, api_key="none")`."""
        return f"{self.url}/v1"

    @property
    def log(self) -> str:
        """What the server has printed."""
        with suppress(OSError):
            self._last_log = self._program.log.read_text(errors="replace")
        return self._last_log

    def close(self) -> None:
        """Finish the running requests, and stop the server."""
        _running.discard(self)
        self._program.close()
        self._last_log = self.log
        self._remove()

    def wait_until_ready(self, seconds: float) -> None:
        """Raise a UserError if the server ends, or does not answer within this time."""
        from assay.engine.remote.launch import becomes_healthy

        if not becomes_healthy(self.url, "", seconds, lambda: self._program.ended is not None):
            reason = self._program.tail().removeprefix("assay: ")
            if (ended := self._program.ended) is not None:
                raise UserError(f"the server of {self.model} did not start: {reason or ended}")
            raise UserError(
                f"the server of {self.model} was not ready after {seconds:g} s (last line: {reason or 'none'}): "
                "raise wait"
            )

    def __repr__(self) -> str:
        return f"ModelServer({self.url!r}, model {self.model!r}, {self._program.ended or 'running'})"


def serve(
    model: Any, *, tokenizer: Any = None, port: int = 0, wait: float = 300.0, trust: bool = False, **settings: Any
) -> ModelServer:
    """Serve a model over HTTP in the background, with the interface of the OpenAI API. Returns when it answers.

    Args:
        model: A folder, a hub id, a GGUF file, a checkpoint of a run ("run:NAME@last", whose prompt and length settings
            are used), or a transformers model.
        tokenizer: The tokenizer of a transformers model.
        port: Port to listen on. Default: any free one.
        wait: Seconds in which the server must be ready.
        trust: Use code and files that the settings of a run name, even if it was started by someone else.
        settings: Settings of `assay serve`, such as `name="policy"` (of the model in requests), `device="cuda:1"` or
            `engine={"max_batch": 64}`.
    """
    if find_spec("uvicorn") is None or find_spec("httpx") is None:
        raise missing_extra("assay.serve", "serve")
    from assay.engine.remote.launch import module_environment
    from assay.system.http_server import bind
    from assay.system.program import SupervisedProgram

    overrides = overrides_of(settings, ServeConfig, SHORT, ("tokenizer", "port", "wait", "trust"))
    source = source_of(model, tokenizer, overrides)
    cfg = settings_of(ServeConfig, None, {"http.port": port, **overrides})
    with bind(cfg.http.host, cfg.http.port) as listener:  # raises if the port is in use
        overrides["http.port"] = listener.getsockname()[1]
    words = [f"--{key}={toml_value(value)}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "assay", "serve", source, *words, *["--trust"] * trust]
    log = Path(tempfile.mkdtemp(prefix="assay-serve-")) / "server.log"
    host = LOCAL.get(cfg.http.host, cfg.http.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{overrides['http.port']}"
    server = ModelServer(SupervisedProgram(command, log, module_environment()), url, cfg.http.name or source)
    _running.add(server)
    try:
        server.wait_until_ready(wait)
    except BaseException:
        server.close()
        raise
    return server
