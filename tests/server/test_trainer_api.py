"""The endpoints of the trainer: exact numbers, weight updates, fingerprints; disabled unless allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_parts import RunningServer, byte_tokenizer, metric_of, save_folder, serving, tiny_model

from assay.engine import Finished, Request, SamplingParams
from assay.engine.base import Failed
from assay.engine.remote.wire import IDS, event_from_json, pack, request_to_json
from assay.server.trainer_api import FolderWeights
from assay.types import UserError

PROMPT = byte_tokenizer().encode("Ann has 7 coins.")


@pytest.fixture(scope="module")
def updatable() -> Iterator[RunningServer]:
    with serving(http={"allow_updates": True}) as running:
        yield running


def events(server: RunningServer, request: Request) -> list[Any]:
    answer = httpx.post(f"{server.url}/engine/generate", json=request_to_json(request), timeout=60)
    assert answer.status_code == 200
    return [event_from_json(json.loads(line), 0) for line in answer.text.splitlines()]


def test_the_endpoints_are_disabled_by_default(server: RunningServer) -> None:
    for path in ("info", "fingerprint"):
        answer = httpx.get(f"{server.url}/engine/{path}")
        assert answer.status_code == 403 and "--allow-updates" in answer.json()["error"]["message"]
    for path in ("generate", "weights", "sleep", "wake", "reset_prefix_cache"):
        assert httpx.post(f"{server.url}/engine/{path}", json={}).status_code == 403


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
        ("score", {"sequences": [5]}),
        ("score", {"sequences": [pack([1], IDS)], "temperature": 0}),
        ("weights", {}),
        ("weights", {"path": "/nowhere"}),
        ("weights", {"path": ".", "version": -1}),
    ]:
        answer = httpx.post(f"{updatable.url}/engine/{path}", json=body, timeout=60)
        assert answer.status_code == 400, (path, body)
        assert "\n" not in answer.json()["error"]["message"]


def test_weights_are_replaced_while_a_request_runs(tmp_path: Path) -> None:
    model = tiny_model(0, 768)
    request = Request(PROMPT, SamplingParams(max_new_tokens=600), seed=4, stream=True)
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


def test_missing_and_damaged_weights_are_reported(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path, "do trainer and server share this folder"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(UserError, match=f"cannot read the weights .*{message}"):
            list(FolderWeights(str(folder)).weights())
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="cannot read the weights"):
        list(FolderWeights(str(tmp_path)).weights())
