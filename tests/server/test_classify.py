"""A classification model behind the server: outputs, errors, batches, and a process that dies."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_tree import descendants, table
from reward_model_parts import LocalWorker, ids_of, save_classifier, transformers_logits
from serve_parts import RunningServer, command

from assay.config import HttpConfig, JudgeConfig
from assay.rewards.reward_model import RewardModelJudge, RewardModelProcess, activation_of
from assay.server.classify import ClassifyService, ServedBatches, activated, make_classify_app
from assay.types import Prompt, Status

NAME = "reward"
QUESTION = {"role": "user", "content": "what is two plus two"}
TALKS = [[QUESTION, {"role": "assistant", "content": answer}] for answer in ("four", "five", "very very nice four")]
TEXTS = ["two plus two", "bad", "the answer is very very good"]
Send = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"), labels=3)


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[RewardModelProcess]:
    """Computes in this process; the last test has a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardModelProcess, "_start", lambda process: LocalWorker(*process._load))
        yield RewardModelProcess(str(folder), "cpu")


@pytest.fixture(scope="module")
def logits(folder: Path) -> list[list[float]]:
    return transformers_logits(folder, TALKS)


class FakeProcess(RewardModelProcess):
    """Outputs are the numbers of tokens. The first call waits for `go`."""

    def __init__(self) -> None:
        super().__init__("fake", "cpu")
        self.go, self.calls, self.ended = threading.Event(), list[list[Any]](), 0
        self.error: Exception | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(list(arguments[0]))
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return [([float(len(ids))], len(ids)) for ids in arguments[0]]

    def end(self) -> None:
        self.ended += 1


INFO = {"labels": ["LABEL_0"], "activation": "sigmoid", "max_length": 32}


def served(process: RewardModelProcess, work: Callable[[Send], Awaitable[Any]], capacity: int = 4096) -> Any:
    """Call `work` with a function that sends requests to the application."""
    info = INFO if isinstance(process, FakeProcess) else process.call("info")

    async def run() -> Any:
        batches = ServedBatches(process, max_tokens=24)
        service = ClassifyService(NAME, HttpConfig(max_samples=8), capacity, batches=batches, info=info)
        transport = httpx.ASGITransport(make_classify_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def send(body: Any = None, path: str = "/classify") -> httpx.Response:
                return await (client.get(path) if body is None else client.post(path, json=body))

            return await work(send)

    return asyncio.run(run())


def posted(process: RewardModelProcess, body: Any, path: str = "/classify", capacity: int = 4096) -> httpx.Response:
    return served(process, lambda send: send(body, path), capacity)


def outputs_of(process: RewardModelProcess, **body: Any) -> list[list[float]]:
    answer = posted(process, {"model": NAME, "use_activation": False, **body})
    assert answer.status_code == 200, answer.text
    return [entry["probs"] for entry in answer.json()["data"]]


def approximately(values: Sequence[Sequence[float]]) -> Any:
    return [pytest.approx(one, abs=1e-5) for one in values]


def test_outputs_are_the_logits_of_transformers(process: RewardModelProcess, logits: list[list[float]]) -> None:
    ids = [ids_of(" ".join(f"<{one['role']}> {one['content']} <end>" for one in talk)) for talk in TALKS]
    for talk, expected in zip(TALKS, logits, strict=True):
        assert outputs_of(process, messages=talk) == approximately([expected])
    assert outputs_of(process, input=ids) == approximately(logits)
    assert outputs_of(process, input=ids[2]) == approximately(logits[2:])
    texts = outputs_of(process, input=TEXTS)
    assert texts == approximately(outputs_of(process, input=[ids_of(text) for text in TEXTS]))
    assert outputs_of(process, input=TEXTS[1]) == approximately(texts[1:2])


def test_the_response_has_the_format_of_vllm(process: RewardModelProcess, logits: list[list[float]]) -> None:
    tree = posted(process, {"messages": TALKS[0]}).json()
    assert tree["object"] == "list" and tree["model"] == NAME and tree["id"].startswith("classify-")
    (entry,) = tree["data"]
    weights = [math.exp(one) for one in logits[0]]  # the default: probabilities
    assert entry["probs"] == pytest.approx([one / sum(weights) for one in weights], abs=1e-5)
    best = max(range(3), key=logits[0].__getitem__)
    assert (entry["index"], entry["label"], entry["num_classes"]) == (0, f"LABEL_{best}", 3)
    tokens = len(ids_of("<user> what is two plus two <end> <assistant> four <end>"))
    assert tree["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def test_activations_are_those_of_vllm() -> None:
    assert [activation_of(None, 1), activation_of(None, 2)] == ["sigmoid", "softmax"]
    assert activation_of("regression", 1) == "identity" and activation_of("multi_label_classification", 3) == "sigmoid"
    assert activated([2.0, -800.0], "identity") == [2.0, -800.0]
    assert activated([0.0, -800.0, 800.0], "sigmoid") == [0.5, 0.0, 1.0]
    assert activated([1000.0, 1000.0], "softmax") == [0.5, 0.5]


def test_wrong_requests_are_answered_with_one_line(process: RewardModelProcess) -> None:
    for body, status, message in (
        ({}, 400, "give either 'input' or 'messages'"),
        ({"input": "bad", "messages": TALKS[0]}, 400, "give either 'input' or 'messages'"),
        ({"input": ""}, 400, "the input has no tokens"),
        ({"input": [3, 1000]}, 400, "a token id is outside the vocabulary of 18"),
        ({"input": ["bad"] * 9}, 400, "more than 8 inputs"),
        ({"input": ["bad", "very " * 25]}, 400, "input 1: the input has 25 tokens; the maximum is 24"),
        ({"input": "bad", "model": "other"}, 404, "the model 'other' does not exist: this server has 'reward'"),
    ):
        answer = posted(process, body)
        error = answer.json()["error"]
        assert answer.status_code == status and message in error["message"] and "\n" not in error["message"]


def test_endpoints_of_the_other_kind_of_model_say_so(server: RunningServer) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = posted(FakeProcess(), {"prompt": "Hi"}, path)
        assert answer.status_code == 404 and "is a classification model" in answer.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/classify", json={"input": "Hi"})
    assert answer.status_code == 404 and "is a language model" in answer.json()["error"]["message"]
    assert posted(FakeProcess(), {"input": "Hi"}, "/engine/weights").status_code == 404


def test_concurrent_requests_are_computed_together() -> None:
    process = FakeProcess()

    async def work(send: Send) -> list[httpx.Response]:
        def start(size: int) -> asyncio.Task[httpx.Response]:
            return asyncio.ensure_future(send({"input": [1] * size, "use_activation": False}))

        tasks = [start(1)]
        while not process.calls:
            await asyncio.sleep(0.01)
        tasks += [start(size) for size in range(2, 11)]
        while "assay_waiting_requests 9\n" not in (load := (await send(path="/metrics")).text):
            await asyncio.sleep(0.01)
        assert "assay_running_sequences 1\n" in load and "assay_active_samples 10\n" in load
        process.go.set()
        return await asyncio.gather(*tasks)

    answers = served(process, work)
    assert [one.json()["data"][0]["probs"] for one in answers] == [[float(size)] for size in range(1, 11)]
    assert list(map(len, process.calls)) == [1, 9]  # those that came while the first one was computed


def test_a_failure_of_the_process_is_an_error_and_ends_it() -> None:
    process = FakeProcess()
    process.go.set()
    process.error = RuntimeError("CUDA error:\nout of luck")  # of one that was killed: see the last test

    async def work(send: Send) -> list[httpx.Response]:
        failed = await asyncio.gather(*(send({"input": "bad"}) for _ in range(3)))
        process.error = None
        return [*failed, await send({"input": "bad"})]

    *failed, good = served(process, work)
    message = "the model failed: RuntimeError: CUDA error: out of luck"
    assert all(one.status_code == 500 and one.json()["error"]["message"] == message for one in failed)
    assert good.status_code == 200 and process.ended


def test_outputs_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeProcess()
    monkeypatch.setattr(process, "call", lambda *_: [([math.nan], 1)])
    answer = posted(process, {"input": "bad"})
    assert answer.status_code == 500 and "not finite: [nan]" in answer.json()["error"]["message"]


def judged(url: str, **settings: Any) -> list[Any]:
    values = {"kind": "reward_model", "model": NAME, "url": url, "cache": "", "retries": 0, "timeout_s": 120}
    with RewardModelJudge(JudgeConfig(**values | settings)) as judge:
        fields = judge.fields(Prompt("p", (QUESTION,), "4"))
        return judge.judge([(talk[1]["content"], "4", fields) for talk in TALKS])


@pytest.mark.slow
def test_the_judge_works_with_assay_serve_also_after_the_process_of_the_model_was_killed(
    folder: Path, logits: list[list[float]]
) -> None:
    def check(verdicts: Sequence[Any], label: int) -> None:
        assert [one.parts["score"] for one in verdicts] == pytest.approx([one[label] for one in logits], abs=1e-5)

    with command(str(folder), "--name", NAME) as (program, url):
        check(judged(url, label=0), 0)  # sends messages
        check(judged(url, label=2, tokenizer=str(folder)), 2)  # sends token ids
        processes = table()
        (model,) = [child for child in descendants(program.pid) if "assay.rewards.reward_model" in processes[child][2]]
        os.kill(model, signal.SIGKILL)
        failed = [one for one in judged(url) if one.status is Status.ERROR]  # whichever arrived first
        assert failed and all("killed by SIGKILL" in one.detail for one in failed)
        check(judged(url, retries=4), 0)
        children = descendants(program.pid)
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 0 and not set(children) & table().keys()
