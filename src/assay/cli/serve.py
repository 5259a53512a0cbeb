"""Serve a model over HTTP, with the interface of the OpenAI API.

For a checkpoint of a run, the run's prompt and length settings are used.
A classification model (a reward model) is served at /classify, as by vLLM.
  assay serve Qwen/Qwen2.5-0.5B-Instruct
  assay serve run:demo@last --port 8001
  ASSAY_KEY=... assay serve model.gguf --host 0.0.0.0 --api-key-env ASSAY_KEY
With a command after --, the server runs while that command does, which finds it in the environment variables
OPENAI_BASE_URL and OPENAI_API_KEY. The exit code is that of the command.
  assay serve run:demo@last -- python my_client.py
Ctrl-C or SIGTERM finishes the running requests first; a second one stops immediately.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from assay.build.measure import inherited_settings
from assay.cli.eval import add_trust
from assay.config import ServeConfig
from assay.config.settings import load_settings, parse_overrides
from assay.runs.console import Console, count
from assay.types import UserError, missing_extra, plural

if TYPE_CHECKING:
    from assay.engine import Engine

SETTINGS = ServeConfig
TAKES_CLIENT = True
MAX_FRONTENDS = 4
OF_CLASSIFIERS = ("http.", "runs_dir", "device", "threads", "engine.dtype")  # settings that apply to them

Hook = Callable[[], None]  # called when the server is ready, or when it stops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, hub id, GGUF file or run:NAME@STEP")
    for option, key, metavar, text in (
        ("host", "host", "ADDRESS", " [127.0.0.1]"),
        ("port", "port", "N", " [8000]; 0: any free port"),
        ("name", "name", "NAME", ": the model's name in requests"),
        ("api-key-env", "api_key_env", "NAME", ""),
    ):
        parser.add_argument(f"--{option}", dest=f"http.{key}", metavar=metavar, help=f"short for --http.{key}{text}")
    text = "short for --http.allow_updates: let a trainer replace the weights"
    parser.add_argument("--allow-updates", dest="http.allow_updates", action="store_const", const=True, help=text)
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    try:
        from assay.server.server import address_of
        from assay.server.service import api_key_of
        from assay.system.http_server import bind
    except ImportError:
        raise missing_extra("assay serve", "serve") from None
    from assay.models.load import is_classifier

    cfg = settings_of(args)
    key = api_key_of(cfg.http)  # before the model is loaded
    client = ClientProgram(args.client[1:]) if args.client else None
    cfg.http.name = cfg.http.name or args.model
    with bind(cfg.http.host, cfg.http.port) as listener:
        url = f"{address_of(listener)}/v1"

        def on_ready() -> None:
            say(f"serving {cfg.http.name} at {url}{'' if client else ' (Ctrl-C stops)'}")
            if client is not None:
                client.start(url, key)

        def on_stop() -> None:
            if client is None or client.running:
                say("stopping: finishing the running requests")
            if client is not None:
                client.stop()

        if is_classifier(args.model):
            check_classifier_settings(cfg, parse_overrides(args.settings))
            run_classifier(args.model, cfg, listener, on_ready, on_stop)
        else:
            run_language_model(args.model, cfg, listener, on_ready, on_stop)
    return 0 if client is None else client.exit_code()


def run_language_model(model: str, cfg: ServeConfig, listener: socket.socket, on_ready: Hook, on_stop: Hook) -> None:
    from assay.build.models import build_server
    from assay.server.server import Serving, serve

    with Console(sys.stderr) as console:
        renderer, engine = build_server(model, cfg, None, console, any_style=True)
        has_chat = renderer.style == "chat" or bool(cfg.prompt.template) or cfg.prompt.style == "raw"
        if not has_chat:
            console.note("the model has no chat template: /v1/chat/completions is not available")
    if cfg.http.frontends < 0:
        cfg.http.frontends = default_frontends(str(engine.info.device))
    serving = Serving(renderer, cfg.http, cfg.http.name, has_chat, on_ready, on_stop)
    serve(cast("Engine", engine), serving, listener)


def run_classifier(model: str, cfg: ServeConfig, listener: socket.socket, on_ready: Hook, on_stop: Hook) -> None:
    from assay.rewards.reward_model import RewardModelProcess
    from assay.server.classify import serve_classifier

    process = RewardModelProcess(model, cfg.device, True, cfg.engine.dtype, cfg.threads)
    with Console(sys.stderr) as console:
        console.announce(f"loading {model}")
        info = process.call("info")
        console.end_operation()
        size, labels = count(info["parameters"]), plural(len(info["labels"]), "label")
        console.note(f"{model}: a classification model with {labels}, {size} parameters, {info['where']}")
    serve_classifier(process, cfg.http, cfg.http.name, listener, on_ready, on_stop)


def check_classifier_settings(cfg: ServeConfig, given: Mapping[str, Any]) -> None:
    """Refuse settings that would have no effect."""
    unused = [f"--{name}" for name in given if not name.startswith(OF_CLASSIFIERS)]
    unused += ["--http.frontends"] if cfg.http.frontends > 0 else []
    unused += ["--allow-updates"] if cfg.http.allow_updates else []
    if unused:
        raise UserError(f"{', '.join(unused)} cannot be used with a classification model: remove it")


def default_frontends(device: str) -> int:
    """On a GPU, one process cannot both drive the engine and handle thousands of streams."""
    several = device.startswith("cuda") and sys.platform == "linux"
    return min(MAX_FRONTENDS, (os.cpu_count() or 1) // 4) if several else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def settings_of(args: argparse.Namespace) -> ServeConfig:
    """The prompt and length settings of a run's checkpoint, then the options."""
    used = ("prompt.", "model.max_length")
    inherited = inherited_settings([args.model], args.overrides, args.trust, lambda key: key.startswith(used))
    cfg = load_settings(ServeConfig, None, {**inherited, **args.overrides})
    if cfg.prompt.few_shot and not cfg.prompt.few_shot_file:
        if "prompt.few_shot" in args.overrides:
            raise UserError("assay serve has no task to take examples from: set prompt.few_shot_file")
        cfg.prompt.few_shot = 0  # the examples come from the run's task, the client sends its own messages
    return cfg


# A program after `--` that uses the server, and ends it when it ends itself

STOP_S = 10.0  # seconds that the program gets after SIGTERM


class ClientProgram:
    """Runs while the server does. Ctrl-C is left to the program, which gets it from the terminal."""

    def __init__(self, command: Sequence[str]) -> None:
        if not command or shutil.which(command[0]) is None:
            name = f"'{command[0][:200]}' is not a program" if command else "no program is given"
            raise UserError(f"{name}: after -- comes the command of a client, e.g. -- lm_eval --model ...")
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: OSError | None = None

    def start(self, url: str, api_key: str) -> None:
        """Called in the event loop of the server, when it accepts connections. `url`: of the API."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *_: None)  # a handler of Python is not inherited by the program
        key = api_key or "none"  # clients refuse to start without one
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key}
        self._task = asyncio.ensure_future(self._run(os.environ | variables))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def stop(self) -> None:
        """Pass SIGTERM on to it."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def exit_code(self) -> int:
        """As a shell reports it."""
        if self._error is not None:
            raise UserError(f"cannot run {self._command[0][:200]}: {self._error.strerror}")
        code = None if self._process is None else self._process.returncode
        if code is None:  # killed at the end of the server
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    async def _run(self, environment: dict[str, str]) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(*self._command, env=environment)
            await self._process.wait()
        except OSError as error:
            self._error = error
        except asyncio.CancelledError:  # the server has ended first
            if self._process is not None:
                self.stop()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_S)
            raise
        signal.raise_signal(signal.SIGTERM)  # stops the server in order
