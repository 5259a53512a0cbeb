"""Generation with SGLang servers: given by URL, or started and stopped by this engine.

Requests go to /generate, with token ids in both directions. The endpoints and fields are those of SGLang 0.5.17.

SGLang reports the log-probability of a sampled token after bias and temperature and before truncation by top_k, top_p
and min_p, unless a server has SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment: then it is before the temperature.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from assay.config import SGLangConfig
from assay.engine.base import Capabilities, EngineOptions
from assay.engine.remote.http import Server, ServerError, ServerStale, ServerUnreachable
from assay.engine.remote.launch import SaveTokenizer
from assay.engine.remote.pausable import PausableEngine, SampledPart, sample_seed
from assay.engine.sequence import Job
from assay.integrations.sglang.servers import MARGIN, LaunchedSGLang
from assay.integrations.sglang.weights import SGLangSender, SGLangServer
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.spec import spec_to_hf
from assay.types import Finish, UserError, excerpt

GENERATE = "/generate"
LOWEST_TEMPERATURE = 1e-6  # SGLang samples greedily below
FORBIDDEN_BIAS = -1e9
NO_TOKEN = 2**31 - 1  # not in any vocabulary
IDLE_S = 60  # time limit for requests that were aborted to leave the batch
MEMORY = ["kv_cache", "weights"]  # what a sleep releases

CAPABILITIES = Capabilities(temperature_logprobs=True, truncated_logprobs=False, inflight_updates=True, score=True)


class SGLangEngine(PausableEngine):
    health_path = "/model_info"  # /health samples a token, which a server that is paused or sleeps cannot
    kind, section, path = "SGLang", "sglang", GENERATE
    pause, resume = ("/pause_generation", {"mode": "abort"}), ("/continue_generation", dict[str, Any]())
    launcher = LaunchedSGLang
    start_advice = "start an SGLang server there"

    def __init__(
        self,
        model: PolicyModel,
        settings: SGLangConfig | None = None,
        save_tokenizer: SaveTokenizer | None = None,
        **options: Any,
    ) -> None:
        """`options`: fields of `EngineOptions`. `save_tokenizer`: needed to start servers."""
        opts = EngineOptions(**options)
        self.settings = settings or SGLangConfig()
        self.architecture = architecture_of(model)
        self.served: dict[str, SGLangServer] = {}  # by URL
        self.sender: SGLangSender = SGLangSender(self, self.served)
        self.released: set[str] = set()  # memory that this process has released on the servers
        self.aborting: set[asyncio.Task] = set()
        super().__init__(model, self.settings, opts, CAPABILITIES, save_tokenizer)

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
        """Choose the transport, and continue servers that an earlier run has left paused."""
        self.call_all("POST", *self.resume)
        for server in self.servers:
            self._check_vocabulary(server)
        device, dtype = torch.device(self.options.device), self.options.dtype
        started = self.launched is not None and not self.settings.devices  # on the trainer's GPU
        self.transport = self.sender.choose_transport(self.settings, device, dtype, self.size, started)

    def _check_vocabulary(self, server: Server) -> None:
        """The vocabulary is in the message with which SGLang rejects a token for `token_ids_logprob`.

        It does not reject tokens of prompts that are not in its vocabulary.
        """
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "token_ids_logprob": [NO_TOKEN]}
        try:
            self.call(server, "POST", GENERATE, body, timeout_s=120)
        except ServerUnreachable:
            raise
        except ServerError as error:
            size = re.search(r"\[0, (\d+)\)", str(error))
            if size is None:
                raise
            if int(size[1]) != self.info.vocab_size:
                raise UserError(
                    f"the SGLang server {server.url} serves another model: its vocabulary has {size[1]} tokens, and "
                    f"the policy's {self.info.vocab_size}; start it with the model of model.source"
                ) from None

    # -- requests

    def _body(self, server: Server, job: Job, sample: int, drawn: Sequence[int]) -> dict[str, Any]:
        params = job.request.params
        if 0 < params.temperature < LOWEST_TEMPERATURE:
            raise UserError(f"SGLang has no temperatures between 0 and {LOWEST_TEMPERATURE}: {params.temperature:g}")
        limit = job.limit - len(drawn)
        # All of them: otherwise the preferred sampling parameters of the server apply.
        sampling: dict[str, Any] = {
            "n": 1,
            "max_new_tokens": limit,
            "min_new_tokens": min(limit, max(0, params.min_new_tokens - len(drawn))),
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,  # it would also ignore the stop tokens
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.forbidden_token_ids:
            sampling["logit_bias"] = {str(token): FORBIDDEN_BIAS for token in params.forbidden_token_ids}
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

    async def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        if temperature != 1.0:
            raise UserError("SGLang scores given tokens at temperature 1 only")

        async def score(sequence: Sequence[int]) -> list[float]:
            ids = [int(token) for token in sequence]
            sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            answer = await self.post(server, GENERATE, body, tokens=len(ids))
            with self.reading("no log-probabilities of the prompt"):
                rows = answer["meta_info"]["input_token_logprobs"]
                clipped = [0 if token == self.info.vocab_size - 1 else token for token in ids]  # by SGLang 0.5.17
                if [row[1] for row in rows] not in (ids, clipped):
                    raise ValueError
                return [row[0] for row in rows[1:]]

        return await asyncio.gather(*map(score, sequences))

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
    theirs = [excerpt(str(one), 40) for one in served.model.get("architectures") or []]
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
