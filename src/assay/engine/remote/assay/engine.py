"""Generation with `assay serve` processes: given by URL, or started and stopped by this engine.

All numbers survive the way through HTTP (see `wire`), so training gives the same bits as with the native engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from assay.config import ServerConfig
from assay.endpoint import key_of
from assay.engine.base import ALL_CAPABILITIES, Capabilities, EngineOptions, Event, Failed, Finished, WeightSource
from assay.engine.remote.assay.servers import LaunchedAssay
from assay.engine.remote.assay.wire import FLOATS, IDS, WireError, event_from_json, pack, request_to_json, unpack
from assay.engine.remote.base import RemoteEngine, RunningRequest
from assay.engine.remote.http import (
    Server,
    ServerBusy,
    ServerError,
    ServerStale,
    ServerUnreachable,
    allowed_connections,
    shortened,
)
from assay.engine.remote.launch import SaveTokenizer
from assay.engine.remote.ranks import Ranks
from assay.engine.remote.transport import FolderTransport, IpcTransport, ipc_handle
from assay.engine.sequence import Job
from assay.models.base import PolicyModel
from assay.types import Completion, UserError

GENERATE = "/engine/generate"
CAPABILITIES = replace(ALL_CAPABILITIES, handles=False)


class AssayEngine(RemoteEngine):
    kind, section = "assay", "server"
    start_advice = "start `assay serve MODEL --allow-updates` there"
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
        launched = LaunchedAssay(self.settings, opts) if not self.settings.urls and ranks.is_main else None
        urls, key = (
            (self.settings.urls, key_of(self.settings.api_key_env, self.section))
            if self.settings.urls
            else ranks.on_main(lambda: launched.start(model, save_tokenizer))  # type: ignore[union-attr]
        )
        # Of the event loop: requests that were added since the last step, and batches of requests by id.
        self.queued: list[RunningRequest] = []
        self.batches: dict[int, list[Any]] = {}
        self.steps = 0  # running calls of `step`
        self.newest_version = -1  # of the weights that this engine has sent or is sending
        self.largest_batch = min(opts.max_batch, allowed_connections() // len(urls))  # each has its own connection
        limits = self.settings.model_dump(include={"timeout_s", "health_timeout_s", "recover_s"})
        super().__init__(model, urls, opts, CAPABILITIES, **limits, api_key=key, ranks=ranks, launched=launched)

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
        self._check_served(server, self._info(server))

    def _join(self, server: Server) -> None:
        if self.asleep:
            self.call(server, "POST", "/engine/sleep")

    def _proof(self, server: Server) -> str:
        return self._fingerprint_of(self.call(server, "GET", "/engine/fingerprint"))

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
        kinds = {"version": int, "max_length": int, "vocab_size": int, "dtype": str, "gpu": str | None}
        if not isinstance(served, dict) or not all(
            name in served and isinstance(served[name], kind) for name, kind in kinds.items()
        ):
            raise self.garbage("no description of its engine")
        return served

    def _check_served(self, server: Server, served: dict[str, Any]) -> None:
        info, dtype = self.info, str(self.options.dtype).removeprefix("torch.")
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

    def _prepare(self) -> None:
        kind, device, dtype = self.settings.transport, torch.device(self.options.device), self.options.dtype
        if kind in ("auto", "ipc") and device.type == "cuda":
            shared = IpcTransport(device, dtype)
            if {self._info(server)["gpu"] for server in self.servers} == {shared.gpu}:
                self.transport = shared
                return
        if kind == "ipc":
            raise UserError("server.transport = 'ipc' needs servers on the trainer's GPU: use 'folder'")
        self.transport = FolderTransport(self.settings.folder, dtype, self.size)

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
            server = self.least_busy()
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
        unfinished = set(range(job.request.params.n))
        answer = self.post_for_lines(server, path, payload, len(unfinished) * job.max_length)
        async with aclosing(answer) as trees:
            async for tree in trees:
                try:
                    event = event_from_json(tree, job.id)
                except WireError as error:
                    raise self.garbage(str(error)) from None
                if isinstance(event, Failed):
                    raise UserError(shortened(event.error.removeprefix(f"{job.name}: ")))
                if not isinstance(event, Finished) or event.sample not in unfinished:
                    raise self.garbage("an event that is not the end of an unfinished sample")
                unfinished.remove(event.sample)
                completion = self._checked(server, job, event.completion, version)
                completions[event.sample] = completion
                running = self.running.get(job.id)
                if running is not None:
                    self._finish(running, event.sample, completion)
        return self._parse(completions, job, samples, version)

    def _checked(self, server: Server, job: Job, completion: Completion, version: int) -> Completion:
        if completion.oldest_version < version:
            raise ServerStale(
                f"{server.url} has sampled with weights of version {completion.oldest_version}, not {version}: it was "
                "restarted, or another run uses it; resume this run from its last checkpoint"
            )
        newest = max(one for one, _ in completion.versions)
        if newest > self.newest_version >= 0:
            raise ServerStale(
                f"{server.url} has sampled with weights of version {newest}, but this run has sent only versions up to "
                f"{self.newest_version}: another run uses it; start a server for each run"
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

    def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        body = {"sequences": [pack(one, IDS) for one in sequences], "temperature": temperature}
        answer = self.call(server, "POST", "/engine/score", body, tokens=sum(map(len, sequences)))
        with self.reading("no scores"):
            return [unpack(one, FLOATS) for one in answer["scores"]]

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
        return {server.url: self._fingerprint_of(answer) for server, answer in answers.items()}

    def _fingerprint_of(self, answer: Any) -> str:
        return self.field(answer, "fingerprint", str)

    def digests(self) -> dict[str, str]:
        """Digests of the weights of the first server, by name."""
        return self.ranks.on_main(lambda: self.call(self.servers[0], "GET", "/engine/digests"))

    def _sleep(self) -> None:
        self.call_all("POST", "/engine/sleep")

    def _wake(self) -> None:
        self.call_all("POST", "/engine/wake")

    def _reset_prefix_cache(self) -> None:
        self.call_all("POST", "/engine/reset_prefix_cache")
