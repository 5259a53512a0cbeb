"""Replies as streams of text, Ctrl-C during generation, verdict lines, and columns in a terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from assay.cli.chat_screen import ChatModel, Columns, Reply, ReplyStream, generate_replies, summary_line, verdict_line
from assay.engine import Request, SamplingParams, generate, make_engine
from assay.models import build_preset
from assay.rollout import with_stops
from assay.tasks import Abacus
from assay.text import Renderer, word_tokenizer
from assay.types import Prompt, Status, UserError, Verdict

QUESTION = Prompt("q", ({"role": "user", "content": "Ann has 7 coins . She finds 5 . How many coins ?"},))
PARAMS = SamplingParams(n=3, max_new_tokens=30, min_new_tokens=10)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(word_tokenizer(Abacus().words()))


@pytest.fixture
def chat_model(renderer: Renderer) -> Callable[[int], ChatModel]:
    def make(seed: int) -> ChatModel:
        policy = build_preset("nano", renderer.tokenizer.vocab_size, 64, seed)
        options = {"device": "cpu", "dtype": torch.float32, "max_length": 64, "decode": renderer.decode}
        engine = make_engine("native", policy, **options)
        return ChatModel(f"model-{seed}", renderer, engine)

    return make


def stream_of(model: ChatModel) -> ReplyStream:
    return ReplyStream(model, QUESTION, model.prompt_ids(QUESTION)[0], PARAMS, seed=5)


def ignore(*_: Any) -> None: ...


def test_streamed_pieces_are_the_text_of_generate(chat_model: Callable[[int], ChatModel]) -> None:
    models = [chat_model(1), chat_model(2)]
    streams = [stream_of(model) for model in models]
    pieces = [[""] * PARAMS.n for _ in models]
    order = []

    def on_text(stream: int, sample: int, text: str, style: str) -> None:
        pieces[stream][sample] += text
        order.append(stream)

    generate_replies(streams, on_text)
    assert order != sorted(order)  # the models take turns
    for model, stream, texts in zip(models, streams, pieces, strict=True):
        ids, note = model.prompt_ids(QUESTION)
        (expected,) = generate(model.engine, [Request(ids, with_stops(PARAMS, model.renderer), 5)])
        replies = stream.replies()
        assert texts == [reply.text for reply in replies] == [model.renderer.decode(c.token_ids) for c in expected]
        assert [reply.finish for reply in replies] == [c.finish for c in expected] and note == "" and all(texts)


@pytest.mark.parametrize("stop", ["ctrl-c", KeyboardInterrupt, ValueError])
def test_an_interrupted_reply_aborts_its_request(chat_model: Callable[[int], ChatModel], stop: Any) -> None:
    model = chat_model(1)
    expected = stream_of(model)
    generate_replies([expected], ignore)
    calls = []

    def interrupt(stream: int, sample: int, text: str, style: str) -> None:
        calls.append(text)
        if len(calls) == 5 and stop == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        elif len(calls) == 5:
            raise stop

    stopped = stream_of(model)
    handler = signal.getsignal(signal.SIGINT)
    if stop is ValueError:  # other errors are not taken for Ctrl-C
        with pytest.raises(ValueError):
            generate_replies([stopped], interrupt)
    else:
        generate_replies([stopped], interrupt)
        replies = stopped.replies()
        assert 5 <= len(calls) < 10 and all(reply.finish is None for reply in replies)
        for whole, part in zip(expected.replies(), replies, strict=True):
            assert whole.text.startswith(part.text) and len(part.text) < len(whole.text)
    assert signal.getsignal(signal.SIGINT) is handler
    assert model.engine.step() == []
    again = stream_of(model)
    generate_replies([again], ignore)
    assert [reply.messages for reply in again.replies()] == [reply.messages for reply in expected.replies()]


def test_a_rejected_request_has_an_error_and_no_replies(chat_model: Callable[[int], ChatModel]) -> None:
    bad, good = ReplyStream(chat_model(1), QUESTION, [10**6], PARAMS, 5), stream_of(chat_model(2))
    generate_replies([bad, good], ignore)
    assert isinstance(bad.error, UserError) and "outside the vocabulary" in str(bad.error) and bad.replies() == []
    assert len(good.replies()) == PARAMS.n and good.error is None


def test_verdict_lines() -> None:
    broken = Verdict(0.0, Status.ERROR, detail="division by zero")
    assert verdict_line(broken, "18") == "error: nothing parsed, gold 18, reward 0 (division by zero)"
    assert verdict_line(Verdict(0.25, Status.WRONG, parsed="x" * 100), "").endswith("xxx..., reward 0.25")
    assert summary_line([broken]) == ""


def test_models_are_shown_in_columns_with_verdicts(chat_model: Callable[[int], ChatModel]) -> None:
    console = Console(width=100, height=40, force_terminal=True, record=True, file=open(os.devnull, "w"))  # noqa: SIM115

    def grade(_: ChatModel, replies: list[Reply]) -> None:
        for reply in replies:
            reply.verdict = Verdict(0.5, Status.OK, parsed="12")

    Columns(console, [stream_of(chat_model(1)), stream_of(chat_model(2))], gold="12").show(grade)
    lines = console.export_text().splitlines()
    assert any("model-1" in line and "model-2" in line for line in lines)
    assert any(line.count("ok: parsed 12, gold 12, reward 0.5") == 2 for line in lines)
    assert any("(3)" in line for line in lines)
