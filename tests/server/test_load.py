"""Many concurrent clients: no answer is lost, duplicated or given to another client."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any

import httpx
import pytest
import torch
from serve_parts import byte_tokenizer, metric_of, renderer, serving, tiny_model, until

from assay.engine import Request, SamplingParams, generate, make_engine

CLIENTS = 1000
PARAMS = SamplingParams(max_new_tokens=12, stop_token_ids=renderer().stop_token_ids)


async def ask(client: httpx.AsyncClient, prompt: str, seed: int) -> list[int]:
    """The token ids of the answer; every other client asks for a stream."""
    stream = seed % 2 == 0
    fields = {"prompt": prompt, "seed": seed, "max_tokens": 12, "stream": stream, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=fields)).raise_for_status()
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["token_ids"]
    *lines, last = [line for line in answer.text.splitlines() if line]
    assert last == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert [bool(choice["finish_reason"]) for choice in choices] == [False] * (len(choices) - 1) + [True]
    return [token for choice in choices for token in choice.get("token_ids", [])]


@pytest.mark.slow
def test_a_thousand_concurrent_requests_get_their_own_answers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))  # both ends are in this process
    prompts = [f"{number:04d}: {number * number}" for number in range(CLIENTS)]
    engine = make_engine("native", tiny_model(), device="cpu", dtype=torch.float32)
    requests = [Request(byte_tokenizer().encode(prompt), PARAMS, seed) for seed, prompt in enumerate(prompts)]
    expected = [one.token_ids for (one,) in generate(engine, requests)]
    assert len(set(map(tuple, expected))) > 0.95 * CLIENTS  # so that mixed up answers would be noticed

    async def all_at_once(url: str) -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(ask(client, prompt, seed) for seed, prompt in enumerate(prompts)))

    with serving() as server:
        answers = asyncio.run(all_at_once(server.url))
        wrong = [prompt for prompt, ours, theirs in zip(prompts, answers, expected, strict=True) if ours != theirs]
        assert not wrong, f"{len(wrong)} answers differ, e.g. that to {wrong[0]}"
        until(lambda: metric_of(server.url, "assay_kv_blocks_used") == 0)
        for name in ("assay_active_samples", "assay_running_sequences", "assay_waiting_requests"):
            assert metric_of(server.url, name) == 0
        assert metric_of(server.url, 'assay_requests_total{endpoint="completions",status="200"}') == CLIENTS
