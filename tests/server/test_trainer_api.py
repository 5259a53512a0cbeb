"""The endpoints of the trainer: exact numbers, weight updates, fingerprints; disabled unless allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve_parts import NAME, RunningServer, byte_tokenizer, metric_of, save_folder, serving, tiny_model

from assay.engine import Finished, Request, SamplingParams, TokenChunk, generate, make_engine
from assay.engine.base import Failed
from assay.engine.remote.wire import IDS, event_from_json, pack, request_to_json

PROMPT = byte_tokenizer().encode("Ann has 7 coins.")


@pytest.fixture(scope="module")
def updatable() -> Iterator[RunningServer]:
    with serving(http={"allow_updates": True}) as running:
        yield running


def events(server: RunningServer, request: Request) -> list[Any]:
    answer = httpx.post(f"{server.url}/engine/generate", json=request_to_json(request), timeout=60)
    assert answer.status_code == 200
    return [event_from_json(json.loads(line), 0) for line in answer.text.splitlines()]


def local_engine(seed: int = 0) -> Any:
    return make_engine("native", tiny_model(seed), device="cpu", dtype=torch.float32)


def test_the_endpoints_are_disabled_by_default(server: RunningServer) -> None:
    for path in ("info", "fingerprint"):
        answer = httpx.get(f"{server.url}/engine/{path}")
        assert answer.status_code == 403 and "--allow-updates" in answer.json()["error"]["message"]
    for path in ("generate", "weights", "sleep", "wake", "reset_prefix_cache"):
        assert httpx.post(f"{server.url}/engine/{path}", json={}).status_code == 403


def test_info_describes_the_engine(updatable: RunningServer) -> None:
    info = httpx.get(f"{updatable.url}/engine/info").json()
    assert (info["model"], info["max_length"], info["dtype"]) == (NAME, 256, "float32")
    assert info["vocab_size"] == byte_tokenizer().vocab_size
    assert info["capabilities"]["exact_seeds"] and not info["capabilities"]["handles"]


def test_streams_are_those_of_the_engine_bit_by_bit(updatable: RunningServer) -> None:
    """tests/engine/remote/test_assay.py compares whole completions and scores, and updates weights."""
    request = Request(PROMPT, SamplingParams(n=3, max_new_tokens=20, temperature=0.7, top_k=9), seed=-5, stream=True)
    ((*expected,),) = generate(local_engine(), [request])
    received = events(updatable, request)
    finished = {event.sample: event.completion for event in received if isinstance(event, Finished)}
    assert [finished[sample] for sample in range(3)] == expected
    chunks = [event for event in received if isinstance(event, TokenChunk) and event.sample == 1]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected[1].token_ids


def test_tokens_of_the_trainer_are_counted(updatable: RunningServer) -> None:
    names = ("assay_prompt_tokens_total", "assay_generated_tokens_total")
    before = [metric_of(updatable.url, name) for name in names]
    events(updatable, Request(PROMPT, SamplingParams(n=3, max_new_tokens=5, min_new_tokens=5), seed=0))
    after = [metric_of(updatable.url, name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [len(PROMPT), 15]


def test_invalid_requests_are_answered_in_one_line(updatable: RunningServer) -> None:
    (failed,) = events(updatable, Request([10**6], SamplingParams(), 0))
    assert isinstance(failed, Failed) and "outside the vocabulary" in failed.error
    for path, body in [
        ("generate", {}),
        ("generate", {"seed": 0, "prompt_ids": pack([1], IDS), "params": {"temperature": 10**400}}),
        ("generate", {"seed": 0, "prompt_ids": pack([1], IDS), "batch": ["a", 2, 2]}),
        ("score", {"sequences": [pack([1], IDS)], "temperature": 10**400}),
        ("weights", {"path": 5_000 * "a"}),
        ("score", {"sequences": [5]}),
        ("score", {"sequences": [pack([1], IDS)], "temperature": 0}),
        ("weights", {}),
        ("weights", {"path": "/nowhere"}),
        ("weights", {"transport": "pigeon"}),
        ("weights", {"path": ".", "version": -1}),
    ]:
        answer = httpx.post(f"{updatable.url}/engine/{path}", json=body, timeout=60)
        assert answer.status_code == 400, (path, body)
        assert "\n" not in answer.json()["error"]["message"]


def test_weights_are_replaced_while_a_request_runs(tmp_path: Path) -> None:
    model = tiny_model(0, 2048)
    request = Request(PROMPT, SamplingParams(max_new_tokens=1500), seed=4, stream=True)
    body = {"transport": "folder", "path": str(save_folder(model, tmp_path)), "version": 3}
    with serving(model, http={"allow_updates": True}) as server, httpx.Client(timeout=60) as client:
        url, fields = f"{server.url}/engine/generate", request_to_json(request)
        with client.stream("POST", url, json=fields) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert httpx.post(f"{server.url}/engine/weights", json=body, timeout=60).status_code == 200
            *_, last = (event_from_json(json.loads(line), 0) for line in lines)
    assert isinstance(last, Finished)
    assert [version for version, _ in last.completion.versions] == [0, 3]


def test_web_pages_of_other_origins_cannot_change_the_engine(updatable: RunningServer) -> None:
    foreign = [{"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "cross-site"}]
    with httpx.Client(base_url=updatable.url, timeout=60) as client:
        for name in ("sleep", "wake", "reset_prefix_cache", "weights"):
            for headers in (*foreign, {"Origin": "null", "Content-Type": "text/plain"}):
                assert client.post(f"/engine/{name}", headers=headers).status_code == 403
