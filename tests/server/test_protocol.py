"""Requests: defaults, limits, and input that is wrong in every way; the endpoints of the tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
import torch
from serve_parts import NAME, RunningServer, byte_tokenizer, renderer

from assay.config import HttpConfig
from assay.engine.base import Capabilities, EngineInfo
from assay.server.protocol import ApiError, RequestParser, parse_object

INFO = EngineInfo(0, 256, 8, torch.float32, Capabilities(), vocab_size=byte_tokenizer().vocab_size)
PARSER = RequestParser(renderer(), INFO, HttpConfig(max_samples=8), NAME, True)
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_defaults_are_those_of_the_api() -> None:
    completion = PARSER.completion({"prompt": "Hello"})
    params = completion.params
    assert (params.n, params.temperature, params.top_p, params.max_new_tokens, params.stop) == (1, 1.0, 1.0, 16, ())
    assert completion.seed != PARSER.completion({"prompt": "Hello"}).seed
    assert not completion.stream and not completion.logprobs
    alternatives = [PARSER.completion({"prompt": "a", "logprobs": n}).top_logprobs for n in (None, 0, 1, 2, 20)]
    assert alternatives == [0, 0, 0, 2, 20]
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
    ({"prompt": ""}, "empty"),
    ({"prompt": [[]]}, "'prompt' must be"),
    ({"prompt": [10**30]}, "outside the vocabulary"),
    ({"prompt": "a" * 256}, "the maximum is 255"),
    ({"prompt": ["a"] * 9}, "more than 8 prompts"),
    ({"prompt": ["a"] * 5, "n": 2}, "10 answers are more than 8"),
    ({"prompt": "a", "n": True}, "'n' must be an integer"),
    ({"prompt": "a", "max_tokens": 1000}, "exceed the maximum of 256"),
    ({"prompt": "a", "temperature": -0.1}, "'temperature' must be"),
    ({"prompt": "a", "temperature": 1e-30}, "greedy"),
    ({"prompt": "a", "stop": [""]}, "'stop' must be"),
    ({"prompt": "a", "stop": ["x"] * 17}, "'stop' may have"),
    ({"prompt": "a", "stop_token_ids": [10**9]}, "'stop_token_ids' must be"),
    ({"prompt": "a", "stream": "yes"}, "'stream' must be true or false"),
    ({"prompt": "a", "stream_options": []}, "'stream_options' must be an object"),
    ({"prompt": "a", "logprobs": 2, "stream": True}, "('logprobs') are not supported in a stream"),
    ({"prompt": "a", "top_logprobs": 2}, "'top_logprobs' is not supported"),
    ({"prompt": "a", "tempratur": 1}, "unknown field 'tempratur'"),
    ({"prompt": "a", "model": "gpt-4"}, "does not exist"),
]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs': true"),
    ({"top_logprobs": 21, "logprobs": True}, "'top_logprobs' must be an integer from 0 to 20"),
    ({"top_logprobs": 2, "logprobs": True, "stream": True}, "('top_logprobs') are not supported in a stream"),
    ({"messages": None}, "'messages' must be"),
    ({"messages": [3]}, "must be an object"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "'messages[0].role' must be one of"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'messages[0].content' must be"),
    ({"messages": [{"role": "user", "content": [None]}]}, "'messages[0].content' must be"),
]


def test_wrong_requests_are_rejected_with_one_line() -> None:
    for tree, message in BAD_COMPLETIONS:
        with pytest.raises(ApiError, match=re.escape(message)) as raised:
            PARSER.completion(tree)
        assert raised.value.status in (400, 404) and "\n" not in raised.value.message
    for tree, message in BAD_CHATS:
        with pytest.raises(ApiError, match=re.escape(message)):
            PARSER.chat_completion({"messages": MESSAGES, **tree})


@pytest.mark.filterwarnings("ignore:a prompt, a solution")
def test_special_tokens_in_messages_are_text() -> None:
    (ids,) = PARSER.chat_completion({"messages": [{"role": "user", "content": "<|im_end|>"}]}).prompts
    (expected,) = PARSER.chat_completion({"messages": [{"role": "user", "content": "x"}]}).prompts
    end = byte_tokenizer().encode("<|im_end|>")
    assert ids.count(end[0]) == expected.count(end[0]) and len(end) == 1


def test_bodies_that_are_no_json_objects_are_rejected() -> None:
    long = (b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}")
    for body in (b"", b"[]", b'{"a": NaN}', b'{"a": Infinity}', b"\xff\xfe{}", b'{"prompt": "\xe6"}', *long):
        with pytest.raises(ApiError) as raised:
            parse_object(body)
        error = json.loads(raised.value.body)["error"]
        assert raised.value.status == 400 and error["type"] == "invalid_request_error" and error["message"]


def test_a_default_system_message_is_replaced_by_the_clients() -> None:
    text = renderer()
    text.system = "Be brief."
    parser = RequestParser(text, INFO, HttpConfig(), NAME, has_chat=True)
    (default,) = parser.chat_completion({"messages": MESSAGES}).prompts
    assert "Be brief." in byte_tokenizer().decode(default, skip_special=False)
    own = [{"role": "system", "content": "Be long."}, *MESSAGES]
    (given,) = parser.chat_completion({"messages": own}).prompts
    assert "Be long." in byte_tokenizer().decode(given) and "brief" not in byte_tokenizer().decode(given)


def test_lone_surrogates_are_accepted() -> None:
    tree = parse_object(b'{"prompt": "\\ud800", "stop": "\\udc00"}')
    assert PARSER.completion(tree).prompts == [byte_tokenizer().encode("?")]


# The endpoints of the tokenizer


def test_the_tokenizer_is_served(server: RunningServer) -> None:
    def ask(path: str, body: Any = None) -> httpx.Response:
        url = f"{server.url}/{path}"
        return httpx.get(url) if body is None else httpx.post(url, json=body)

    info = ask("tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and info["chat_template"] and info["model_max_length"] == 256
    for text in ("Ann has 7 coins.", 'né "木"\n', "<|im_end|>", ""):
        tokens = ask("tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert tokens == byte_tokenizer().encode(text) and ask("detokenize", {"tokens": tokens}).json() == {
            "prompt": text
        }
    chat = ask("tokenize", {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True}).json()
    assert chat["count"] == len(chat["tokens"]) == len(chat["token_strs"]) and chat["token_strs"][0] == "<|im_start|>"
    for path, body, message in (
        ("tokenize", {}, "give either 'prompt'"),
        ("tokenize", {"prompt": "a", "tokens": []}, "unknown field 'tokens'"),
        ("detokenize", {"tokens": [10**9]}, "token ids below"),
        ("detokenize", {"tokens": "a"}, "token ids below"),
        ("detokenize", {"model": "other", "tokens": []}, "does not exist"),
    ):
        answer = ask(path, body)
        assert answer.status_code in (400, 404) and message in answer.json()["error"]["message"]
