from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from assay.engine.base import Capabilities, EngineInfo, Request, SamplingParams
from assay.engine.sequence import FORBIDDEN_SLOTS, STOP_SLOTS, Job, display_name, job_for
from assay.types import UserError


def request(tokens: Sequence[int] = (1, 2, 3), name: str = "", **params: Any) -> Request:
    return Request(tokens, SamplingParams(**params), seed=0, name=name)


def job_of(submitted: Request, before: Sequence[int] = (), can_decode: bool = False, vocabulary: int = 200) -> Job:
    info = EngineInfo(0, 100, 8, torch.float32, Capabilities(), vocab_size=vocabulary)
    return job_for(submitted, 4, before, info, can_decode)


def test_error_messages_use_the_request_name_or_id() -> None:
    assert display_name(request(), 4) == job_of(request()).name == "request 4"
    assert display_name(request(name="gsm8k/7"), 4) == job_of(request(name="gsm8k/7")).name == "request 'gsm8k/7'"


def test_job_tokens_start_with_the_kept_sequence_and_limit_ends_at_max_length() -> None:
    submitted = request([5, 6], max_new_tokens=50)
    assert job_of(submitted) == Job(4, submitted, [5, 6], 50)
    assert job_of(submitted, [1] * 60).tokens == [1] * 60 + [5, 6]
    assert job_of(submitted, [1] * 60).limit == 38
    assert job_of(request([]), [1, 2]).tokens == [1, 2]
    assert job_of(request([7] * 99)).limit == 1


@pytest.mark.parametrize(
    ("submitted", "before", "message"),
    [
        (request(n=0), [], "samples must be at least 1, not 0"),
        (request(temperature=-0.5), [], "temperature must be 0"),
        (request(temperature=float("nan")), [], "temperature must be 0"),
        (request(top_k=-1), [], "top_k must be 0"),
        (request(top_p=0.0), [], "top_p must be above 0"),
        (request(top_p=1.5), [], "top_p must be above 0"),
        (request(min_p=1.5), [], "min_p must be between 0"),
        (request(max_new_tokens=0), [], "max_new_tokens must be at least 1, not 0"),
        (request(min_new_tokens=-1), [], "min_new_tokens must be 0 or more"),
        (request(stop=("",)), [], "a stop string is empty"),
        (request([]), [], "the prompt is empty .0 tokens; the context has 100."),
        (request([1] * 100), [], "the prompt has 100 tokens, and the context has 100"),
        (request([1] * 40), [1] * 60, "the prompt has 100 tokens, and the context has 100"),
        (request([3, -1]), [], "outside the vocabulary of 200"),
        (request([3, 200]), [], "outside the vocabulary of 200"),
        (request(stop=("x",)), [], "stop strings need an engine with a"),
        (request(stop_token_ids=tuple(range(STOP_SLOTS + 1))), [], "17 stop tokens are more than the maximum of 16"),
        (
            request(forbidden_token_ids=tuple(range(FORBIDDEN_SLOTS + 1))),
            [],
            "65 forbidden tokens are more than the maximum of 64",
        ),
        (request(forbidden_token_ids=(3, 200)), [], "a forbidden token is outside the vocabulary of 200"),
        (request(forbidden_token_ids=(-1,)), [], "a forbidden token is outside the vocabulary of 200"),
        (request(stop_token_ids=(200,), min_new_tokens=1), [], "a stop token is outside the vocabulary of 200"),
    ],
)
def test_invalid_requests_raise_an_error_with_the_request_name(
    submitted: Request, before: list[int], message: str
) -> None:
    with pytest.raises(UserError, match=f"^request 4: .*{message}"):
        job_of(submitted, before)
    named = Request(submitted.prompt_ids, submitted.params, seed=0, name="the odd one")
    with pytest.raises(UserError, match=f"^request 'the odd one': .*{message}"):
        job_of(named, before)


def test_unusual_but_valid_requests_are_accepted() -> None:
    most = tuple(range(STOP_SLOTS))
    for submitted in (
        request(stop_token_ids=most * 2),
        request(stop_token_ids=(*most, 50), forbidden_token_ids=(50,)),  # never sampled, so it needs no slot
        request(forbidden_token_ids=tuple(range(FORBIDDEN_SLOTS)) * 2),
        request(stop=("x",)),
        request(stop_token_ids=(200,)),  # never sampled
        request(max_new_tokens=3, min_new_tokens=9),
    ):
        job = job_of(submitted, can_decode=True)
        assert list(job.tokens) == [1, 2, 3] and job.limit == min(submitted.params.max_new_tokens, 97)


def test_at_least_one_token_must_be_allowed() -> None:
    for forbidden, stops, shortest in (((0, 1, 2, 3), (), 0), ((0, 1), (2, 3), 1), ((), (0, 1, 2, 3), 1)):
        params: dict[str, Any] = {"forbidden_token_ids": forbidden, "stop_token_ids": stops, "min_new_tokens": shortest}
        with pytest.raises(UserError, match=r"^request 4: every token of the vocabulary is forbidden"):
            job_of(request(**params), vocabulary=4)
    job_of(request(forbidden_token_ids=(0, 1), stop_token_ids=(2, 3)), vocabulary=4)
    job_of(request(forbidden_token_ids=(0, 1), stop_token_ids=(1, 2), min_new_tokens=1), vocabulary=4)
