"""Generation with SGLang servers: given by URL, or started and stopped by this engine.

Requests go to /generate, with token ids in both directions. Endpoints and fields follow SGLang 0.5.17.

SGLang reports the log-probability of a sampled token after bias and temperature and before truncation by top_k, top_p
and min_p, unless a server has SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment: then it is before the temperature.

Experimental: weights through NCCL have never been sent, because that needs two GPUs.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from assay.config import SGLangConfig
from assay.engine.remote.http import Server, ServerError, ServerStale, ServerUnreachable
from assay.engine.remote.launch import LaunchedServers, plain_environment
from assay.engine.remote.pausable import PausableEngine, SampledPart, Weights, sample_seed
from assay.engine.remote.server_side import gpu_of
from assay.engine.remote.transport import IpcTransport, NcclTransport
from assay.engine.sequence import Job
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.spec import spec_to_hf
from assay.system.program import write_object
from assay.types import Finish, UserError, excerpt

GENERATE = "/generate"
NO_TOKEN = 2**31 - 1  # not in any vocabulary
IDLE_S = 60  # time limit for requests that were aborted to leave the batch
MEMORY = ["kv_cache", "weights"]  # what a sleep releases

MARGIN = 16  # tokens of the context that SGLang does not use: whole sequences are sent as prompts, to be scored
GROUP = "assay_weights"  # name of the process group of trainer and servers


@dataclass(frozen=True)
class SGLangServer:
    """What a server reports about itself."""

    info: dict[str, Any]  # /server_info: its arguments, by name, and more
    model: dict[str, Any]  # /model_info

    @property
    def max_prompt(self) -> int:
        """Prompts must be shorter."""
        return int(self.info["max_req_input_len"])

    @property
    def workers(self) -> int:
        return int(self.info.get("tp_size") or 1) * int(self.info.get("pp_size") or 1)


class LaunchedSGLang(LaunchedServers):
    kind, section = "SGLang", "sglang"

    def _check(self, model: PolicyModel) -> None:
        self.python = self._interpreter()
        if "--config" in self.settings.args:
            raise UserError(
                "sglang.args has --config, and assay starts servers with one: list its settings in sglang.args"
            )

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        return [self.python, "-m", "sglang.launch_server", *self._arguments(port, max_length)]

    def _arguments(self, port: int, max_length: int) -> list[str]:
        options, settings = self.options, self.settings
        arguments = {
            "config": str(self._write_key(port)),
            "model-path": str(self.model_folder),
            "served-model-name": "policy",
            "host": self.host,
            "port": str(port),
            "dtype": str(options.dtype).removeprefix("torch."),
            "load-format": "dummy",
            "context-length": str(max_length + MARGIN),
            "max-running-requests": str(options.max_batch),
            "mem-fraction-static": str(settings.gpu_memory),
        }
        if options.prefill_tokens:
            arguments["chunked-prefill-size"] = str(options.prefill_tokens)
        flags = []
        if torch.device(options.device).type == "cuda":
            arguments["cuda-graph-max-bs-decode"] = str(options.max_batch)
            if options.sleep_while_training:
                flags += ["--enable-memory-saver", *(["--enable-weights-cpu-backup"] if settings.keep_weights else [])]
        else:
            arguments["device"] = "cpu"
        if settings.deterministic:
            flags.append("--enable-deterministic-inference")
        return [*(part for name, value in arguments.items() for part in (f"--{name}", value)), *flags, *settings.args]

    def _write_key(self, port: int) -> Path:
        """A file that only this user can read: other users can see arguments. The key protects all but /health."""
        self.key_file = self.folder / f"access-{port}.yaml"
        write_object(self.key_file, {"api-key": self.key})  # JSON is YAML
        return self.key_file

    def _environment(self, index: int) -> dict[str, str]:
        environment = {
            **plain_environment(),
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the margin
            "HF_HUB_OFFLINE": "1",
        }
        return environment | self._visible_devices(index)


class GroupTransport(NcclTransport):
    """Broadcasts from this process to the workers of all servers, in a process group of torch.

    Never run with SGLang: it needs a second GPU. The tests join with another process on CPUs (gloo).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, host: str) -> None:
        super().__init__(device, dtype, host)
        self.store: dist.Store | None = dist.TCPStore(host, self.port, None, True, wait_for_workers=False)
        limit = dist.distributed_c10d.default_pg_timeout
        self.client = dist.TCPStore(host, self.port, None, False, limit, wait_for_workers=False)

    def connect(self, world_size: int) -> None:
        self.communicator = weight_group(self.client, 0, world_size, self.backend)

    def abort(self) -> None:
        self.store = None  # ends the wait for other processes in `connect`
        if self.communicator is not None:
            self.communicator.abort()

    def broadcast(self, chunk: Any) -> None:
        for _, tensor in chunk:
            dist.broadcast(tensor, group=self.communicator, group_src=0)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def weight_group(store: dist.Store, rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
    """A process group beside the default one, with processes that are not in the default one.

    torch has no public function for it. SGLang's workers make theirs with the same calls, and keys of the store must be
    the same on both ends.
    """
    from torch.distributed import distributed_c10d as c10d

    limit = c10d.default_pg_timeout
    keys = c10d.PrefixStore(GROUP, store)
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(backend), keys, group_name=c10d.GroupName(GROUP), timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


class SGLangEngine(PausableEngine):
    health_path = "/model_info"  # /health samples a token, which a server that is paused or sleeps cannot
    kind, section, path = "SGLang", "sglang", GENERATE
    pause, resume = ("/pause_generation", {"mode": "abort"}), ("/continue_generation", dict[str, Any]())
    length_fields, forbidden_bias = ("max_new_tokens", "min_new_tokens"), -1e9
    lowest_temperature = 1e-6  # SGLang samples greedily below
    settings_type, launcher = SGLangConfig, LaunchedSGLang
    start_advice, group_transport = "start an SGLang server there", GroupTransport

    def __init__(self, model: PolicyModel, *arguments: Any, **options: Any) -> None:
        self.architecture = architecture_of(model)
        self.released: set[str] = set()  # memory that this process has released on the servers
        self.aborting: set[asyncio.Task] = set()
        super().__init__(model, *arguments, **options)

    # -- start

    def _check_server(self, server: Server) -> None:
        """Without requests for samples: a server that an earlier run has left paused would not answer them."""
        info, model = (self.call(server, "GET", path, timeout_s=60) for path in ("/server_info", "/model_info"))
        self.field(info, "max_req_input_len", int)
        served = SGLangServer(info, model)
        with self.reading("a description of another form (SGLang 0.5.17 was tested)"):
            if served.workers < 1:
                raise ValueError("a server has at least one worker")
            check_served(served, server.url, self.info.max_length, self.options.dtype, self.architecture)
        self.served[server.url] = served

    def _join(self, server: Server) -> None:
        self.call(server, "POST", *self.resume)
        self._check_vocabulary(server)
        if self.released:
            self.call(server, "POST", *self.pause)
            self.call(server, "POST", "/release_memory_occupation", {"tags": sorted(self.released)})

    def _prepare(self) -> None:
        """Also continues servers that an earlier run has left paused."""
        self.call_all("POST", *self.resume)
        for server in self.servers:
            self._check_vocabulary(server)
        super()._prepare()

    def _check_vocabulary(self, server: Server) -> None:
        """The vocabulary is in the message with which SGLang rejects a token for `token_ids_logprob`.

        It does not reject tokens of prompts that are not in its vocabulary.
        """
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "token_ids_logprob": [NO_TOKEN]}
        try:
            self.call(server, "POST", GENERATE, body, timeout_s=120)
        except ServerError as error:
            size = re.search(r"\[0, (\d+)\)", str(error))
            if size is None or isinstance(error, ServerUnreachable):
                raise
            if int(size[1]) != self.info.vocab_size:
                raise UserError(
                    f"the SGLang server {server.url} serves another model: its vocabulary has {size[1]} tokens, and "
                    f"the policy's {self.info.vocab_size}; start it with the model of model.source"
                ) from None

    # -- requests

    def _body(self, server: Server, job: Job, sample: int, drawn: Sequence[int]) -> dict[str, Any]:
        params = job.request.params
        sampling = {
            "n": 1,
            **self._sampling(job, drawn),
            "top_k": params.top_k or -1,
            "ignore_eos": not params.stop_token_ids,  # it would also ignore the stop tokens
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.temperature:
            # The noise is a function of seed and position. It has an effect with deterministic inference only.
            sampling["sampling_seed"] = sample_seed(job.request.seed, sample, 0)
        return {
            "input_ids": [*job.tokens, *drawn],
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,  # of sampled tokens only
            "top_logprobs_num": 0,
            "stream": False,
        }

    async def _ask(self, server: Server, body: dict[str, Any], tokens: int) -> Any:
        """A request whose sample is aborted is also aborted on the server, which notices closed connections late."""
        rid = uuid.uuid4().hex  # not the beginning of another one: SGLang aborts all that begin with it
        try:
            return await self.post(server, GENERATE, {**body, "rid": rid}, tokens=tokens)
        except asyncio.CancelledError:
            task = asyncio.ensure_future(self._abort(server, rid))
            self.aborting.add(task)
            task.add_done_callback(self.aborting.discard)
            raise

    async def _abort(self, server: Server, rid: str) -> None:
        with suppress(ServerError):  # the closed connection has the same effect
            await self.post(server, "/abort_request", {"rid": rid}, timeout_s=30)

    def _part(self, answer: Any, job: Job) -> SampledPart:
        """From the log-probabilities, which have all tokens: a stop string can be missing among the output ids."""
        with self.reading("no finish reason or no log-probabilities (SGLang 0.5.17 was tested)"):
            meta = answer["meta_info"]
            reason, rows = meta["finish_reason"], meta.get("output_token_logprobs") or []
            ids, logprobs = [row[1] for row in rows], [row[0] for row in rows]
            kind, matched = reason["type"], reason.get("matched")
        if kind == "length":
            return SampledPart(ids, logprobs, Finish.LENGTH)
        if kind == "stop":
            # The end tokens of the server's model also end a request; if the run has others, it continues.
            foreign = isinstance(matched, int) and matched not in job.request.params.stop_token_ids
            return SampledPart(ids, logprobs, None if foreign and ids else Finish.STOP)
        if kind != "abort":
            raise self.garbage(f"the finish reason {excerpt(str(kind), 30)!r}")
        return SampledPart(ids, logprobs, None, interrupted=True)

    def _check_version(self, server: Server, answer: Any, version: int) -> None:
        reported = answer["meta_info"].get("weight_version", str(version))
        if reported == "default" or (str(reported).isdecimal() and int(reported) < version):
            raise ServerStale(
                f"{server.url} has sampled with weights of version {reported}, not {version}: it was restarted, or "
                "another run uses it"
            )

    async def _prompt_scores(self, server: Server, ids: list[int]) -> list[float]:
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = await self.post(server, GENERATE, body, tokens=len(ids))
        with self.reading("no log-probabilities of the prompt"):
            rows = answer["meta_info"]["input_token_logprobs"]
            clipped = [0 if token == self.info.vocab_size - 1 else token for token in ids]  # by SGLang 0.5.17
            if [row[1] for row in rows] not in (ids, clipped):
                raise ValueError
            return [row[0] for row in rows[1:]]

    # -- how weights get into the servers

    def _sharing_obstacle(self, device: torch.device) -> str:
        if device.type != "cuda":
            return "sglang.transport = 'ipc' needs a GPU: use 'folder'"
        if any(served.workers > 1 for served in self.served.values()):
            return "sglang.transport = 'ipc' needs servers with one worker each: use 'folder'"
        settings, launched = self.settings, self.launched
        share_gpu = launched is not None and not (launched.elsewhere or settings.devices)  # on the trainer's GPU
        return "" if share_gpu or settings.transport == "ipc" else "servers may be on other GPUs"

    def _load_folder(self, folder: str, version: int) -> None:
        body = {"model_path": folder, "load_format": "auto", **self._options(version)}
        for answer in self.call_all("POST", "/update_weights_from_disk", body):
            self._check_update(answer)

    def _send_shared(self, transport: IpcTransport, weights: Weights, version: int) -> None:
        for buffer, layout in transport.chunks(weights):
            for server in self.servers:
                payload = shared_bucket(buffer, layout)  # each may be opened once
                body = {"load_format": "flattened_bucket", **self._options(version)}
                body["serialized_named_tensors"] = [base64.b64encode(payload).decode()]
                self._check_update(self.call(server, "POST", "/update_weights_from_tensor", body))
        if transport.device.type == "cuda":
            torch.cuda.ipc_collect()

    def _group_request(self, place: dict[str, Any], transport: NcclTransport) -> tuple[str, Any]:
        return "/init_weights_update_group", {**place, "group_name": GROUP, "backend": transport.backend}

    def _update_request(self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int) -> Any:
        layout = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}
        return "/update_weights_from_distributed", layout | self._options(version)

    def _options(self, version: int) -> dict[str, Any]:
        return {"flush_cache": False, "weight_version": str(version)}

    def _check_update(self, answer: Any) -> None:
        if not self.field(answer, "success", bool):
            raise self.garbage("an update without success")

    # -- memory

    def _sleep(self) -> None:
        if not all(served.info.get("enable_memory_saver") for served in self.served.values()):
            raise UserError(
                "engine.sleep_while_training needs SGLang servers with --enable-memory-saver: restart them with it, "
                "or switch the setting off"
            )
        # SGLang ends if it has requests when it releases memory, or gets one afterwards; while it is paused, they wait.
        self.call_all("POST", *self.pause)
        self._reset_prefix_cache()
        self.call_all("POST", "/release_memory_occupation", {"tags": MEMORY})
        self.released = set(MEMORY)
        self.weights_dropped = not all(served.info.get("enable_weights_cpu_backup") for served in self.served.values())

    def _allocate(self, *tags: str) -> None:
        """Allocate memory that was released. SGLang ends if memory is to be resumed that was not released."""
        if wanted := [tag for tag in tags if tag in self.released]:
            self.call_all("POST", "/resume_memory_occupation", {"tags": wanted})
            self.released -= set(wanted)

    def _wake(self) -> None:
        if self.weights_dropped:
            raise UserError(
                "the servers have dropped their weights: update them before sampling, or start servers with "
                "--enable-weights-cpu-backup (sglang.keep_weights = true)"
            )
        self._allocate(*MEMORY)
        self.call_all("POST", *self.resume)

    async def _wake_servers(self) -> None:
        if self.ranks.world is not None:  # only the main rank knows what is released
            raise UserError("SGLang servers of several processes sleep: update weights or call wake before sampling")
        await super()._wake_servers()

    def _reset_prefix_cache(self) -> None:
        self.call_all("POST", f"/flush_cache?timeout={IDLE_S}", is_json=False)

    def close(self) -> None:
        if self.released and self.launched is None:
            with suppress(ServerError):  # the next run cannot find out that they sleep
                self._allocate(*MEMORY)
                self.call_all("POST", *self.resume, timeout_s=60)
        super().close()


def architecture_of(model: PolicyModel) -> str:
    """Its name in the config of the model; empty if it is unknown."""
    names = (
        spec_to_hf(model.spec)["architectures"]
        if isinstance(model, Decoder)
        else getattr(getattr(getattr(model, "hf", None), "config", None), "architectures", None)
    )
    return str(names[0]) if names else ""


def check_served(served: SGLangServer, url: str, max_length: int, dtype: torch.dtype, architecture: str) -> None:
    """Raise a `UserError` that says how to restart a server that does not fit."""
    theirs = [excerpt(str(served_name), 40) for served_name in served.model.get("architectures") or []]
    if architecture and theirs and architecture not in theirs:
        raise UserError(
            f"the SGLang server {url} serves another model ({theirs[0]}, and the policy is a {architecture}): start "
            "it with the model of model.source"
        )
    if served.max_prompt <= max_length:
        raise UserError(
            f"the SGLang server {url} accepts prompts of {served.max_prompt - 1} tokens, and the run needs sequences "
            f"of {max_length}: restart it with --context-length {max_length + MARGIN} (and more memory, if it still "
            f"accepts less), or set model.max_length = {served.max_prompt - 1}"
        )
    name = str(dtype).removeprefix("torch.")
    if (other := excerpt(str(served.info.get("dtype")), 40)) != name:
        raise UserError(
            f"the SGLang server {url} has --dtype {other} and engine.dtype is {name}: restart it with --dtype {name}, "
            "or change engine.dtype"
        )
    if int(served.info.get("dp_size") or 1) > 1 and not served.info.get("enable_dp_attention"):
        raise UserError(
            f"the SGLang server {url} has --dp-size above 1: start one server per GPU instead (sglang.urls)"
        )


class BucketPickler(pickle.Pickler):
    """Pickles CUDA tensors as handles that another process opens.

    The device is the identifier of the GPU, as SGLang expects, because indices differ between processes.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cuda":
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(value)
        return rebuild, (*arguments[:6], gpu_of(value.device), *arguments[7:])


def shared_bucket(buffer: Tensor, layout: Mapping[str, list[Any]]) -> bytes:
    """The weights in a buffer (see `IpcTransport.chunks`) in SGLang's format "flattened_bucket".

    SGLang reads attributes of the descriptions, so they need not be instances of its own class.
    """
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)
    descriptions = []
    for name, dtype_name, shape, start in zip(*layout.values(), strict=True):
        dtype, size = getattr(torch, dtype_name), torch.Size(shape)
        end = start + size.numel() * dtype.itemsize
        place = {"start_idx": start, "end_idx": end, "numel": end - start}
        descriptions.append(SimpleNamespace(name=name, shape=size, dtype=dtype, **place))
    stream = io.BytesIO()
    BucketPickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump({"flattened_tensor": buffer, "metadata": descriptions})
    return stream.getvalue()
