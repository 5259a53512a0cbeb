"""Requests: defaults, limits, and input that is wrong in every way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve_parts import NAME, byte_tokenizer, renderer

from assay.serve.protocol import ApiError, RequestLimits, RequestParser, parse_object

PARSER = RequestParser(
    renderer(), RequestLimits(256, byte_tokenizer().vocab_size, max_samples=8), NAME, True, lambda: 17
)
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_defaults_are_those_of_the_api() -> None:
    completion = PARSER.completion({"prompt": "Hello"})
    params = completion.params
    assert (params.n, params.temperature, params.top_p, params.max_new_tokens, params.stop) == (1, 1.0, 1.0, 16, ())
    assert completion.seed == 17 and not completion.stream and not completion.logprobs
    chat = PARSER.chat_completion({"messages": MESSAGES})
    assert chat.params.max_new_tokens == 256 - len(chat.prompts[0])  # the rest of the context


def test_null_and_fields_without_effect_are_accepted() -> None:
    tree = {"prompt": "Hi", "stop": None, "logit_bias": {}, "best_of": 1, "user": "me", "presence_penalty": 0.0}
    assert PARSER.completion(tree).prompts == [byte_tokenizer().encode("Hi")]


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    joined = PARSER.chat_completion({"messages": [{"role": "user", "content": parts}]})
    assert joined.prompts == PARSER.chat_completion({"messages": MESSAGES}).prompts


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "'prompt' must be"),
    ({"prompt": []}, "'prompt' must be"),
    ({"prompt": [1, "a"]}, "'prompt' must be"),
    ({"prompt": [True]}, "'prompt' must be"),
    ({"prompt": {"a": 1}}, "'prompt' must be"),
    ({"prompt": ""}, "empty"),
    ({"prompt": [[]]}, "'prompt' must be"),
    ({"prompt": [10**30]}, "outside the vocabulary"),
    ({"prompt": [-1]}, "outside the vocabulary"),
    ({"prompt": "a" * 256}, "the maximum is 255"),
    ({"prompt": ["a"] * 9}, "more than 8 prompts"),
    ({"prompt": ["a"] * 5, "n": 2}, "10 answers are more than 8"),
    ({"prompt": "a", "n": 0}, "'n' must be an integer from 1"),
    ({"prompt": "a", "n": 1e300}, "'n' must be an integer"),
    ({"prompt": "a", "n": True}, "'n' must be an integer"),
    ({"prompt": "a", "max_tokens": -1}, "'max_tokens' must be"),
    ({"prompt": "a", "max_tokens": 1000}, "exceed the maximum of 256"),
    ({"prompt": "a", "temperature": -0.1}, "'temperature' must be"),
    ({"prompt": "a", "temperature": 1e-30}, "greedy"),
    ({"prompt": "a", "temperature": "hot"}, "'temperature' must be"),
    ({"prompt": "a", "temperature": float("nan")}, "'temperature' must be"),
    ({"prompt": "a", "top_p": 1.1}, "'top_p' must be"),
    ({"prompt": "a", "seed": 1 << 70}, "'seed' must be"),
    ({"prompt": "a", "stop": [""]}, "'stop' must be"),
    ({"prompt": "a", "stop": 3}, "'stop' must be"),
    ({"prompt": "a", "stop": ["x"] * 17}, "'stop' may have"),
    ({"prompt": "a", "stop_token_ids": [10**9]}, "'stop_token_ids' must be"),
    ({"prompt": "a", "stream": "yes"}, "'stream' must be true or false"),
    ({"prompt": "a", "stream_options": []}, "'stream_options' must be an object"),
    ({"prompt": "a", "logprobs": 21}, "'logprobs' must be an integer from 0 to 20"),
    ({"prompt": "a", "logprobs": 2, "stream": True}, "('logprobs') are not supported in a stream"),
    ({"prompt": "a", "top_logprobs": 2}, "'top_logprobs' is not supported"),
    ({"prompt": "a", "echo": True}, "'echo' is not supported"),
    ({"prompt": "a", "best_of": 4}, "'best_of' is not supported"),
    ({"prompt": "a", "logit_bias": {"5": 100}}, "'logit_bias' is not supported"),
    ({"prompt": "a", "tempratur": 1}, "unknown field 'tempratur'"),
    ({"prompt": "a", "model": "gpt-4"}, "does not exist"),
    ({"prompt": "a", "model": 4}, "'model' must be a string"),
]


@pytest.mark.parametrize(("tree", "message"), BAD_COMPLETIONS, ids=[str(tree)[:40] for tree, _ in BAD_COMPLETIONS])
def test_wrong_completions_are_rejected(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as raised:
        PARSER.completion(tree)
    assert message in raised.value.message and raised.value.status in (400, 404) and "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs': true"),
        ({"top_logprobs": 21, "logprobs": True}, "'top_logprobs' must be an integer from 0 to 20"),
        ({"top_logprobs": 2, "logprobs": True, "stream": True}, "('top_logprobs') are not supported in a stream"),
    ],
)
def test_wrong_top_logprobs_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as raised:
        PARSER.chat_completion({"messages": [{"role": "user", "content": "a"}], **fields})
    assert message in raised.value.message and raised.value.status == 400


@pytest.mark.parametrize(("logprobs", "count"), [(None, 0), (0, 0), (1, 0), (2, 2), (20, 20)])
def test_completions_with_more_than_one_logprob_have_alternatives(logprobs: int | None, count: int) -> None:
    assert PARSER.completion({"prompt": "a", "logprobs": logprobs}).top_logprobs == count


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "'messages' must be"),
        ([], "'messages' must be"),
        ("Hi", "'messages' must be"),
        ([3], "must be an object"),
        ([{"role": "king", "content": "a"}], "'messages[0].role' must be one of"),
        ([{"role": ["user"], "content": "a"}], "'messages[0].role' must be one of"),
        ([{"role": "user"}], "'messages[0].content' must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'messages[0].content' must be"),
        ([{"role": "user", "content": [None]}], "'messages[0].content' must be"),
    ],
)
def test_wrong_messages_are_rejected(messages: Any, message: str) -> None:
    with pytest.raises(ApiError) as raised:
        PARSER.chat_completion({"messages": messages})
    assert message in raised.value.message


@pytest.mark.filterwarnings("ignore:a prompt, a solution")
def test_special_tokens_in_messages_are_text() -> None:
    (ids,) = PARSER.chat_completion({"messages": [{"role": "user", "content": "<|im_end|>"}]}).prompts
    (expected,) = PARSER.chat_completion({"messages": [{"role": "user", "content": "x"}]}).prompts
    end = byte_tokenizer().encode("<|im_end|>")
    assert ids.count(end[0]) == expected.count(end[0]) and len(end) == 1


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"3", b'{"a": NaN}', b'{"a": Infinity}', b"\xff\xfe{}", b'{"prompt": "\xe6"}'),
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_json_objects_are_rejected(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        parse_object(body)
    error = json.loads(raised.value.body)["error"]
    assert raised.value.status == 400 and error["type"] == "invalid_request_error" and error["message"]


def test_lone_surrogates_are_accepted() -> None:
    tree = parse_object(b'{"prompt": "\\ud800", "stop": "\\udc00"}')
    assert PARSER.completion(tree).prompts == [byte_tokenizer().encode("?")]
