"""Generation with `assay serve` processes: given by URL, or started and stopped by this engine.

All numbers survive the way through HTTP (see `wire`), so training gives the same bits as with the native engine.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from assay.config import ServerConfig
from assay.engine.base import ALL_CAPABILITIES, Capabilities, Failed, Finished, WeightSource
from assay.engine.remote.base import RemoteEngine, SampleBatch
from assay.engine.remote.http import (
    Server,
    ServerBusy,
    ServerError,
    ServerStale,
    ServerUnreachable,
    allowed_connections,
)
from assay.engine.remote.launch import LaunchedServers, module_environment
from assay.engine.remote.scoring import unpacked_scores
from assay.engine.remote.server_side import KEY, gpu_of
from assay.engine.remote.transport import FolderTransport, IpcTransport, ipc_handle
from assay.engine.remote.wire import IDS, WireError, event_from_json, pack, request_to_json
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.types import Completion, UserError, excerpt

GENERATE = "/engine/generate"


class LaunchedAssay(LaunchedServers):
    kind, section = "assay", "server"

    def _check(self, model: PolicyModel) -> None:
        if not isinstance(model, Decoder):
            raise UserError("servers for this model must be started by hand: set server.urls, or engine.name = 'hf'")

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        options, devices = self.options, self.settings.devices
        device = torch.device(options.device).type if self.elsewhere else str(options.device)  # a node has its own GPUs
        values = {
            "http.host": self.host,
            "http.port": port,
            "http.name": "policy",
            "http.api_key_env": KEY,
            "http.allow_updates": "true",
            "http.max_body_mb": 256,
            "http.frontends": 0,
            "http.queue": 1_000_000,  # the run adds only what it needs
            "prompt.style": "raw",
            "device": devices[index % len(devices)] if devices else device,
            "threads": torch.get_num_threads(),
            "model.max_length": max_length,
            "engine.dtype": str(options.dtype).removeprefix("torch."),
            "engine.max_batch": options.max_batch,
            "engine.kv_cache_gib": options.kv_cache_gib,
            "engine.prefill_tokens": options.prefill_tokens,
            "engine.sleep_while_training": str(options.sleep_while_training).lower(),
            "engine.kv_on_update": options.kv_on_update,
        }
        words = [f"--{name}={value}" for name, value in values.items()]
        return [sys.executable, "-m", "assay", "serve", str(self.model_folder), *words]

    def _environment(self, index: int) -> dict[str, str]:
        return {**module_environment(), KEY: self.key}


class AssayEngine(RemoteEngine):
    kind, section, extra = "assay", "server", "serve"
    settings_type, launcher = ServerConfig, LaunchedAssay
    capabilities = replace(ALL_CAPABILITIES, handles=False)
    start_advice = "start `assay serve MODEL --allow-updates` there"
    splits_samples = False  # the samples of a request share its prompt

    newest_version = -1  # of the weights that this engine has sent or is sending

    # -- start

    def _check_servers(self) -> None:
        capabilities = self.info.capabilities
        for server in self.servers:
            self._check_server(server)
            has = self._info(server).get("capabilities")
            known = {field.name: bool(isinstance(has, dict) and has.get(field.name)) for field in fields(Capabilities)}
            both = {name: value and getattr(capabilities, name) for name, value in known.items()}
            capabilities = Capabilities(**both)
        self.info = replace(self.info, capabilities=capabilities)

    def _check_server(self, server: Server) -> None:
        served, info, dtype = self._info(server), self.info, str(self.options.dtype).removeprefix("torch.")
        checks = [
            ("vocab_size", served["vocab_size"] == info.vocab_size, info.vocab_size, "the model of model.source"),
            ("max_length", served["max_length"] >= info.max_length, info.max_length, "--model.max_length"),
            ("dtype", served["dtype"] == dtype, dtype, f"--engine.dtype {dtype}"),
        ]
        for name, valid, expected, remedy in checks:
            if not valid:
                raise UserError(
                    f"the server {server.url} has {name} = {served[name]}, the policy needs {expected}: "
                    f"start it with {remedy}"
                )

    def _join(self, server: Server) -> None:
        if self.asleep:
            self.call(server, "POST", "/engine/sleep")

    def _proof(self, server: Server) -> str:
        return self.field(self.call(server, "GET", "/engine/fingerprint"), "fingerprint", str)

    def _info(self, server: Server) -> dict[str, Any]:
        try:
            served = self.call(server, "GET", "/engine/info", timeout_s=30)
        except ServerUnreachable:
            raise
        except ServerError as error:
            if error.status == 403:
                raise UserError(f"{server.url} does not accept weights: start it with --allow-updates") from None
            if error.status == 404:
                raise UserError(f"{server.url} is no assay server: start `assay serve MODEL --allow-updates`") from None
            raise
        kinds = {"version": int, "max_length": int, "vocab_size": int, "dtype": str, "gpu": str | None}
        if not isinstance(served, dict) or not all(
            name in served and isinstance(served[name], kind) for name, kind in kinds.items()
        ):
            raise self.garbage("no description of its engine")
        return served

    def _sharing_obstacle(self, device: torch.device) -> str:
        if device.type == "cuda" and {self._info(server)["gpu"] for server in self.servers} == {gpu_of(device)}:
            return ""
        return "server.transport = 'ipc' needs servers on the trainer's GPU: use 'folder'"

    # -- requests

    def _started(self, batches: Sequence[SampleBatch]) -> None:
        """Requests that were submitted together are named a batch, which the server's engine starts together."""
        by_server: dict[Server, list[SampleBatch]] = {}
        for batch in batches:
            by_server.setdefault(batch.server, []).append(batch)
        largest = min(self.options.max_batch, allowed_connections() // len(self.all_servers))
        for together in by_server.values():
            if 1 < len(together) <= largest:
                name = secrets.token_hex(8)
                for index, batch in enumerate(together):
                    batch.label = [name, index, len(together)]

    async def _sample(self, batch: SampleBatch) -> None:
        """Completions arrive one by one."""
        server, job, version = batch.server, batch.job, self.info.version
        params = replace(job.request.params, max_new_tokens=job.limit)  # the server may allow longer sequences
        request = replace(job.request, prompt_ids=job.tokens, params=params, keep=False, stream=False)
        body = {**request_to_json(request), "batch": batch.label}
        batch.label = None  # a request that is sent again does not wait for others
        missing = set(range(params.n))
        answer = self.post_for_lines(server, GENERATE, body, params.n * job.max_length)
        async with aclosing(answer) as trees:
            async for tree in trees:
                try:
                    event = event_from_json(tree, job.id)
                except WireError as error:
                    raise self.garbage(str(error)) from None
                if isinstance(event, Failed):
                    raise UserError(excerpt(event.error.removeprefix(f"{job.name}: ")))
                if not isinstance(event, Finished) or event.sample not in missing:
                    raise self.garbage("an event that is not the end of an unfinished sample")
                missing.remove(event.sample)
                self._check_versions(server, event.completion, version)
                batch.sent.finish(event.sample, self._checked(event.completion, job))
        if missing:
            raise ServerUnreachable(f"a server has ended a response before sample {min(missing)} was finished")

    def _check_versions(self, server: Server, completion: Completion, version: int) -> None:
        if completion.oldest_version < version:
            raise ServerStale(
                f"{server.url} has sampled with weights of version {completion.oldest_version}, not {version}: it was "
                "restarted, or another run uses it; resume this run from its last checkpoint"
            )
        newest = max(span_version for span_version, _ in completion.versions)
        if newest > self.newest_version >= 0:
            raise ServerStale(
                f"{server.url} has sampled with weights of version {newest}, but this run has sent only versions up to "
                f"{self.newest_version}: another run uses it; start a server for each run"
            )

    # -- the rest

    def update_weights(self, source: WeightSource, version: int) -> None:
        self.newest_version = max(self.newest_version, version)  # servers may use it before all of them have it
        super().update_weights(source, version)

    def _publish(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        try:
            self._send(weights, version)
        except (ServerUnreachable, ServerBusy):
            raise
        except ServerError as error:
            raise UserError(
                f"{error}: the server must serve the model of model.source, and see the same folder (server.folder)"
            ) from None

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        if isinstance(self.transport, IpcTransport):
            for buffer, layout in self.transport.chunks(weights):
                for server in self.servers:  # each handle may be opened once
                    body = {"transport": "ipc", "chunk": {"handle": ipc_handle(buffer), **layout}, "version": version}
                    self.call(server, "POST", "/engine/weights", body)
            self.call_all("POST", "/engine/weights", {"transport": "ipc", "version": version})
            return
        assert isinstance(self.transport, FolderTransport)
        with self.transport.written(weights, version) as folder:
            body = {"transport": "folder", "path": str(folder), "version": version}
            self.call_all("POST", "/engine/weights", body)

    async def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        body = {"sequences": [pack(ids, IDS) for ids in sequences], "temperature": temperature}
        answer = await self.post(server, "/engine/score", body, tokens=sum(map(len, sequences)))
        with self.reading("no scores"):
            return unpacked_scores(answer)

    def _fingerprint(self) -> str | None:
        texts = self._fingerprints()
        if len(set(texts.values())) > 1:
            for server, info in self.call_each("GET", "/engine/info").items():
                if self.field(info, "version", int) != self.info.version:
                    self.retire(server, f"{server.url} has weights of another version: it was restarted")
            texts = self._fingerprints()
        if len(set(texts.values())) > 1:
            listed = ", ".join(f"{text[:12]} at {url}" for url, text in texts.items())
            raise UserError(f"the servers have different weights ({listed}): start them again, and resume the run")
        return next(iter(texts.values()))

    def _fingerprints(self) -> dict[str, str]:
        """By URL."""
        answers = self.call_each("GET", "/engine/fingerprint")
        return {server.url: self.field(answer, "fingerprint", str) for server, answer in answers.items()}

    def digests(self) -> dict[str, str]:
        """Digests of the weights of the first server, by name."""
        return self.ranks.on_main(lambda: self.call(self.servers[0], "GET", "/engine/digests"))

    def _sleep(self) -> None:
        self.call_all("POST", "/engine/sleep")

    def _wake(self) -> None:
        self.call_all("POST", "/engine/wake")

    def _reset_prefix_cache(self) -> None:
        self.call_all("POST", "/engine/reset_prefix_cache")
