"""Log-probabilities of given tokens by a model on a server, for reference models. The server is not changed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.config import ReferenceServerConfig
from assay.endpoint import Endpoint
from assay.engine.remote.assay.wire import FLOATS, IDS, pack, unpack
from assay.types import UserError

TOKENS = 1 << 16  # per request, unless a sequence is longer
ROUNDING = 1e-3  # by which a log-probability may be above 0


class ScoringClient:
    """The model at `reference.url`. Its tokenizer must be that of the policy, which cannot be checked."""

    def __init__(self, settings: ReferenceServerConfig, temperature: float) -> None:
        if settings.server == "vllm" and temperature != 1.0:
            raise UserError(
                f"vLLM computes log-probabilities of given tokens at temperature 1 only, and sampling.temperature is "
                f"{temperature:g}: serve the reference with `assay serve`, or set sampling.temperature = 1"
            )
        self.settings, self.temperature = settings, temperature
        self.endpoint = Endpoint(settings, "reference", root=True)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of all tokens but the first of each sequence, as `Engine.score`."""
        return self.endpoint.loop.call(self._score(sequences))

    async def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        score = self._score_assay if self.settings.server == "assay" else self._score_vllm
        parts = await asyncio.gather(*(score(part) for part in batches(sequences)))
        return [scores for part in parts for scores in part]

    async def _score_assay(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        path, body = "/engine/score", {"sequences": [pack(one, IDS) for one in sequences]}
        answer = await self.endpoint.post(path, {**body, "temperature": self.temperature})
        try:
            scores = [unpack(one, FLOATS) for one in answer["scores"]]
        except (LookupError, TypeError, ValueError):
            raise self.endpoint.garbage(path, answer, "log-probabilities") from None
        return self._checked(path, answer, scores, sequences)

    async def _score_vllm(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await asyncio.gather(*map(self._score_one, sequences))

    async def _score_one(self, sequence: Sequence[int]) -> list[float]:
        path, ids = "/v1/completions", [int(token) for token in sequence]
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self.endpoint.post(path, body)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            scores = [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)]
        except (LookupError, TypeError, ValueError):
            raise self.endpoint.garbage(path, answer, "log-probabilities of the prompt") from None
        return self._checked(path, answer, [scores], [ids])[0]

    def _checked(
        self, path: str, answer: Mapping[str, Any], scores: list[list[float]], sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """The scores, if there is one valid log-probability for each token but the first of each sequence."""
        if [len(one) for one in scores] != [len(ids) - 1 for ids in sequences]:
            raise self.endpoint.garbage(path, answer, "log-probability for each token but the first")
        for value in (value for one in scores for value in one):
            if type(value) not in (int, float) or not math.isfinite(value) or value > ROUNDING:
                raise self.endpoint.garbage(path, answer, "valid log-probabilities")
        return scores


def batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Parts with at most `TOKENS` tokens; a longer sequence is a part of its own."""
    part: list[Sequence[int]] = []
    size = 0
    for sequence in sequences:
        if part and size + len(sequence) > TOKENS:
            yield part
            part, size = [], 0
        part.append(sequence)
        size += len(sequence)
    if part:
        yield part
