"""Log-probabilities of given tokens: by a model on a server, for reference models, and the comparison of two sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from assay.config import ReferenceServerConfig
from assay.engine.remote.wire import FLOATS, IDS, pack, unpack
from assay.engine.sequence import batches_of
from assay.system.openai_client import Endpoint
from assay.types import UserError, excerpt

TOKENS = 1 << 16  # per request, unless a sequence is longer
ROUNDING = 1e-3  # largest log-probability above 0: in float32, the rounding error of logits up to 1,000 is below 1e-4
LOWEST = -1e30  # log-probabilities of sampled tokens are larger


def logprob_problem(values: Any, count: int) -> str:
    """What is wrong with log-probabilities that a server returned; empty if there are `count` valid ones."""
    if not isinstance(values, list) or len(values) != count:
        return f"not one log-probability for each of {count} tokens"
    invalid = [value for value in values if type(value) not in (int, float) or not LOWEST < value <= ROUNDING]
    return f"the log-probability {excerpt(str(invalid[0]), 30)}, which is not a number up to 0" if invalid else ""


def rms_gap(scores: np.ndarray, others: np.ndarray) -> float:
    """The root mean square difference of two sides that score the same tokens."""
    return float(np.sqrt(np.mean(np.square(scores - others))))


def gap_problem(scores: np.ndarray, others: np.ndarray, limit: float) -> str:
    """What shows that two sides have different weights; empty if their difference is at most `limit`."""
    gap = rms_gap(scores, others)
    if gap <= limit:
        return ""
    return (
        f"the root mean square difference of their log-probabilities of probe tokens is {gap:.3g}, of which rounding "
        f"explains at most {limit:.3g}"
    )


class ScoringClient:
    """The model at `reference.url`. It must have the policy's tokenizer, which cannot be checked."""

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
        parts = await asyncio.gather(*(score(sequences[part]) for part in batches_of(sequences, TOKENS)))
        return [scores for part in parts for scores in part]

    async def _score_assay(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        body = {"sequences": [pack(ids, IDS) for ids in sequences], "temperature": self.temperature}
        return await self._ask("/engine/score", body, sequences, unpacked_scores)

    async def _score_vllm(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        async def score(sequence: Sequence[int]) -> list[float]:
            ids = [int(token) for token in sequence]
            path, body = "/v1/completions", prompt_body(ids)
            (scores,) = await self._ask(path, body, [ids], lambda answer: [prompt_scores(answer, ids)])
            return scores

        return await asyncio.gather(*map(score, sequences))

    async def _ask(
        self, path: str, body: Any, sequences: Sequence[Sequence[int]], parse: Callable[[Any], list[list[float]]]
    ) -> list[list[float]]:
        """The scores in an answer, if there is a valid log-probability for each token but the first."""
        answer = await self.endpoint.post(path, body)
        try:
            scores = parse(answer)
            valid = not any(logprob_problem(row, len(ids) - 1) for row, ids in zip(scores, sequences, strict=True))
        except (LookupError, TypeError, ValueError):
            valid = False
        if not valid:
            raise self.endpoint.garbage(path, answer, "valid log-probabilities for all tokens but the first")
        return scores


def prompt_body(ids: Sequence[int]) -> dict[str, Any]:
    """The request for the log-probabilities of given tokens to vLLM, at /v1/completions."""
    return {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


def prompt_scores(answer: Any, ids: Sequence[int]) -> list[float]:
    """The log-probabilities of all tokens but the first in an answer of vLLM."""
    rows = answer["choices"][0]["prompt_logprobs"]
    return [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)]


def unpacked_scores(answer: Any) -> list[list[float]]:
    """The log-probabilities in an answer of `assay serve`."""
    return [unpack(packed, FLOATS) for packed in answer["scores"]]
