"""Log-probabilities of prompts: `echo` and `prompt_logprobs`, compared with transformers; batches of many requests."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import torch
from serve_parts import NAME, RunningServer, byte_tokenizer, renderer, serving

from assay.config import HttpConfig
from assay.engine.base import Capabilities, EngineInfo
from assay.server.answers import offsets_in
from assay.server.protocol import MAX_SCORES, ApiError, RequestParser
from assay.server.service import token_texts
from assay.system.awaiting import SequenceBatches

PROMPTS = ["Ann has 7 coins.", 'né "木"\n', "a" * 90]
TOLERANCE = 1e-4
INFO = EngineInfo(0, 256, 8, torch.float32, Capabilities(), vocab_size=byte_tokenizer().vocab_size)


def ids_of(prompt: str) -> list[int]:
    return byte_tokenizer().encode(prompt)


def rows_of(reference: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens at the positions of all tokens but the first."""
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def scores_of(reference: Any, ids: list[int]) -> list[float]:
    return rows_of(reference, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def post(server: RunningServer, kind: str = "completions", **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.api}/{kind}", json={"model": NAME, "temperature": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("as_text", [True, False])
def test_echoed_logprobs_are_those_of_transformers(server: RunningServer, reference: Any, as_text: bool) -> None:
    client = openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)
    inputs: Any = PROMPTS if as_text else [ids_of(prompt) for prompt in PROMPTS]
    answer = client.completions.create(model=NAME, prompt=inputs, echo=True, logprobs=1, max_tokens=1, temperature=0)
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        ids, logprobs = ids_of(prompt), choice.logprobs
        assert logprobs is not None and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
        rows = rows_of(reference, ids)
        assert choice.text.startswith(prompt) and len(logprobs.tokens or ()) == len(ids) + 1
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:-1] == pytest.approx(scores_of(reference, ids), abs=TOLERANCE)
        assert [max(own.values()) for own in logprobs.top_logprobs[1:-1]] == pytest.approx(
            rows.max(-1).values.tolist(), abs=TOLERANCE
        )
        # As the harness decides whether a token is the most likely one.
        pairs = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
        greedy = [own == max(top.values()) for own, top in pairs]
        assert greedy[:-1] == (rows.argmax(-1) == torch.tensor(ids[1:])).tolist() and greedy[-1]
        offsets = logprobs.text_offset
        assert offsets[-1] == len(prompt) and offsets == sorted(offsets)
        if prompt.isascii():
            assert offsets == list(range(len(ids) + 1))
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(len(ids_of(prompt)) for prompt in PROMPTS)


def test_a_prompt_of_the_maximum_length_can_be_scored_without_an_answer(server: RunningServer, reference: Any) -> None:
    ids = (ids_of("Seven coins. ") * 40)[:256]
    answer = post(server, prompt=ids, echo=True, logprobs=0, max_tokens=0, n=2)
    for choice in answer["choices"]:
        assert choice["text"] == renderer().tokenizer.decode(ids, skip_special=False)
        assert choice["finish_reason"] == "length" and choice["logprobs"]["top_logprobs"] is None
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scores_of(reference, ids), abs=TOLERANCE)
    assert answer["usage"] == {"prompt_tokens": 256, "completion_tokens": 0, "total_tokens": 256}
    (choice,) = post(server, prompt="Hi", echo=True, max_tokens=0)["choices"]
    assert choice["text"] == "Hi" and choice["logprobs"] is None
    (choice,) = post(server, prompt=[5], echo=True, logprobs=3, max_tokens=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] and choice["logprobs"]["top_logprobs"] == [None]


def test_an_echoed_answer_is_the_answer_without_echo(server: RunningServer) -> None:
    body = {"prompt": PROMPTS[:2], "n": 2, "max_tokens": 6, "temperature": 0.8, "seed": 3, "logprobs": 4}
    plain, echoed = post(server, **body)["choices"], post(server, **body, echo=True)["choices"]
    for index, (one, both) in enumerate(zip(plain, echoed, strict=True)):
        prompt = PROMPTS[index // 2]
        start = len(ids_of(prompt))
        assert both["text"] == prompt + one["text"]
        for name in ("tokens", "token_logprobs"):
            assert both["logprobs"][name][start:] == one["logprobs"][name]
        assert both["logprobs"]["text_offset"][start:] == [len(prompt) + at for at in one["logprobs"]["text_offset"]]


def test_prompt_logprobs_have_the_format_of_vllm(server: RunningServer, reference: Any) -> None:
    (choice,) = post(server, prompt=PROMPTS[0], prompt_logprobs=2, max_tokens=1)["choices"]
    talk = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "return_token_ids": True}
    chat = post(server, "chat/completions", **talk, prompt_logprobs=2, max_tokens=2)
    assert "prompt_logprobs" not in chat["choices"][0] and choice["text"] != PROMPTS[0]
    given = [(ids_of(PROMPTS[0]), choice["prompt_logprobs"])]
    given.append((chat["choices"][0]["prompt_token_ids"], chat["prompt_logprobs"]))
    for ids, positions in given:
        rows = rows_of(reference, ids)
        assert len(positions) == len(ids) and positions[0] is None
        for token, row, entries in zip(ids[1:], rows, positions[1:], strict=True):
            order = row.argsort(descending=True).tolist()
            rank = order.index(token) + 1
            assert [*entries] == [*dict.fromkeys(map(str, (token, *order[:2])))]
            assert entries[str(token)]["rank"] == rank
            assert [entries[str(likely)]["rank"] for likely in order[:2]] == [1, 2]
            for key, entry in entries.items():
                assert entry["logprob"] == pytest.approx(float(row[int(key)]), abs=TOLERANCE)
                assert entry["decoded_token"] == token_texts(renderer())(int(key))


@pytest.mark.parametrize("text", ["plain", "né"])
def test_offsets_are_those_in_the_text_without_an_added_bos_token(text: str) -> None:
    (bos,) = byte_tokenizer().eos_ids[:1]
    decode = partial(byte_tokenizer().decode, skip_special=False)
    for before in ([], [bos]):
        ids = [*before, *ids_of(text)]
        offsets = offsets_in(text, ids, [decode([token]) for token in ids], decode)
        assert offsets == [0] * len(before) + ([0, 1, 2, 3, 4] if text == "plain" else [0, 1, 1])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"echo": True, "stream": True}, "'echo' is not supported in a stream"),
        ({"prompt_logprobs": 1, "stream": True}, "'prompt_logprobs' is not supported in a stream"),
        ({"prompt_logprobs": -1}, "'prompt_logprobs' must be an integer from 0 to 20"),
        ({"max_tokens": 0}, "'max_tokens' must be an integer from 1"),
        ({"echo": "yes"}, "'echo' must be true or false"),
        ({"prompt": [[1] * 255] * 128, "echo": True, "logprobs": 20, "n": 2, "max_tokens": 1}, "answers are more than"),
        ({"prompt": [[1] * 16_000] * 64, "echo": True, "logprobs": 1}, f"are more than {MAX_SCORES} per request"),
    ],
)
def test_unsupported_scoring_requests_are_rejected(tree: dict[str, Any], message: str) -> None:
    info = replace(INFO, max_length=20_000, capabilities=Capabilities(score=True))
    parser = RequestParser(renderer(), info, HttpConfig(), NAME, True)
    with pytest.raises(ApiError, match=message):
        parser.completion({"prompt": "a", **tree})


def test_an_engine_that_cannot_score_refuses_in_one_line() -> None:
    parser = RequestParser(renderer(), INFO, HttpConfig(), NAME, True)
    for fields in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}):
        with pytest.raises(ApiError, match="the engine computes no log-probabilities of prompts"):
            parser.completion({"prompt": "a", **fields})
    assert parser.completion({"prompt": "a", "echo": True}).echoed == ["a"]


def test_concurrent_scoring_requests_are_computed_together(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    prompts = [f"{number} squared is {number * number}" for number in range(60)]
    with serving() as server:
        compute = server.engine.top_logprobs

        def counted(sequences: Any, *args: Any) -> Any:
            calls.append(len(sequences))
            return compute(sequences, *args)

        monkeypatch.setattr(server.engine, "top_logprobs", counted)

        def scored(prompt: str) -> list[float]:
            (choice,) = post(server, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"]
            return choice["logprobs"]["token_logprobs"][1:-1]

        with ThreadPoolExecutor(30) as threads:
            results = [*threads.map(scored, prompts)]
    for prompt, result in zip(prompts, results, strict=True):
        assert result == pytest.approx(scores_of(reference, ids_of(prompt)), abs=TOLERANCE)
    assert sum(calls) == 60 and len(calls) < 45


class Lengths(SequenceBatches[str, int]):
    """Results are the lengths of texts. Batches wait for `go`."""

    def __init__(self) -> None:
        super().__init__(limit=10)
        self.batches: list[list[str]] = []
        self.go = asyncio.Event()

    def size(self, item: str) -> int:
        return len(item)

    async def compute(self, items: list[str]) -> list[int]:
        self.batches.append(items)
        await self.go.wait()
        if "bad" in items:
            raise ValueError("bad")
        return [*map(len, items)]


def test_batches_have_a_size_limit_and_drop_cancelled_sequences() -> None:
    async def run() -> None:
        batches = Lengths()
        first, long, gone, bad, rest = (
            asyncio.ensure_future(batches.submit(items))
            for items in (["a", "bb"], ["e" * 12], ["c", "dd"], ["bad"], ["f" * 8, "g", "h" * 6])
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        batches.go.set()
        assert await first == [1, 2] and await long == [12] and await rest == [8, 1, 6]
        with pytest.raises(ValueError, match="bad"):
            await bad
        assert batches.batches == [["a", "bb"], ["e" * 12], ["bad"], ["f" * 8, "g"], ["h" * 6]]
        assert batches.sizes == (0, 0)

    asyncio.run(run())
