"""Generation with vLLM servers: given by URL, or started and stopped by this engine.

Requests go to /v1/completions, with token ids in both directions. Everything else uses endpoints that vLLM has in its
development mode (VLLM_SERVER_DEV_MODE=1). Tested with vLLM 0.24 and 0.32.

vLLM reports one log-probability per sampled token. With `--logprobs-mode processed_logprobs`, which the servers must
have, it is at the sampling temperature and after truncation. So it is what training needs unless sampling is
truncated; the other modes report it before the temperature, which cannot be converted without all logits.

Experimental: weights through NCCL have never been sent, because that needs two GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from assay.config import VLLMConfig
from assay.engine.base import WeightSource
from assay.engine.remote.http import Server, ServerError, ServerUnreachable
from assay.engine.remote.launch import LaunchedServers, plain_environment
from assay.engine.remote.pausable import PausableEngine, SampledPart, Weights, sample_seed
from assay.engine.remote.scoring import prompt_body, prompt_scores
from assay.engine.remote.server_side import KEY, gpu_of
from assay.engine.remote.transport import IpcTransport, NcclTransport, ipc_handle
from assay.engine.sequence import Job
from assay.integrations.vllm_worker import EXTENSION, MIDDLEWARE, stage
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.fingerprint import digest_of
from assay.types import Finish, UserError, excerpt

COMPLETIONS = "/v1/completions"
FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH}
DEVELOPMENT = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"


@dataclass(frozen=True)
class ServedModel:
    """What a server reports about itself."""

    name: str
    max_length: int
    config: dict[str, Any]  # vLLM's, by section

    def setting(self, section: str, name: str) -> Any:
        return (self.config.get(section) or {}).get(name)

    @property
    def has_extension(self) -> bool:
        return str(self.setting("parallel_config", "worker_extension_cls") or "").endswith(EXTENSION)

    @property
    def workers(self) -> int:
        parallel = self.config.get("parallel_config") or {}
        return int(parallel.get("tensor_parallel_size") or 1) * int(parallel.get("pipeline_parallel_size") or 1)


class LaunchedVLLM(LaunchedServers):
    kind, section = "vLLM", "vllm"

    def _check(self, model: PolicyModel) -> None:
        self.python = self._interpreter()
        stage(self.folder / "packages")

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", *self._arguments(port, max_length)]

    def _arguments(self, port: int, max_length: int) -> list[str]:
        options, settings = self.options, self.settings
        arguments = {
            "model": str(self.model_folder),
            "served-model-name": "policy",
            "host": self.host,
            "port": str(port),
            "dtype": str(options.dtype).removeprefix("torch."),
            "load-format": "dummy",
            "max-model-len": str(max_length + 1),  # `score` gets whole sequences as prompts
            "max-num-seqs": str(options.max_batch),
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "worker-extension-cls": EXTENSION,
            "middleware": MIDDLEWARE,
        }
        flags = []
        if torch.device(options.device).type == "cuda":
            arguments["gpu-memory-utilization"] = str(settings.gpu_memory)
            if options.kv_cache_gib:
                arguments["kv-cache-memory-bytes"] = str(int(options.kv_cache_gib * 2**30))
            if options.sleep_while_training:
                flags.append("--enable-sleep-mode")
        else:
            flags.append("--enforce-eager")
        if settings.transport == "nccl":
            arguments["weight-transfer-config"] = json.dumps({"backend": "nccl"})
        return [*(part for name, value in arguments.items() for part in (f"--{name}", value)), *flags, *settings.args]

    def _environment(self, index: int) -> dict[str, str]:
        options = self.options
        device = torch.device(options.device)
        packages = os.pathsep.join(filter(None, (str(self.folder / "packages"), os.environ.get("PYTHONPATH"))))
        environment = {
            **plain_environment(),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": packages,
            KEY: self.key,
        }
        environment |= self._visible_devices(index)
        if device.type == "cpu" and not self.settings.devices:
            if not self.elsewhere:  # engine nodes may have other cores
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(options.kv_cache_gib))))
        return environment


class VLLMEngine(PausableEngine):
    kind, section, path = "vLLM", "vllm", COMPLETIONS
    pause, resume = ("/pause?mode=abort", None), ("/resume", None)
    length_fields, forbidden_bias = ("max_tokens", "min_tokens"), -100.0
    lowest_temperature = 0.01  # vLLM raises lower ones to this
    settings_type, launcher = VLLMConfig, LaunchedVLLM
    start_advice = "start a vLLM server there"

    def __init__(self, model: PolicyModel, *arguments: Any, **options: Any) -> None:
        self.tied = isinstance(model, Decoder) and model.spec.tied
        self.published: set[str] = set()  # names of the weights of the last update
        self.updated = False  # whether there was an update
        super().__init__(model, *arguments, **options)

    # -- start

    def _check_server(self, server: Server) -> None:
        self.call(server, "GET", "/health", timeout_s=30)
        served = self._served_model(server)
        with self.reading("a configuration of another form (vLLM 0.24 or later is needed)"):
            if served.workers < 1:
                raise ValueError("a server has at least one worker")
            check_served(served, server.url, self.info.max_length, self.options.dtype, self.tied)
        self.served[server.url] = served
        self._check_vocabulary(server)

    def _join(self, server: Server) -> None:
        self.call(server, "POST", *self.resume)
        if self.asleep:
            self.call(server, "POST", f"/sleep?level={self.settings.sleep_level}")

    def _proof(self, server: Server) -> Any:
        if not self._all_extended():
            return super()._proof(server)
        answer = self.call(server, "POST", "/collective_rpc", {"method": "assay_digests"})
        results = self.field(answer, "results", list)
        # Without digests (several workers, quantized or repacked weights) equal answers would prove nothing.
        return results if results and all(map(is_digests, results)) else super()._proof(server)

    def _served_model(self, server: Server) -> ServedModel:
        listed = self.call(server, "GET", "/v1/models", timeout_s=30)
        with self.reading(f"{excerpt(str(listed), 80)!r} instead of a list of models"):
            models = {
                encodable(model["id"]): int(model["max_model_len"])
                for model in listed["data"]
                if not model.get("parent")
            }
            name = self.settings.model or next(iter(models))
        if name not in models:
            raise UserError(f"{server.url} serves {excerpt(', '.join(models))}: set vllm.model to one of them")
        try:
            info = self.call(server, "GET", "/server_info?config_format=json", timeout_s=120)
        except ServerUnreachable:
            raise
        except ServerError:
            raise UserError(f"the vLLM server {server.url} does not accept weights: {DEVELOPMENT}") from None
        return ServedModel(name, models[name], self.field(info, "vllm_config", dict))

    def _check_vocabulary(self, server: Server) -> None:
        """The last token of the vocabulary must be accepted.

        A larger vocabulary is found by the first weight update, whose shapes differ: vLLM 0.24 does not reject tokens
        beyond the vocabulary, and one of them could end the server.
        """
        body = {"model": self.served[server.url].name, "prompt": [self.info.vocab_size - 1], "max_tokens": 1}
        try:
            self.call(server, "POST", COMPLETIONS, body, timeout_s=120)
        except ServerError as error:
            if isinstance(error, ServerUnreachable) or "vocabulary" not in str(error):
                raise
            raise UserError(
                f"the vLLM server {server.url} serves another model: its vocabulary is smaller than the policy's "
                f"{self.info.vocab_size} tokens; start it with the model of model.source"
            ) from None

    def _prepare(self) -> None:
        """Also resumes servers that an earlier run has left paused or asleep."""
        if self._asleep():
            self.call_all("POST", "/wake_up")
        self.call_all("POST", *self.resume)
        super()._prepare()

    # -- requests

    def _name(self, server: Server) -> str:
        """Of the model. Only the main rank has checked servers that came later, which serve what the others serve."""
        served = self.served.get(server.url) or next(iter(self.served.values()))
        return served.name

    def _body(self, server: Server, job: Job, sample: int, drawn: Sequence[int]) -> dict[str, Any]:
        params = job.request.params
        body: dict[str, Any] = {
            "model": self._name(server),
            "prompt": [*job.tokens, *drawn],
            **self._sampling(job, drawn),
            "top_k": params.top_k,
            "ignore_eos": True,  # end tokens are among the stop tokens
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
        }
        if params.temperature and self.settings.seeds:
            body["seed"] = sample_seed(job.request.seed, sample, len(drawn))
        return body

    def _part(self, answer: Any, job: Job) -> SampledPart:
        with self.reading("no token ids or no log-probabilities (vLLM 0.24 or later is needed)"):
            (choice,) = answer["choices"]
            ids, logprobs = choice["token_ids"] or [], (choice["logprobs"] or {}).get("token_logprobs") or []
            reason = str(choice["finish_reason"])
        if reason not in FINISH and reason != "abort":
            raise self.garbage(f"the finish reason {excerpt(reason, 30)!r}")
        return SampledPart(ids, logprobs, FINISH.get(reason), interrupted=reason == "abort")

    async def _prompt_scores(self, server: Server, ids: list[int]) -> list[float]:
        body = {"model": self._name(server), **prompt_body(ids)}
        answer = await self.post(server, COMPLETIONS, body, tokens=len(ids))
        with self.reading("no log-probabilities of the prompt"):
            return prompt_scores(answer, ids)

    # -- weights

    def update_weights(self, source: WeightSource, version: int) -> None:
        super().update_weights(source, version)
        if not self.updated:  # only now the names of the weights on both sides are known
            self.updated = True
            able = replace(self.info.capabilities, fingerprint=self.digests() is not None)
            self.info = replace(self.info, capabilities=able)

    def _publish(self, weights: Weights, version: int) -> None:
        names: set[str] = set()

        def recorded() -> Weights:
            for name, weight in weights:
                names.add(name)
                yield name, weight

        super()._publish(recorded(), version)
        self.published = names

    def _allocate(self, *tags: str) -> None:
        for tag in tags if self.asleep else ():
            self.call_all("POST", f"/wake_up?tags={tag}")

    def digests(self) -> dict[str, str] | None:
        """Digest of each served weight by its Hugging Face name; None if a server cannot compute them.

        If servers differ, the digests of one that differs from the first.
        """
        return self.ranks.on_main(self._digests)

    def _digests(self) -> dict[str, str] | None:
        if not self._all_extended():
            return None
        results = self.rpc("assay_digests")
        if any(len(workers) != 1 or not is_digests(workers[0]) for workers in results):
            return None
        first: dict[str, str] = results[0][0]
        if set(first) != self.published:
            return None  # another architecture, whose names in vLLM differ
        return next((workers[0] for workers in results if workers[0] != first), first)

    def fingerprint(self) -> str | None:
        digests = self.digests() if self.info.capabilities.fingerprint else None
        return None if digests is None else digest_of(digests)

    # -- how weights get into the servers

    def _sharing_obstacle(self, device: torch.device) -> str:
        if device.type != "cuda":
            return "vllm.transport = 'ipc' needs a GPU: use 'folder'"
        if not self._all_extended():
            return f"vllm.transport = 'ipc' needs servers with --worker-extension-cls {EXTENSION}: use 'folder'"
        with self.reading("no description of its GPU"):
            gpus = {str(worker["uuid"]) for answer in self.rpc("assay_gpu") for worker in answer}
        same = gpus == {gpu_of(device)}
        return "" if same else "transport 'ipc' needs servers on the trainer's GPU: use 'folder' or 'nccl'"

    def _all_extended(self) -> bool:
        return all(served.has_extension for served in self.served.values())

    def _load_folder(self, folder: str, version: int) -> None:
        def body(server: Server) -> dict[str, Any]:
            extended = self.served[server.url].has_extension
            method, name = ("assay_load_folder", "folder") if extended else ("reload_weights", "weights_path")
            return {"method": method, "kwargs": {name: folder}}

        self.call_all("POST", "/collective_rpc", body)

    def _send_shared(self, transport: IpcTransport, weights: Weights, version: int) -> None:
        first = True
        for buffer, layout in transport.chunks(weights):
            for server in self.servers:
                arguments = {"chunk": {**layout, "handle": ipc_handle(buffer)}, "first": first}
                self.call(server, "POST", "/collective_rpc", {"method": "assay_load_shared", "kwargs": arguments})
            first = False
        self.rpc("assay_finish_loading")
        torch.cuda.ipc_collect()

    def _group_request(self, place: dict[str, Any], transport: NcclTransport) -> tuple[str, Any]:
        return "/init_weight_transfer_engine", {"init_info": place}

    def _update_request(self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int) -> Any:
        return "/update_weights", {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}

    def _broadcast(self, transport: NcclTransport, weights: Weights, version: int) -> None:
        self.call_all("POST", "/start_weight_update", {})
        super()._broadcast(transport, weights, version)
        self.call_all("POST", "/finish_weight_update", {})

    def rpc(self, method: str) -> list[list[Any]]:
        """Call a method of the extension on all servers; for each, the results of its workers."""
        answers = self.call_all("POST", "/collective_rpc", {"method": method})
        return [self.field(answer, "results", list) for answer in answers]

    # -- memory

    def _sleep(self) -> None:
        able = all(served.setting("model_config", "enable_sleep_mode") for served in self.served.values())
        if not able:
            raise UserError(
                "engine.sleep_while_training needs vLLM servers with --enable-sleep-mode, on GPUs: restart them with "
                "it, or switch the setting off"
            )
        self.call_all("POST", f"/sleep?level={self.settings.sleep_level}")
        self.weights_dropped = self.settings.sleep_level == 2

    def _wake(self) -> None:
        if self.weights_dropped:
            raise UserError("the weights were dropped by vllm.sleep_level = 2: update them before sampling, or use 1")
        if self._asleep():
            self.call_all("POST", "/wake_up")
        self.call_all("POST", *self.resume)

    def _asleep(self) -> bool:
        return any(self.field(answer, "is_sleeping", bool) for answer in self.call_all("GET", "/is_sleeping"))

    def _reset_prefix_cache(self) -> None:
        self.call_all("POST", "/reset_prefix_cache")


def encodable(name: str) -> str:
    """A name that a server returned, if it can be sent back."""
    name.encode()
    return name


def is_digests(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())


def check_served(served: ServedModel, url: str, max_length: int, dtype: torch.dtype, tied: bool) -> None:
    """Raise a `UserError` that says how to restart a server that does not fit. `tied`: whether the head is."""
    if tied and not served.has_extension and served.setting("device_config", "device") == "cpu":
        raise UserError(
            f"the vLLM server {url} runs on a CPU, where vLLM does not reload a tied head: restart it with "
            f"--worker-extension-cls {EXTENSION}, as docs/guides/vllm-sglang.md describes"
        )
    if served.max_length < max_length:
        raise UserError(
            f"the vLLM server {url} serves {served.max_length} tokens per sequence and the run needs {max_length}: "
            f"restart it with --max-model-len {max_length}, or set model.max_length = {served.max_length}"
        )
    if (mode := excerpt(str(served.setting("model_config", "logprobs_mode")), 40)) != "processed_logprobs":
        raise UserError(
            f"the vLLM server {url} has --logprobs-mode {mode}, which is before the temperature: restart it with "
            "--logprobs-mode processed_logprobs"
        )
    name = str(dtype).removeprefix("torch.")
    other = excerpt(str(served.setting("model_config", "dtype")), 40).removeprefix("torch.")
    if other != name:
        raise UserError(
            f"the vLLM server {url} computes in {other} and engine.dtype is {name}: set engine.dtype to {other}, or "
            f"restart the server with --dtype {name}"
        )
