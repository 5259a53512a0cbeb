"""What servers and trainer exchange: weights, requests and events to the last bit, and scores of given tokens."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parts import small_decoder, small_spec
from http_parts import Answer, small_server
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_parts import serving, tiny_model

from assay.config import ReferenceServerConfig
from assay.engine.base import Failed, Finished, Request, SamplingParams, TokenChunk
from assay.engine.remote import scoring, transport
from assay.engine.remote.scoring import ScoringClient
from assay.engine.remote.server_side import weights_of_buffer, weights_of_folder
from assay.engine.remote.transport import FolderTransport, IpcTransport, fast_folder
from assay.engine.remote.wire import WireError, event_from_json, event_to_json, request_from_json, request_to_json
from assay.models.fingerprint import digests
from assay.types import Completion, Finish, UserError

POLICY = small_decoder(small_spec("qwen2"))


def test_weights_of_a_killed_process_are_removed_and_those_of_a_living_one_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MEMORY_FOLDER", str(tmp_path))
    code = (
        f"from assay.engine.remote import transport; transport.MEMORY_FOLDER = {str(tmp_path)!r}\n"
        "kept = transport.FolderTransport(); (kept.folder / 'weights-3').mkdir()\n"
        "print(kept.folder, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        folder = Path(other.stdout.readline().strip())
        assert folder.parent == tmp_path
        own = FolderTransport()
        assert (folder / "weights-3").exists()
        other.kill()
        other.wait()
    second = FolderTransport()
    assert not folder.exists() and own.folder.exists() and second.folder.exists()
    own.close()
    second.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 10**9])
def test_a_folder_holds_every_weight_in_the_dtype_of_the_server(tmp_path: Path, shard_bytes: int) -> None:
    transport = FolderTransport(tmp_path / "new", torch.bfloat16, shard_bytes=shard_bytes)
    expected = {name: weight.bfloat16() for name, weight in POLICY.weights()}
    with transport.written(POLICY.weights(), 3) as folder:
        saved = dict(weights_of_folder(folder))
        assert saved.keys() == expected.keys()
        assert all(saved[name].dtype == torch.bfloat16 and saved[name].equal(expected[name]) for name in expected)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_weight_that_is_overwritten_while_files_are_written_is_saved_as_it_was(tmp_path: Path) -> None:
    buffer = torch.empty(1000)

    def weights():
        for value in range(20):
            yield f"w{value}", buffer.fill_(value)  # as a gather into one buffer

    with FolderTransport(tmp_path, shard_bytes=4000).written(weights(), 0) as folder:
        assert all(bool((tensor == int(name[1:])).all()) for name, tensor in weights_of_folder(folder))


def test_a_temporary_folder_is_removed_at_the_end() -> None:
    transport = FolderTransport()
    with transport.written(POLICY.weights(), 0) as folder:
        assert folder.parent == transport.folder
    transport.close()
    assert not transport.folder.exists()
    assert fast_folder(10**18) is None


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with (
        pytest.raises(UserError, match=r"cannot write weights to .*: free some space, or choose another folder"),
        FolderTransport(file).written(POLICY.weights(), 0),
    ):
        pass


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="do trainer and server share this folder"):
        next(weights_of_folder(tmp_path))


@pytest.mark.parametrize("chunk_bytes", [256, 10_000, 10**7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_a_buffer_hold_all_weights(chunk_bytes: int, dtype: torch.dtype) -> None:
    chunks = IpcTransport(torch.device("cpu"), dtype, chunk_bytes).chunks(POLICY.weights())
    received = dict(pair for buffer, layout in chunks for pair in weights_of_buffer(buffer, layout))
    assert digests(received.items()) == digests(POLICY.weights(), dtype)


# Requests and events as JSON


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


# Log-probabilities of given tokens


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
