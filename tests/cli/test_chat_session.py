"""A conversation: questions, commands and questions of tasks.

Its screen (`chat_screen`): streams of text, Ctrl-C during generation, verdict lines, and columns in a terminal.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from assay.cli import chat_screen
from assay.cli.chat import ChatConfig
from assay.cli.chat_session import (
    ChatSession,
    TaskQuestions,
    TaskRequest,
    answers_any_question,
    converse,
    parse_task_request,
)
from assay.engine import generate, make_engine
from assay.engine.base import Capabilities, EngineInfo, Event, Finished, Request, SamplingParams, TokenChunk
from assay.envs import TaskEnv, make_env
from assay.envs.base import Step, up_to_stop
from assay.envs.builtin import GuessNumber
from assay.models import build_preset
from assay.rollout import Limits, with_stops
from assay.tasks import Abacus, make_task
from assay.text import Renderer, Tokenizer, word_tokenizer
from assay.types import Completion, Finish, Prompt, Status, UserError, Verdict

QUESTION = "Ann has 7 coins . She finds 5 . How many coins ?"


def words() -> Tokenizer:
    return word_tokenizer(Abacus().words())


class Scripted:
    """An engine with given answers, one token per step and sample. It records its requests.

    After a stop string, the next request is answered with the rest of the answer.
    """

    info = EngineInfo(0, 1000, 256, torch.float32, Capabilities())

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str], interrupt_after: int | None = None) -> None:
        self.tokenizer, self._answers, self._interrupt_after = tokenizer, answers, interrupt_after
        self._rest: list[str] = []
        self.requests: list[Request] = []
        self.running: dict[int, Iterator[list[Event]]] = {}

    def add(self, request: Request) -> int:
        assert request.stream and not self.running
        self.requests.append(request)
        request_id = len(self.requests)
        self.running[request_id] = self._events(request, request_id)
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        ((request_id, steps),) = self.running.items()
        events = next(steps, None)
        if events is None:
            del self.running[request_id]
        return events or []

    def abort(self, ids: Iterable[Any]) -> None:
        for request_id in ids:
            self.running.pop(request_id, None)

    def _events(self, request: Request, request_id: int) -> Iterator[list[Event]]:
        texts = self._rest or self._answers[: request.params.n]
        turns = [up_to_stop(text, request.params.stop) for text in texts]
        self._rest = [text.removeprefix(turn) for text, turn in zip(texts, turns, strict=True) if text != turn]
        end = [] if self._rest else self.tokenizer.eos_ids[:1]
        answers = [[*self.tokenizer.encode(turn), *end] for turn in turns]
        assert len(answers) == request.params.n
        written = 0
        for position in range(max(map(len, answers))):
            for sample, ids in enumerate(answers):
                if position < len(ids):
                    if written == self._interrupt_after:
                        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
                    yield [TokenChunk(request_id, sample, ids[position : position + 1], [0.0])]
                    written += 1
        del self.running[request_id]
        zeros = [[0.0] * len(ids) for ids in answers]
        completions = [Completion(ids, z, z, Finish.STOP) for ids, z in zip(answers, zeros, strict=True)]
        yield [Finished(request_id, sample, completion) for sample, completion in enumerate(completions)]

    def release(self, handles: Iterable[int]) -> None:
        assert not list(handles)

    def asked(self, turn: int) -> str:
        return self.tokenizer.decode(self.requests[turn].prompt_ids, skip_special=False)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


def scripted_session(engines: Sequence[Scripted], samples: int = 1, **reward: Any) -> ChatSession:
    models = [chat_screen.ChatModel(f"model-{i}", Renderer(words()), engine) for i, engine in enumerate(engines)]
    cfg = ChatConfig.model_validate({"task": "abacus", "reward": {"workers": 0, **reward}})
    return ChatSession(models, TaskQuestions(cfg, cfg), SamplingParams(n=samples), 0, chat_screen.Screen())


def test_each_model_has_its_own_history() -> None:
    tokenizer = words()
    engines = [Scripted(tokenizer, ["#### 1"]), Scripted(tokenizer, ["#### 2"])]
    session = scripted_session(engines)
    for line in (QUESTION, "", "How many books ?", "/again", "/system Ann has", "//How", "/clear", "How many ?"):
        assert session.handle(line)
    for number, engine in enumerate(engines, start=1):
        first = f"<user> {QUESTION} <assistant>"
        second = f"{first} #### {number} <eos> <user> How many books ? <assistant>"
        assert [engine.asked(turn) for turn in range(3)] == [first, second, second]
        third = f"{second} #### {number} <eos> <user> <unk> <assistant>"
        assert engine.asked(3) == f"<system> Ann has {third}"
        assert engine.asked(4) == "<system> Ann has <user> How many ? <assistant>"
    seeds = [[request.seed for request in engine.requests] for engine in engines]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 5  # the same for both models, different for every question
    assert not session.handle("/quit")


def test_a_task_question_is_asked_without_earlier_turns_and_graded(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = Abacus().prompts("test")[3]
    tokenizer = words()
    right, wrong = Scripted(tokenizer, [Abacus().gold_completion(prompt)]), Scripted(tokenizer, ["no 40"])
    session = scripted_session([right, wrong], correct=2.0)
    session.handle(QUESTION)
    capsys.readouterr()
    session.handle("/task abacus 3")
    out = capsys.readouterr().out
    assert right.asked(1) == f"<user> {prompt.question} <assistant>"
    assert out.startswith(
        f"abacus, test question 3:\n{prompt.question}\n[model-0]\n{Abacus().gold_completion(prompt)}\n"
    )
    assert f"\nok: parsed {prompt.answer}, gold {prompt.answer}, reward 2\n[model-1]\n" in out
    assert f"\nno_answer: nothing parsed, gold {prompt.answer}, reward 0" in out
    session.handle("How many ?")
    assert right.asked(2).startswith(f"<user> {prompt.question} <assistant> {prompt.solution} <eos> <user> How many ?")


def session_with_env(settings: dict[str, Any], *engines: Scripted, limits: Limits | None = None) -> ChatSession:
    """The first model plays the environment of the settings, others none."""
    cfg = ChatConfig.model_validate({"reward": {"workers": 0}, **settings})
    questions = TaskQuestions(cfg, cfg)
    env = questions.task(questions.default_task)
    models = [
        chat_screen.ChatModel(f"model-{i}", Renderer(engine.tokenizer), engine) for i, engine in enumerate(engines)
    ]
    if answers_any_question(env):
        models[0].played = chat_screen.Played(env, limits or Limits())
    return ChatSession(models, questions, SamplingParams(), 0, chat_screen.Screen())


def test_each_model_answers_in_its_own_environment(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = word_tokenizer(make_env("calculator", task=Abacus()).words())
    script = "<< 17 + 3 = #### 20"
    replies = ["<< 17 + 3 = 20 >> #### 20", script]
    calculator, plain = Scripted(tokenizer, [script]), Scripted(tokenizer, [script])
    session = session_with_env({"task": "abacus", "env": "calculator"}, calculator, plain)
    session.handle(QUESTION)
    assert capsys.readouterr().out == f"[model-0]\n{replies[0]}\n[model-1]\n{replies[1]}\n"
    assert calculator.asked(1) == f"<user> {QUESTION} <assistant> << 17 + 3 = 20 >>"
    session.handle("How many ?")
    for engine, turn, reply in zip((calculator, plain), (2, 1), replies, strict=True):
        assert engine.asked(turn) == f"<user> {QUESTION} <assistant> {reply} <eos> <user> How many ? <assistant>"
    index = next(i for i, prompt in enumerate(Abacus().prompts("test")) if prompt.answer == "20")
    capsys.readouterr()
    session.handle(f"/task {index}")
    assert capsys.readouterr().out.count("ok: parsed 20, gold 20, reward 1\n") == 2


def test_rewards_of_steps_count_in_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = Abacus().prompts("test")[3]
    assert prompt.solution and prompt.solution.count("=") == 2
    engine = Scripted(words(), [prompt.solution])
    env = {"name": "stepwise", "args": {"separator": ";", "line_reward": 0.25}}
    session_with_env({"task": "abacus", "env": env}, engine).handle("/task 3")
    assert f"\n{prompt.solution}\nok: parsed 1, gold 1, reward 1.5\n" in capsys.readouterr().out


def test_problems_of_an_environment_are_played_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"env": {"name": "guess", "args": {"tries": 3}}}
    env = GuessNumber(tries=3)
    index, prompt = next((i, prompt) for i, prompt in enumerate(env.prompts("test")) if secret_of(env, prompt) > 10)
    engine = Scripted(word_tokenizer(env.words()), ["10"])
    session = session_with_env(settings, engine)
    session.handle(f"/task {index}")
    tried = "10\n[user] Higher .\n" * 2
    verdict = "wrong: parsed 10, reward 0"
    out = f"guess, test question {index}:\n{prompt.question}\n{tried}10\n[user] Lost .\n{verdict}\n"
    assert capsys.readouterr().out == out
    session.handle("Guess a number")  # no problem of the environment: a single reply
    assert capsys.readouterr().out == "10\n"
    turns = " <assistant> 10 <eos> <user> Higher ." * 2
    assert engine.asked(3) == f"<user> {prompt.question}{turns} <assistant> 10 <eos> <user> Guess a number <assistant>"


def secret_of(env: GuessNumber, prompt: Prompt) -> int:
    env.start(prompt)
    return env.secret


def test_limits_and_failures_of_environments_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = word_tokenizer(make_env("calculator", task=Abacus()).words())
    settings = {"task": "abacus", "env": "calculator"}
    session = session_with_env(settings, Scripted(tokenizer, ["1 + 1 = 2"]), limits=Limits(steps=1))
    session.handle(QUESTION)
    printed = capsys.readouterr()
    assert printed.out == "1 + 1 =\n" and "truncated: cut off after 1 step" in printed.err
    session = session_with_env({**settings, "env": f"{__file__}:FailingEnv"}, Scripted(tokenizer, ["2"]))
    session.handle(QUESTION)
    printed = capsys.readouterr()
    assert printed.out == "2\n" and "model-0: the environment failed: " in printed.err and "tool is away" in printed.err


class FailingEnv(TaskEnv):
    def step(self, action: str) -> Step:
        raise RuntimeError("the tool is away")


def test_samples_of_a_task_are_summarized_as_pass_at_k(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Abacus().prompts("train")[5].answer
    answers = ["#### 40", f"#### {answer}", "####", f"#### {answer}", "#### 39"]
    right = [False, True, False, True, False]
    session = scripted_session([Scripted(words(), answers)], samples=5)
    session.handle("/task abacus 5 train")
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("(")] == [f"({i}) {text}" for i, text in enumerate(answers, 1)]
    assert out[-1].startswith("2 of 5 correct (40.0 %), mean reward 0.4; ")
    for k in range(1, 6):
        chosen = list(combinations(right, k))
        assert f"pass@{k} {sum(map(any, chosen)) / len(chosen):.3f}" in out[-1]


def test_ctrl_c_stops_an_answer_and_keeps_the_text_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = words()
    engines = [Scripted(tokenizer, ["7 + 5 = 12"], interrupt_after=2), Scripted(tokenizer, ["#### 2"])]
    session = scripted_session(engines)
    with pytest.raises(KeyboardInterrupt):
        session.handle(QUESTION)
    assert capsys.readouterr().out == "[model-0]\n7 + 5\n"
    assert [message["content"] for message in session.models[0].history] == [QUESTION, "7 + 5"]
    assert engines[1].requests == [] and session.models[1].history == []


def test_ctrl_c_twice_in_a_row_at_the_prompt_exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: list[str | type[BaseException]] = [KeyboardInterrupt, "/again", KeyboardInterrupt, KeyboardInterrupt]

    def read(_: str) -> str:
        word = typed.pop(0)
        if isinstance(word, str):
            return word
        raise word

    monkeypatch.setattr("builtins.input", read)
    assert converse(scripted_session([Scripted(words(), ["#### 2"])])) == 130 and not typed
    printed = capsys.readouterr().err
    assert "/help lists all commands" in printed and "no question to repeat" in printed
    assert printed.count("press Ctrl-C again") == 2
    typed.append(EOFError)
    assert converse(scripted_session([Scripted(words(), ["#### 2"])])) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/tusk", "unknown command '/tusk': did you mean '/task'"),
        ("/usr/bin", "write //usr/bin"),
        ("/temperature hot", "'hot' is not a finite number"),
        ("/samples 0", "samples must be at least 1"),
        ("/again", "no question to repeat"),
        ("/task nonesuch 3", "unknown task 'nonesuch'"),
        ("/task abacus 3 4th", "'4th' is neither a number"),
        ("/task abacus -1", "abacus has .* test questions: choose one from 0"),
    ],
)
def test_invalid_commands_are_reported_and_change_nothing(line: str, message: str) -> None:
    session = scripted_session([Scripted(words(), ["#### 2"])])
    before = session.params
    with pytest.raises(UserError, match=message):
        session.handle(line)
    assert session.params == before and session.models[0].history == []
    assert session.handle(QUESTION)


def test_arguments_of_the_task_command() -> None:
    assert parse_task_request(["gsm8k", "17"], "") == TaskRequest("gsm8k", 17, None)
    assert parse_task_request(["gsm8k", "random", "train"], "abacus") == TaskRequest("gsm8k", None, "train")
    assert parse_task_request(["3"], "abacus") == TaskRequest("abacus", 3, None)
    assert parse_task_request([], "abacus") == TaskRequest("abacus", None, None)
    assert parse_task_request(["jsonl", "3", "all"], "") == TaskRequest("jsonl", 3, "all")
    with pytest.raises(UserError, match="which task"):
        parse_task_request(["3"], "")


def test_a_single_file_is_used_whole_and_that_of_a_run_by_its_test_split(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"question": "q{n}", "answer": {n}}}\n' for n in range(30)))
    cfg = ChatConfig.model_validate({"task": {"name": "jsonl", "path": str(file)}})
    rng = random.Random(0)
    named = TaskQuestions(cfg, cfg)
    prompt, split, index = named.question(TaskRequest("jsonl", 29, None), rng)
    assert (prompt.question, split, index) == ("q29", "all", 29)
    of_a_run = TaskQuestions(cfg, ChatConfig())  # the user named no task: it is that of the checkpoint's run
    held_out = {of_a_run.question(TaskRequest("jsonl", index, None), rng)[0].id for index in range(3)}
    assert held_out == {prompt.id for prompt in make_task("jsonl", file).prompts("test")}
    with pytest.raises(UserError, match="jsonl has 3 test questions: choose one from 0 to 2"):
        of_a_run.question(TaskRequest("jsonl", 3, None), rng)
    fourth = make_task("jsonl", file).prompts("all")[4]
    assert of_a_run.question(TaskRequest("jsonl", 4, "all"), rng)[:2] == (fourth, "all")
    with pytest.raises(UserError, match='only a single file or list has the split "all"'):
        named.question(TaskRequest("abacus", 1, "all"), rng)


def test_judges_of_tasks_are_closed() -> None:
    session = scripted_session([Scripted(words(), ["#### 2"])])
    session.handle("/task abacus 1")
    session.questions.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.handle("/again")


# The screen


ASKED = Prompt("q", ({"role": "user", "content": "Ann has 7 coins . She finds 5 . How many coins ?"},))
PARAMS = SamplingParams(n=3, max_new_tokens=30, min_new_tokens=10)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(word_tokenizer(Abacus().words()))


@pytest.fixture
def chat_model(renderer: Renderer) -> Callable[[int], chat_screen.ChatModel]:
    def make(seed: int) -> chat_screen.ChatModel:
        policy = build_preset("nano", renderer.tokenizer.vocab_size, 64, seed)
        options = {"device": "cpu", "dtype": torch.float32, "max_length": 64, "decode": renderer.decode}
        engine = make_engine("native", policy, **options)
        return chat_screen.ChatModel(f"model-{seed}", renderer, engine)

    return make


def stream_of(model: chat_screen.ChatModel) -> chat_screen.ReplyStream:
    return chat_screen.ReplyStream(model, ASKED, model.prompt_ids(ASKED)[0], PARAMS, seed=5)


def ignore(*_: Any) -> None: ...


def test_streamed_pieces_are_the_text_of_generate(chat_model: Callable[[int], chat_screen.ChatModel]) -> None:
    models = [chat_model(1), chat_model(2)]
    streams = [stream_of(model) for model in models]
    pieces = [[""] * PARAMS.n for _ in models]
    order = []

    def on_text(stream: int, sample: int, text: str, style: str) -> None:
        pieces[stream][sample] += text
        order.append(stream)

    chat_screen.generate_replies(streams, on_text)
    assert order != sorted(order)  # the models take turns
    for model, stream, texts in zip(models, streams, pieces, strict=True):
        ids, note = model.prompt_ids(ASKED)
        (expected,) = generate(model.engine, [Request(ids, with_stops(PARAMS, model.renderer), 5)])
        replies = stream.replies()
        assert texts == [reply.text for reply in replies] == [model.renderer.decode(c.token_ids) for c in expected]
        assert [reply.finish for reply in replies] == [c.finish for c in expected] and note == "" and all(texts)


@pytest.mark.parametrize("stop", ["ctrl-c", KeyboardInterrupt, ValueError])
def test_an_interrupted_reply_aborts_its_request(chat_model: Callable[[int], chat_screen.ChatModel], stop: Any) -> None:
    model = chat_model(1)
    expected = stream_of(model)
    chat_screen.generate_replies([expected], ignore)
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
            chat_screen.generate_replies([stopped], interrupt)
    else:
        chat_screen.generate_replies([stopped], interrupt)
        replies = stopped.replies()
        assert 5 <= len(calls) < 10 and all(reply.finish is None for reply in replies)
        for whole, part in zip(expected.replies(), replies, strict=True):
            assert whole.text.startswith(part.text) and len(part.text) < len(whole.text)
    assert signal.getsignal(signal.SIGINT) is handler
    assert model.engine.step() == []
    again = stream_of(model)
    chat_screen.generate_replies([again], ignore)
    assert [reply.messages for reply in again.replies()] == [reply.messages for reply in expected.replies()]


def test_a_rejected_request_has_an_error_and_no_replies(chat_model: Callable[[int], chat_screen.ChatModel]) -> None:
    bad, good = chat_screen.ReplyStream(chat_model(1), ASKED, [10**6], PARAMS, 5), stream_of(chat_model(2))
    chat_screen.generate_replies([bad, good], ignore)
    assert isinstance(bad.error, UserError) and "outside the vocabulary" in str(bad.error) and bad.replies() == []
    assert len(good.replies()) == PARAMS.n and good.error is None


def test_verdict_lines() -> None:
    broken = Verdict(0.0, Status.ERROR, detail="division by zero")
    assert chat_screen.verdict_line(broken, "18") == "error: nothing parsed, gold 18, reward 0 (division by zero)"
    assert chat_screen.verdict_line(Verdict(0.25, Status.WRONG, parsed="x" * 100), "").endswith("xxx..., reward 0.25")
    assert chat_screen.summary_line([broken]) == ""


def test_models_are_shown_in_columns_with_verdicts(chat_model: Callable[[int], chat_screen.ChatModel]) -> None:
    console = Console(width=100, height=40, force_terminal=True, record=True, file=open(os.devnull, "w"))  # noqa: SIM115

    def grade(_: chat_screen.ChatModel, replies: list[chat_screen.Reply]) -> None:
        for reply in replies:
            reply.verdict = Verdict(0.5, Status.OK, parsed="12")

    chat_screen.Columns(console, [stream_of(chat_model(1)), stream_of(chat_model(2))], gold="12").show(grade)
    lines = console.export_text().splitlines()
    assert any("model-1" in line and "model-2" in line for line in lines)
    assert any(line.count("ok: parsed 12, gold 12, reward 0.5") == 2 for line in lines)
    assert any("(3)" in line for line in lines)
