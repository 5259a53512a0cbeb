"""A classification model behind the server: POST /classify with the format of vLLM.

The model runs in a process of its own. Sequences of requests that arrive while it computes are computed together.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from assay.config import HttpConfig
from assay.engine.base import EngineLoad
from assay.rewards.reward_model import (
    AT_ONCE,
    ModelInput,
    Outputs,
    ProcessBatches,
    RewardModelProcess,
    sigmoid,
    softmax,
)
from assay.server.app import unsupported, with_common_routes
from assay.server.protocol import ApiError, Fields, check_model, parse_inputs, parse_messages
from assay.server.server import make_http_server, nothing
from assay.server.service import LATENCY, PROMPT_TOKENS, HttpService, json_response
from assay.system.http_server import serve_until_stopped
from assay.system.spawn import WorkerDied, exit_reason
from assay.types import describe_error

BATCH_TOKENS = 16_384  # maximum tokens of a batch, with padding
FIELDS = {"model", "input", "messages", "use_activation"}
Result = tuple[Outputs, int]  # outputs, or why there are none; number of tokens


class ServedBatches(ProcessBatches):
    """The sequences of requests. Errors are answers to them."""

    def __init__(self, process: RewardModelProcess, max_tokens: int = 0) -> None:
        """`max_tokens`: per sequence; 0: what the model allows."""
        super().__init__(process, "classify", BATCH_TOKENS, max_tokens)

    async def compute(self, items: list[ModelInput]) -> Sequence[Result]:
        try:
            return await super().compute(items)
        except Exception as error:
            self._process.end()  # a process cannot continue after a CUDA error
            raise failure_of(error) from None

    def close(self) -> None:
        super().close()
        self._process.close()


def failure_of(error: Exception) -> ApiError:
    if isinstance(error, WorkerDied):
        reason = exit_reason(error.exit_code)
        return ApiError(503, f"the process of the model ended ({reason}); the next request starts it again")
    return ApiError(500, f"the model failed: {describe_error(error)}")


@dataclass(kw_only=True)
class ClassifyService(HttpService):
    """What the routes of a classification model need."""

    batches: ServedBatches
    info: Mapping[str, Any]  # of `RewardModelWorker.info`

    @property
    def max_length(self) -> int:
        return self.info["max_length"]

    async def state(self) -> tuple[EngineLoad, int]:
        return EngineLoad(*self.batches.sizes), 0

    def parse_body(self, tree: Mapping[str, Any]) -> tuple[list[ModelInput], bool]:
        """The items, and whether to return probabilities instead of the outputs of the model."""
        fields = Fields(tree)
        fields.check_known(FIELDS)
        check_model(fields, self.model)
        given = [name for name in ("input", "messages") if tree.get(name) is not None]
        if len(given) != 1:
            raise ApiError(400, "give either 'input' or 'messages'", "input")
        one_chat = given == ["messages"]
        items: Sequence[ModelInput] = (
            [parse_messages(tree["messages"])] if one_chat else parse_inputs(tree["input"], "input")
        )
        if len(items) > self.cfg.max_samples:
            raise ApiError(400, f"more than {self.cfg.max_samples} inputs: send fewer per request", "input")
        return list(items), fields.get("use_activation", bool, True)

    def answer(self, results: Sequence[Result], use_activation: bool) -> dict[str, Any]:
        data = [self._entry(index, results, use_activation) for index in range(len(results))]
        tokens = sum(count for _, count in results)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        head = {"id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return {**head, "model": self.model, "data": data, "usage": usage}

    def _entry(self, index: int, results: Sequence[Result], use_activation: bool) -> dict[str, Any]:
        where, outputs = f"input {index}: " if len(results) > 1 else "", results[index][0]
        if isinstance(outputs, str):
            raise ApiError(400, f"{where}{outputs}", "input")
        if not all(map(math.isfinite, outputs)):  # JSON has no such numbers
            raise ApiError(500, f"{where}the outputs of the model are not finite: {outputs}")
        probs = activated(outputs, self.info["activation"]) if use_activation else outputs
        label = self.info["labels"][max(range(len(outputs)), key=outputs.__getitem__)]
        return {"index": index, "label": label, "probs": probs, "num_classes": len(outputs)}


def activated(outputs: Sequence[float], activation: str) -> list[float]:
    """Probabilities of the labels."""
    if activation == "identity":
        return list(outputs)
    if activation == "sigmoid":
        return list(map(sigmoid, outputs))
    return softmax(outputs)


def make_classify_app(service: ClassifyService) -> Any:
    """The ASGI application of a classification model."""

    async def classify(request: HttpRequest) -> Response:
        started = time.perf_counter()
        items, use_activation = await service.parse(request, service.parse_body)
        with service.admitted(len(items)):
            answer = service.answer(await service.batches.submit(items), use_activation)
        service.metrics.add(PROMPT_TOKENS, answer["usage"]["prompt_tokens"])
        service.metrics.observe(LATENCY, time.perf_counter() - started)
        return json_response(answer)

    message = f"'{service.model}' is a classification model and generates no text: use POST /classify"
    generation = [unsupported(path, message) for path in ("/v1/completions", "/v1/chat/completions")]
    return with_common_routes([Route("/classify", classify, methods=["POST"]), *generation], service)


def serve_classifier(
    process: RewardModelProcess,
    cfg: HttpConfig,
    name: str,
    listener: socket.socket,
    on_ready: Callable[[], None] = nothing,
    on_stop: Callable[[], None] = nothing,
) -> None:
    """Serve until Ctrl-C or SIGTERM; must be called in the main thread."""

    async def run() -> None:
        batches, info = ServedBatches(process, cfg.max_prompt_tokens), process.call("info")
        service = ClassifyService(name, cfg, AT_ONCE + cfg.queue, batches=batches, info=info)
        try:
            server = make_http_server(make_classify_app(service), cfg, on_ready)
            await serve_until_stopped(server, listener, on_stop)
        finally:
            batches.close()

    asyncio.run(run())
