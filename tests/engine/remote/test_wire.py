"""Requests and events survive JSON with every bit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.engine.base import Failed, Finished, Request, SamplingParams, TokenChunk
from assay.engine.remote.wire import WireError, event_from_json, event_to_json, request_from_json, request_to_json
from assay.types import Completion, Finish

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SEEDS = st.integers(-(1 << 63), (1 << 63) - 1)
VERSIONS = st.integers(0, (1 << 63) - 1)
HUGE = 10**400  # larger than any float


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**31 - 1)), SEEDS, FINITE, st.text(max_size=20), st.booleans())
def test_requests_are_the_same_after_json(ids: list[int], seed: int, number: float, text: str, stream: bool) -> None:
    params = SamplingParams(
        n=3, temperature=number, top_k=5, top_p=0.1, min_p=1 / 3, stop_token_ids=(1, 2), stop=(text,)
    )
    request = Request(ids, params, seed, name=text, stream=stream)
    assert request_from_json(json.loads(json.dumps(request_to_json(request)))) == request


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), FINITE, FINITE), min_size=2), st.floats(0, 1), VERSIONS)
def test_events_are_the_same_after_json(tokens: list[tuple[int, float, float]], number: float, version: int) -> None:
    ids, engine, sampling = ([row[column] for row in tokens] for column in range(3))
    spans = ((version, 1), (3, len(tokens) - 1))
    completion = Completion(ids, engine, sampling, Finish.LENGTH, version, number, None, version_spans=spans)
    same = Completion(ids, engine, list(engine), Finish.STOP, version, None, number)
    for event in (Finished(7, 2, completion), Finished(7, 0, same), TokenChunk(7, 1, ids, engine), Failed(7, "broken")):
        assert event_from_json(json.loads(json.dumps(event_to_json(event))), 7) == event


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "1"}, "'seed' must be"),
        ({"seed": HUGE}, "'seed' must be"),
        ({"name": 3}, "'name' a text"),
        ({"params": []}, "'params' must be an object"),
        ({"params": {"heat": 1}}, "unknown sampling parameter 'heat'"),
        ({"params": {"n": 1.5}}, "'n' must be an integer"),
        ({"params": {"n": True}}, "'n' must be an integer"),
        ({"params": {"temperature": "1"}}, "'temperature' must be a number"),
        ({"params": {"top_p": math.nan}}, "'top_p' must be a number"),
        ({"params": {"temperature": HUGE}}, "'temperature' must be a number"),
        ({"params": {"stop_token_ids": [HUGE]}}, "'stop_token_ids' must be a list"),
        ({"params": {"stop": "x"}}, "'stop' must be a list"),
        ({"params": {"stop_token_ids": ["x"]}}, "'stop_token_ids' must be a list"),
        ({"prompt_ids": [1, 2]}, "an array is not base64"),
        ({"prompt_ids": "AAA"}, "an array is not base64"),
        ({"prompt_ids": "é"}, "an array is not base64"),
    ],
)
def test_damaged_requests_are_rejected(changes: dict[str, Any], message: str) -> None:
    tree = request_to_json(Request([1], SamplingParams(), 0)) | changes
    with pytest.raises(WireError, match=message):
        request_from_json(tree)


@pytest.mark.parametrize("tree", [None, 3, [], {}, {"sample": 0}, {"sample": 0, "ids": "AAAA", "logprobs": "AA=="}])
def test_damaged_events_are_rejected(tree: Any) -> None:
    with pytest.raises(WireError):
        event_from_json(tree, 0)


INVALID = {
    "sample": ["0", -1, 1.5, HUGE],
    "finish": [["stop"], "tired"],
    "version": ["3", -1, math.inf, HUGE, True],
    # Not a list of pairs, not positive, another version than that of the first token, more tokens than there are.
    "version_spans": [None, [[3]], [["3", 2]], [[3, -1], [4, 3]], [[3, 0], [4, 2]], [[4, 1], [5, 1]], [[3, 1], [4, 2]]],
    "kept_mass": ["1", [0.5], math.nan, -0.1, 1.1, HUGE],
    "entropy": ["1", {}, math.nan, math.inf, -0.1, HUGE],
    "sampling_logprobs": [[0.0]],
}


def test_completions_with_invalid_fields_are_rejected() -> None:
    valid = Completion([1, 2], [-1.0, -2.0], [0.0, 0.0], Finish.STOP, 3, 0.5, 1.5, version_spans=((3, 1), (4, 1)))
    tree = json.loads(json.dumps(event_to_json(Finished(0, 0, valid))))
    assert event_from_json(tree, 0) == Finished(0, 0, valid)
    for name, values in INVALID.items():
        for value in values:
            with pytest.raises(WireError):
                pytest.fail(f"{name} = {value!r} gave {event_from_json(tree | {name: value}, 0)}")
