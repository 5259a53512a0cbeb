"""Log-probabilities of given tokens by a server: those of the model itself, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from http_parts import Answer, small_server
from serve_parts import serving, tiny_model

from assay.config import ReferenceServerConfig
from assay.engine.remote import scoring
from assay.engine.remote.scoring import ScoringClient
from assay.types import UserError

SEQUENCES = [[5, 9, 200, 31, 7], [8, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def by_the_model(ids: list[int], temperature: float = 1.0) -> list[float]:
    """Of each token but the first, by a plain softmax."""
    model = tiny_model()
    with torch.no_grad():
        logits = model.unembed(model.hidden(torch.tensor(ids), [len(ids)])) / temperature
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


@contextmanager
def client(url: str, temperature: float = 1.0, **settings: Any) -> Iterator[ScoringClient]:
    one = ScoringClient(ReferenceServerConfig(url=url, retries=0, **settings), temperature)
    try:
        yield one
    finally:
        one.endpoint.close()


@pytest.mark.parametrize("tokens", [6, 1 << 16])  # several requests, and one
def test_scores_of_assay_serve_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(scoring, "TOKENS", tokens)
    with serving() as server, client(server.url, 0.7) as one:
        for own, ids in zip(one.score(SEQUENCES), SEQUENCES, strict=True):
            assert own == pytest.approx(by_the_model(ids, 0.7), abs=1e-5)
        with pytest.raises(UserError, match="256"):  # the context
            one.score([[1] * 300])


@contextmanager
def vllm_standin(answer: Callable[[list[int]], Any]) -> Iterator[ScoringClient]:
    """`answer`: the entry `prompt_logprobs` for a prompt."""

    def complete(path: str, body: Any) -> Answer:
        assert path == "/v1/completions" and body["prompt_logprobs"] == 0 and body["max_tokens"] == 1
        return 200, {"choices": [{"prompt_logprobs": answer(body["prompt"])}]}

    with small_server(complete) as server, client(server.url, server="vllm") as one:
        yield one


def as_vllm(ids: list[int]) -> list[Any]:
    return [None, *({str(token): {"logprob": one}} for token, one in zip(ids[1:], by_the_model(ids), strict=True))]


def test_scores_of_vllm_are_read() -> None:
    with vllm_standin(as_vllm) as one:
        assert one.score(SEQUENCES) == [by_the_model(ids) for ids in SEQUENCES]


@pytest.mark.parametrize(
    "answer",
    [
        lambda ids: None,
        lambda ids: as_vllm(ids)[:-1],
        lambda ids: [None, *({str(token): {"logprob": 0.5}} for token in ids[1:])],
        lambda ids: [None, *({str(token): {"logprob": "0"}} for token in ids[1:])],
        lambda ids: [None, *({str(token): {"logprob": float("nan")}} for token in ids[1:])],
        lambda ids: [None, *({"x": {"logprob": -1.0}} for _ in ids[1:])],
    ],
    ids=["none", "too few", "positive", "text", "not finite", "other tokens"],
)
def test_answers_without_log_probabilities_are_errors(answer: Callable[[list[int]], Any]) -> None:
    with vllm_standin(answer) as one, pytest.raises(UserError, match="log-probabilit"):
        one.score(SEQUENCES)
