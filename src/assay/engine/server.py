"""Generation with `assay serve` processes: given by URL, or started and stopped by this engine.

All numbers survive the way through HTTP (see `wire`), so training gives the same bits as with the native engine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.config import ServerConfig
from assay.engine.base import ALL_CAPABILITIES, Capabilities, EngineOptions, Event, Failed, Finished
from assay.engine.remote import (
    CONNECT_S,
    Ranks,
    RemoteEngine,
    RunningRequest,
    Server,
    ServerError,
    ServerUnreachable,
    allowed_connections,
)
from assay.engine.sequence import Job
from assay.engine.transport import FolderTransport, IpcTransport, ipc_handle
from assay.engine.wire import FLOATS, IDS, WireError, event_from_json, pack, request_to_json, unpack
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.export import save_config
from assay.process.program import SupervisedProgram, free_port
from assay.types import Completion, UserError, describe_error

GENERATE = "/engine/generate"
CAPABILITIES = replace(ALL_CAPABILITIES, handles=False)
KEY = "ASSAY_SERVER_KEY"  # environment variable with the key of servers that this engine starts
POLL_S = 0.1  # between two questions whether a server has started
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SaveTokenizer = Callable[[Path], object]  # writes the tokenizer into a folder


class AssayEngine(RemoteEngine):
    kind, section = "remote assay", "server"
    splits_samples = False  # the samples of a request share its prompt

    def __init__(
        self,
        model: PolicyModel,
        settings: ServerConfig | None = None,
        save_tokenizer: SaveTokenizer | None = None,
        **options: Any,
    ) -> None:
        """`options`: fields of `EngineOptions`. `save_tokenizer`: needed to start servers."""
        opts = EngineOptions(**options)
        self.settings = settings or ServerConfig()
        ranks = Ranks(opts.group)
        self.started: StartedServers | None = None
        if not self.settings.urls and ranks.is_main:
            self.started = StartedServers(self.settings, opts)
        urls, key = (
            (self.settings.urls, self._key())
            if self.settings.urls
            else ranks.on_main(lambda: self._start_servers(model, save_tokenizer))
        )
        self.size = sum(weight.numel() for weight in model.parameters()) * opts.dtype.itemsize
        self.transport: FolderTransport | IpcTransport | None = None
        # Of the event loop: requests that were added since the last step, and batches of requests by id.
        self.queued: list[RunningRequest] = []
        self.batches: dict[int, list[Any]] = {}
        self.steps = 0  # running calls of `step`
        self.largest_batch = min(opts.max_batch, allowed_connections() // len(urls))  # each has its own connection
        try:
            limit = self.settings.timeout_s
            super().__init__(model, urls, opts, CAPABILITIES, timeout_s=limit, api_key=key, ranks=ranks)
            self.ranks.on_main(self._make_transport)
        except BaseException:
            self._close_servers()
            raise

    # -- start and end

    def _key(self) -> str:
        variable = self.settings.api_key_env
        key = os.environ.get(variable, "") if variable else ""
        if variable and not key:
            raise UserError(f"the environment variable {variable} (server.api_key_env) is not set")
        return key

    def _start_servers(self, model: PolicyModel, save_tokenizer: SaveTokenizer | None) -> tuple[list[str], str]:
        assert self.started is not None
        try:
            self.started.start(model, save_tokenizer)
        except BaseException:
            self.started.close()
            raise
        return list(self.started.programs), self.started.key

    def _check_servers(self) -> None:
        capabilities = self.info.capabilities
        for server in self.servers:
            served = self._info(server)
            self._check_served(server, served)
            has = served.get("capabilities")
            known = {field.name: bool(isinstance(has, dict) and has.get(field.name)) for field in fields(Capabilities)}
            both = {name: value and getattr(capabilities, name) for name, value in known.items()}
            capabilities = Capabilities(**both)
        self.info = replace(self.info, capabilities=capabilities)

    def _info(self, server: Server) -> dict[str, Any]:
        try:
            served = self.call(server, "GET", "/engine/info", timeout_s=30)
        except ServerUnreachable:
            raise
        except ServerError as error:
            if "(403)" in str(error):
                raise UserError(f"{server.url} does not accept weights: start it with --allow-updates") from None
            if " 404" in str(error):
                raise UserError(f"{server.url} is no assay server: start `assay serve MODEL --allow-updates`") from None
            raise
        names = ("version", "max_length", "vocab_size", "dtype", "gpu")
        if not isinstance(served, dict) or any(name not in served for name in names):
            raise self.garbage("no description of its engine")
        return served

    def _check_served(self, server: Server, served: dict[str, Any]) -> None:
        dtype = str(self.options.dtype).removeprefix("torch.")
        checks = [
            ("vocab_size", served["vocab_size"] == self.vocab_size, self.vocab_size, "the model of model.source"),
            ("max_length", served["max_length"] >= self.info.max_length, self.info.max_length, "--model.max_length"),
            ("dtype", served["dtype"] == dtype, dtype, f"--engine.dtype {dtype}"),
        ]
        for name, valid, expected, remedy in checks:
            if not valid:
                raise UserError(
                    f"the server {server.url} has {name} = {served[name]}, the policy needs {expected}: "
                    f"start it with {remedy}"
                )

    def _make_transport(self) -> None:
        kind, device, dtype = self.settings.transport, torch.device(self.options.device), self.options.dtype
        if kind in ("auto", "ipc") and device.type == "cuda":
            shared = IpcTransport(device, dtype)
            if {self._info(server)["gpu"] for server in self.servers} == {shared.gpu}:
                self.transport = shared
                return
        if kind == "ipc":
            raise UserError("server.transport = 'ipc' needs servers on the trainer's GPU: use 'folder'")
        self.transport = FolderTransport(self.settings.folder, dtype, self.size)

    def _why_unreachable(self, server: Server) -> str:
        death = self.started.death(server.url) if self.started is not None else ""
        return death or "start `assay serve MODEL --allow-updates` there, or correct server.urls"

    def _close_servers(self) -> None:
        if isinstance(getattr(self, "transport", None), FolderTransport):
            self.transport.close()  # type: ignore[union-attr]
        if self.started is not None:
            self.started.close()

    # -- requests

    def step(self, wait: bool = True) -> list[Event]:
        self.loop.post(self._begin_step)
        try:
            return super().step(wait)
        finally:
            self.loop.post(self._end_step)

    def _start(self, running: RunningRequest) -> None:
        """Requests that are added between two steps are sent as a batch, which the server's engine starts together."""
        self.queued.append(running)
        if self.steps:
            self._send_queued()

    def _begin_step(self) -> None:
        self.steps += 1
        self._send_queued()

    def _end_step(self) -> None:
        self.steps -= 1

    def _send_queued(self) -> None:
        queued, self.queued = [running for running in self.queued if running.samples], []
        ids: dict[str, list[int]] = {}  # of requests by server
        for running in queued:
            server = self._least_busy()
            ids.setdefault(server.url, []).append(running.job.id)
            super()._start(running)
        for batch in ids.values():
            if 1 < len(batch) <= self.largest_batch:
                name = secrets.token_hex(8)
                self.batches |= {one: [name, index, len(batch)] for index, one in enumerate(batch)}

    def _payload(self, job: Job, samples: Sequence[int]) -> tuple[str, dict[str, Any]]:
        params = replace(job.request.params, max_new_tokens=job.limit)  # the server may allow longer sequences
        request = replace(job.request, prompt_ids=job.tokens, params=params, keep=False, stream=False)
        return GENERATE, request_to_json(request)

    def _parse(self, response: Any, job: Job, samples: Sequence[int], version: int) -> list[Completion]:
        """`response`: completions by sample."""
        if missing := [sample for sample in samples if sample not in response]:
            raise ServerUnreachable(f"a server has ended a response before sample {missing[0]} was finished")
        return [response[sample] for sample in samples]

    async def _generate(self, server: Server, job: Job, samples: Sequence[int]) -> list[Completion]:
        """Completions arrive one by one, and each has its event at once."""
        path, payload = self._payload(job, samples)
        payload["batch"] = self.batches.pop(job.id, None)  # a request that is sent again does not wait for others
        version = self.info.version
        completions: dict[int, Completion] = {}
        async for tree in self._lines(server, path, payload):
            try:
                event = event_from_json(tree, job.id)
            except WireError as error:
                raise self.garbage(str(error)) from None
            if isinstance(event, Failed):
                raise UserError(event.error.removeprefix(f"{job.name}: "))
            if isinstance(event, Finished):
                completion = self._checked(server, job, event.completion, version)
                completions[event.sample] = completion
                running = self.running.get(job.id)
                if running is not None:
                    self._finish(running, event.sample, completion)
        return self._parse(completions, job, samples, version)

    def _checked(self, server: Server, job: Job, completion: Completion, version: int) -> Completion:
        if completion.oldest_version < version:
            raise ServerError(
                f"{server.url} has sampled with weights of version {completion.oldest_version}, not {version}: it was "
                "restarted, or another run uses it; resume this run from its last checkpoint"
            )
        return self._completion(
            job,
            completion.token_ids,
            completion.engine_logprobs,
            completion.sampling_logprobs,
            completion.finish,
            completion.version,
            kept_mass=completion.kept_mass,
            entropy=completion.entropy,
            version_spans=completion.version_spans,
        )

    async def _lines(self, server: Server, path: str, payload: Any) -> Any:
        """The lines of a response, as JSON."""
        import httpx

        limit = self.timeout_s or None
        timeout = httpx.Timeout(limit, connect=min(limit or CONNECT_S, CONNECT_S), pool=None)
        try:
            async with server.client.stream("POST", path, json=payload, timeout=timeout) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._content(server, path, response)
                async for line in response.aiter_lines():
                    yield json.loads(line)
        except httpx.ConnectTimeout:
            raise ServerUnreachable(self._unreachable(server, "no answer to connecting")) from None
        except httpx.TimeoutException:
            advice = f"look at its log, or raise {self.section}.timeout_s"
            raise ServerError(f"{server.url}{path} sent nothing for {limit:g} s: {advice}") from None
        except httpx.TransportError as error:
            raise ServerUnreachable(self._unreachable(server, describe_error(error))) from None
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise self.garbage("something that is not JSON") from None

    # -- the rest

    def _publish(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        if isinstance(self.transport, IpcTransport):
            for buffer, layout in self.transport.chunks(weights):
                for server in self.servers:  # each handle may be opened once
                    body = {"transport": "ipc", "chunk": {"handle": ipc_handle(buffer), **layout}, "version": version}
                    self.call(server, "POST", "/engine/weights", body)
            self.call_all("POST", "/engine/weights", {"transport": "ipc", "version": version})
            return
        assert self.transport is not None
        with self.transport.written(weights, version) as folder:
            body = {"transport": "folder", "path": str(folder), "version": version}
            self.call_all("POST", "/engine/weights", body)

    def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        body = {"sequences": [pack(one, IDS) for one in sequences], "temperature": temperature}
        answer = self.call(server, "POST", "/engine/score", body)
        try:
            scores = [unpack(one, FLOATS) for one in answer["scores"]]
        except (KeyError, TypeError, WireError):
            raise self.garbage("no scores") from None
        if [len(one) + 1 for one in scores] != [len(one) for one in sequences]:
            raise self.garbage("not one score per token")
        return scores

    def _fingerprint(self) -> str | None:
        answers = self.call_all("GET", "/engine/fingerprint")
        texts = {server.url: str(answer["fingerprint"]) for server, answer in zip(self.servers, answers, strict=True)}
        if len(set(texts.values())) > 1:
            listed = ", ".join(f"{text[:12]} at {url}" for url, text in texts.items())
            raise UserError(f"the servers have different weights ({listed}): start them again, and resume the run")
        return next(iter(texts.values()))

    def digests(self) -> dict[str, str]:
        """Digests of the weights of the first server, by name."""
        return self.ranks.on_main(lambda: self.call(self.servers[0], "GET", "/engine/digests"))

    def _sleep(self) -> None:
        self.call_all("POST", "/engine/sleep")

    def _wake(self) -> None:
        self.call_all("POST", "/engine/wake")

    def _reset_prefix_cache(self) -> None:
        self.call_all("POST", "/engine/reset_prefix_cache")


class StartedServers:
    """`assay serve` processes on this host that belong to this process. They end with it."""

    def __init__(self, settings: ServerConfig, options: EngineOptions) -> None:
        self.settings, self.options = settings, options
        self.key = secrets.token_urlsafe(16)
        self.folder = Path(tempfile.mkdtemp(prefix="assay-servers-"))
        self.programs: dict[str, SupervisedProgram] = {}  # by URL
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, True)

    def start(self, model: PolicyModel, save_tokenizer: SaveTokenizer | None) -> None:
        """Start all servers, without weights, which the first update brings. Returns when they are ready."""
        if not isinstance(model, Decoder):
            raise UserError("servers for this model must be started by hand: set server.urls, or engine.name = 'hf'")
        assert save_tokenizer is not None, "the engine needs the tokenizer to start servers"
        model_folder = self.folder / "model"
        model_folder.mkdir()
        save_config(model, model_folder, self.options.dtype)
        save_tokenizer(model_folder)
        for index in range(self.settings.servers):
            port = self.settings.port + index if self.settings.port else free_port()
            words = [sys.executable, "-m", "assay", "serve", str(model_folder), *self._arguments(index, port, model)]
            log = self.folder / f"server-{index}.log"
            self.programs[f"http://127.0.0.1:{port}"] = SupervisedProgram(words, log, self._environment())
        for url in self.programs:
            self._wait(url)

    def _arguments(self, index: int, port: int, model: PolicyModel) -> list[str]:
        options, devices = self.options, self.settings.devices
        values = {
            "http.port": port,
            "http.name": "policy",
            "http.api_key_env": KEY,
            "http.allow_updates": "true",
            "http.max_body_mb": 256,
            "http.frontends": 0,
            "http.queue": 1_000_000,  # the run adds only what it needs
            "prompt.style": "raw",
            "device": devices[index % len(devices)] if devices else str(options.device),
            "threads": torch.get_num_threads(),
            "model.max_length": min(model.max_length, options.max_length or model.max_length),
            "engine.dtype": str(options.dtype).removeprefix("torch."),
            "engine.max_batch": options.max_batch,
            "engine.memory": options.memory,
            "engine.prefill_tokens": options.prefill_tokens,
            "engine.sleep_while_training": str(options.sleep_while_training).lower(),
            "engine.kv_on_update": options.kv_on_update,
        }
        return [f"--{name}={value}" for name, value in values.items()]

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        return {**environment, "PYTHONPATH": path, KEY: self.key}

    def _wait(self, url: str) -> None:
        import httpx

        deadline = time.monotonic() + self.settings.start_timeout_s
        with httpx.Client(trust_env=False, timeout=5) as client:
            while True:
                if death := self.death(url):
                    raise UserError(f"a server did not start: {death}")
                try:
                    if client.get(f"{url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                if time.monotonic() > deadline:
                    limit = self.settings.start_timeout_s
                    raise UserError(f"a server was not ready after {limit:g} s: raise server.start_timeout_s")
                time.sleep(POLL_S)

    def death(self, url: str) -> str:
        """How a server ended, with the last error in its log; empty while it runs."""
        program = self.programs.get(url)
        if program is None or program.ended is None:
            return ""
        self._remove.detach()  # the log is kept
        return f"it ended ({program.ended}): {program.tail()} (see {program.log})"

    def close(self) -> None:
        for program in self.programs.values():
            program.close()
        self._remove()
