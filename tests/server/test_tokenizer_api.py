"""The endpoints of the tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
from serve_parts import RunningServer, byte_tokenizer


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
