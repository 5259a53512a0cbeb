"""An engine whose servers return tokens that depend on the request alone, for tests without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from engine_parts import small_decoder, small_spec
from http_parts import Answer, SmallServer, small_server
from torch import Tensor
from waiting import until as until

from assay.config import RemoteEngineConfig
from assay.engine.base import Capabilities, Request, SamplingParams
from assay.engine.remote.base import RemoteEngine, SampleBatch
from assay.engine.sequence import Job
from assay.types import Completion, Finish

POLICY = small_decoder(small_spec(max_length=32))
PARAMS = SamplingParams(n=3, max_new_tokens=4)


class EchoEngine(RemoteEngine):
    """A backend whose servers return tokens that depend on the prompt, the seed and the sample."""

    kind, section = "echo", "vllm"
    settings_type, capabilities = RemoteEngineConfig, Capabilities()

    def _check_servers(self) -> None:
        self.call_all("GET", "/health")

    def _prepare(self) -> None:
        """Its servers get the names of the weights only."""

    def _sharing_obstacle(self, device: torch.device) -> str:
        raise AssertionError("it has no transport")

    async def _sample(self, batch: SampleBatch) -> None:
        job, version = batch.job, self.info.version
        body = {"prompt": list(job.tokens), "seed": job.request.seed, "samples": list(batch.samples)}
        answer = await self.post(batch.server, "/generate", body, tokens=job.max_length)
        for sample, completion in zip(batch.samples, self._parse(answer, job, version), strict=True):
            batch.sent.finish(sample, completion)

    def _parse(self, response: Any, job: Job, version: int) -> list[Completion]:
        try:
            parts = [(one["ids"], one["logprobs"]) for one in response["completions"]]
        except (KeyError, TypeError):
            raise self.garbage("no completions") from None
        return [self._checked(Completion(ids, scores, scores, Finish.STOP, version), job) for ids, scores in parts]

    def _publish(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        names = [name for name, _ in weights]
        self.call_all("POST", "/weights", {"names": names, "version": version})

    def _sleep(self) -> None:
        self.call_all("POST", "/sleep")

    def _wake(self) -> None:
        self.call_all("POST", "/wake")


class WholeRequests(EchoEngine):
    splits_samples = False


def expected(prompt: Sequence[int], seed: int, sample: int) -> list[int]:
    return [(prompt[0] + seed) % 61, sample]


def echo(path: str, body: Any) -> Answer:
    if path != "/generate":
        return 200, {}
    parts = [expected(body["prompt"], body["seed"], sample) for sample in body["samples"]]
    return 200, {"completions": [{"ids": ids, "logprobs": [-0.5] * len(ids)} for ids in parts]}


def options(**changes: Any) -> dict[str, Any]:
    values = {"device": "cpu", "dtype": torch.float32, "decode": lambda ids: "".join(map(chr, ids))}
    return values | changes


@contextmanager
def engine_on(
    *answers: Callable[[str, Any], Answer], kind: type[EchoEngine] = EchoEngine, **settings: Any
) -> Iterator[tuple[EchoEngine, list[SmallServer]]]:
    """`settings`: of the section of the engine."""
    opts = settings.pop("options", options())
    values = {"health_timeout_s": 0, "recover_s": 0} | settings
    with ExitStack() as stack:
        servers = [stack.enter_context(small_server(answer)) for answer in answers or (echo,)]
        config = RemoteEngineConfig(urls=[server.url for server in servers], **values)
        engine = kind(POLICY, config, **opts)
        stack.callback(engine.close)
        yield engine, servers


def requests(count: int, **changes: Any) -> list[Request]:
    return [Request([one + 1, 2], replace(PARAMS, **changes), seed=7 * one) for one in range(count)]


def tokens(groups: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]
