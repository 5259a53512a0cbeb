from __future__ import annotations

import io
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.chat import ChatConfig, ChatSession, TaskDesk, Wish, parse_wish, settings_of
from assay.cli.chat_screen import (
    Reply,
    ReplyStopped,
    Screen,
    Speaker,
    TextStream,
    summary_line,
    take_turns,
    verdict_line,
)
from assay.cli.main import main
from assay.engine.base import Capabilities, EngineInfo, Event, Finished, Request, SamplingParams, TokenChunk, generate
from assay.models import build_preset, save_model
from assay.runs import Run, checkpoints
from assay.tasks import Abacus, make_task
from assay.text import Renderer, Tokenizer, word_tokenizer
from assay.types import Completion, Finish, Prompt, Status, UserError, Verdict

CONTEXT = 64
QUESTION = "Ann has 7 coins . She finds 5 . How many coins ?"

Chat = Callable[..., tuple[int, str, str]]


def words() -> Tokenizer:
    return word_tokenizer(Abacus().words())


def save_random_model(folder: Path, seed: int, template: bool = True) -> str:
    tokenizer = words()
    if not template:
        tokenizer.hf.chat_template = None
    model = build_preset("nano", tokenizer.vocab_size, CONTEXT, seed)
    save_model(model, folder, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    tokenizer.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return save_random_model(folder / "one", 1), save_random_model(folder / "two", 2)


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    def run_chat(*options: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["chat", *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_chat


class Scripted:
    """An engine that says what it is told to, a token per step and sample, and keeps the requests that it was given."""

    info = EngineInfo(0, 1000, 256, torch.float32, Capabilities())

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str], fail_after: int | None = None) -> None:
        self._tokenizer, self._answers, self._fail_after = tokenizer, answers, fail_after
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
        end = self._tokenizer.eos_ids[0]
        found = [[*self._tokenizer.encode(a), end] for a in self._answers[: request.params.n]]
        assert len(found) == request.params.n
        written = 0
        for place in range(max(map(len, found))):
            for sample, ids in enumerate(found):
                if place < len(ids):
                    if written == self._fail_after:
                        raise KeyboardInterrupt
                    yield [TokenChunk(request_id, sample, ids[place : place + 1], [0.0])]
                    written += 1
        del self.running[request_id]
        zeros = [[0.0] * len(ids) for ids in found]
        completions = [Completion(ids, z, z, Finish.STOP) for ids, z in zip(found, zeros, strict=True)]
        yield [Finished(request_id, sample, completion) for sample, completion in enumerate(completions)]

    def asked(self, turn: int) -> str:
        return self._tokenizer.decode(self.requests[turn].prompt_ids, skip_special=False)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


def scripted_session(engines: Sequence[Scripted], samples: int = 1, **reward: Any) -> ChatSession:
    speakers = [Speaker(f"model-{i}", Renderer(words()), engine) for i, engine in enumerate(engines)]
    cfg = ChatConfig.model_validate({"task": "abacus", "reward": {"workers": 0, **reward}})
    return ChatSession(speakers, TaskDesk(cfg, cfg), SamplingParams(n=samples), 0, Screen())


# Streaming


def byte_tokens(text: str) -> list[int]:
    return list(text.encode())


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def test_a_character_appears_when_its_last_byte_does() -> None:
    text = "né 木 👩‍🚀!\n"
    stream = TextStream(decode_bytes)
    pieces = [stream.add(token) for token in byte_tokens(text)] + [stream.finish()]
    assert "".join(pieces) == stream.text == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[0] == "n" and pieces[1] == "" and pieces[2] == "é"


def test_bytes_that_never_become_a_character_are_told_at_the_end() -> None:
    stream = TextStream(decode_bytes)
    pieces = [stream.add(token) for token in b"a\xe6\x9cb\xe6"]
    assert "".join(pieces) == "a\ufffdb"
    assert stream.finish() == "\ufffd"


def test_words_are_joined_by_spaces() -> None:
    tokenizer = words()
    ids = tokenizer.encode("7 + 5 = 12 ; #### 12")
    stream = TextStream(tokenizer.decode)
    assert [stream.add(token) for token in ids] == ["7", " +", " 5", " =", " 12", " ;", " ####", " 12"]


def test_a_stop_string_is_never_shown() -> None:
    stream = TextStream(decode_bytes, ["\nQuestion:"])
    pieces = [stream.add(token) for token in byte_tokens("12\nQuiet\nQuestion:")] + [stream.finish()]
    assert "".join(pieces) == stream.text == "12\nQuiet"
    assert stream.full_text == "12\nQuiet\nQuestion:"
    assert pieces[2] == "" and "\nQui" in pieces  # held back until it was clear that this is no stop string


def test_pieces_joined_are_the_final_text(models: tuple[str, str]) -> None:
    from assay.train import components

    renderer, engine = components.build_server(models[0], ChatConfig(), None)
    speaker = Speaker("one", renderer, engine)
    ids, note = speaker.prompt_ids(Prompt("q", ({"role": "user", "content": QUESTION},)))
    pieces = ["", "", ""]

    def on_text(sample: int, text: str) -> None:
        pieces[sample] += text

    replies = speaker.answer(ids, SamplingParams(n=3, max_new_tokens=30), 5, on_text)
    params = SamplingParams(n=3, max_new_tokens=30, stop_token_ids=renderer.stop_token_ids)
    (alone,) = generate(engine, [Request(ids, params, 5)])  # the same noise without streaming
    assert pieces == [reply.text for reply in replies] == [renderer.decode(c.token_ids) for c in alone]
    assert [reply.finish for reply in replies] == [c.finish for c in alone]
    assert note == "" and all(pieces)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ReplyStopped, ValueError])
def test_a_stopped_reply_aborts_its_request_and_the_next_one_is_served(
    models: tuple[str, str], stop: type[BaseException]
) -> None:
    from assay.train import components

    renderer, engine = components.build_server(models[0], ChatConfig(), None)
    speaker = Speaker("one", renderer, engine)
    ids, _ = speaker.prompt_ids(Prompt("q", ({"role": "user", "content": QUESTION},)))
    params = SamplingParams(n=3, max_new_tokens=30, min_new_tokens=10)
    expected = speaker.answer(ids, params, 5, lambda sample, text: None)
    tokens = []

    def stopping(sample: int, text: str) -> None:
        tokens.append(text)
        if len(tokens) == 5:
            raise stop

    if stop is ValueError:  # a mistake of ours is not taken for the user's wish
        with pytest.raises(ValueError):
            speaker.answer(ids, params, 5, stopping)
    else:
        replies = speaker.answer(ids, params, 5, stopping)
        assert sum(reply.tokens for reply in replies) == 5 and all(reply.finish is None for reply in replies)
        assert all(one.full_text.startswith(part.text) for one, part in zip(expected, replies, strict=True))
    assert engine.step() == [] and speaker.answer(ids, params, 5, lambda sample, text: None) == expected


def test_a_reply_that_cannot_be_served_is_the_users_error(models: tuple[str, str]) -> None:
    from assay.train import components

    renderer, engine = components.build_server(models[0], ChatConfig(), None)
    with pytest.raises(UserError, match=r"request 'one': .*outside the vocabulary"):
        Speaker("one", renderer, engine).answer([10**6], SamplingParams(), 5, lambda sample, text: None)
    assert engine.step() == []


# A conversation


def test_each_model_remembers_its_own_answers() -> None:
    tokenizer = words()
    engines = [Scripted(tokenizer, ["#### 1"]), Scripted(tokenizer, ["#### 2"])]
    session = scripted_session(engines)
    for line in (QUESTION, "", "How many books ?", "/again", "/system Ann has", "//How", "/clear", "How many ?"):
        assert session.take(line)
    for number, engine in enumerate(engines, start=1):
        first = f"<user> {QUESTION} <assistant>"
        second = f"{first} #### {number} <eos> <user> How many books ? <assistant>"
        assert [engine.asked(turn) for turn in range(3)] == [first, second, second]
        third = f"{second} #### {number} <eos> <user> <unk> <assistant>"
        assert engine.asked(3) == f"<system> Ann has {third}"
        assert engine.asked(4) == "<system> Ann has <user> How many ? <assistant>"
    seeds = [[request.seed for request in engine.requests] for engine in engines]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 5  # same noise for both, other noise every time
    assert not session.take("/quit")


def test_a_task_question_is_asked_without_earlier_turns_and_graded(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = Abacus().prompts("test")[3]
    tokenizer = words()
    right, wrong = Scripted(tokenizer, [Abacus().gold_completion(prompt)]), Scripted(tokenizer, ["no 40"])
    session = scripted_session([right, wrong], correct=2.0)
    session.take(QUESTION)
    capsys.readouterr()
    session.take("/task abacus 3")
    out = capsys.readouterr().out
    assert right.asked(1) == f"<user> {prompt.question} <assistant>"
    assert out.startswith(
        f"abacus, test question 3:\n{prompt.question}\n[model-0]\n{Abacus().gold_completion(prompt)}\n"
    )
    assert f"\nok: parsed {prompt.answer}, gold {prompt.answer}, reward 2\n[model-1]\n" in out
    assert f"\nno_answer: nothing parsed, gold {prompt.answer}, reward 0" in out
    session.take("How many ?")
    assert right.asked(2).startswith(f"<user> {prompt.question} <assistant> {prompt.solution} <eos> <user> How many ?")


def test_samples_of_a_task_are_summed_up_as_pass_at_k(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Abacus().prompts("train")[5].answer
    answers = ["#### 40", f"#### {answer}", "####", f"#### {answer}", "#### 39"]
    right = [False, True, False, True, False]
    session = scripted_session([Scripted(words(), answers)], samples=5)
    session.take("/task abacus 5 train")
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("(")] == [f"({i}) {text}" for i, text in enumerate(answers, 1)]
    assert out[-1].startswith("2 of 5 correct (40.0 %), mean reward 0.4; ")
    for k in range(1, 6):
        chosen = list(combinations(right, k))
        assert f"pass@{k} {sum(map(any, chosen)) / len(chosen):.3f}" in out[-1]


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = words()
    engines = [Scripted(tokenizer, ["7 + 5 = 12"], fail_after=3), Scripted(tokenizer, ["#### 2"])]
    session = scripted_session(engines)
    with pytest.raises(KeyboardInterrupt):
        session.take(QUESTION)
    assert capsys.readouterr().out == "[model-0]\n7 + 5\n"
    assert [message["content"] for message in session.speakers[0].history] == [QUESTION, "7 + 5"]
    assert engines[1].requests == [] and session.speakers[1].history == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/tusk", "unknown command '/tusk': did you mean '/task'"),
        ("/usr/bin", "written with two, //usr/bin"),
        ("/temperature hot", "'hot' is not a number"),
        ("/temperature -1", "temperature must be 0"),
        ("/temperature nan", "no finite number"),
        ("/samples 0", "samples must be at least 1"),
        ("/samples 1.5", "'1.5' is not a number"),
        ("/max 0", "max_new_tokens must be at least 1"),
        ("/again", "nothing was asked yet"),
        ("/task nonesuch 3", 'unknown task "nonesuch"'),
        ("/task abacus 3 4th", "'4th' is neither a number"),
        ("/task abacus -1", "abacus has .* test questions: choose one from 0"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(line: str, message: str) -> None:
    session = scripted_session([Scripted(words(), ["#### 2"])])
    before = session.params
    with pytest.raises(UserError, match=message):
        session.take(line)
    assert session.params == before and session.speakers[0].history == []
    assert session.take(QUESTION)


def test_the_words_after_task() -> None:
    assert parse_wish(["gsm8k", "17"], "") == Wish("gsm8k", 17, None)
    assert parse_wish(["gsm8k", "random", "train"], "abacus") == Wish("gsm8k", None, "train")
    assert parse_wish(["3"], "abacus") == Wish("abacus", 3, None)
    assert parse_wish([], "abacus") == Wish("abacus", None, None)
    assert parse_wish(["jsonl", "3", "all"], "") == Wish("jsonl", 3, "all")
    with pytest.raises(UserError, match="which task"):
        parse_wish(["3"], "")


def test_a_single_file_is_asked_from_whole_and_that_of_a_run_from_what_was_held_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"question": "q{n}", "answer": {n}}}\n' for n in range(30)))
    cfg = ChatConfig.model_validate({"task": {"name": "jsonl", "path": str(file)}})
    rng = random.Random(0)
    named = TaskDesk(cfg, cfg)
    prompt, split, index = named.question(Wish("jsonl", 29, None), rng)
    assert (prompt.question, split, index) == ("q29", "all", 29)
    of_a_run = TaskDesk(cfg, ChatConfig())  # the person named no task: the run's checkpoint brought it
    held_out = {of_a_run.question(Wish("jsonl", index, None), rng)[0].id for index in range(3)}
    assert held_out == {prompt.id for prompt in make_task("jsonl", file).prompts("test")}
    with pytest.raises(UserError, match="jsonl has 3 test questions: choose one from 0 to 2"):
        of_a_run.question(Wish("jsonl", 3, None), rng)
    assert of_a_run.question(Wish("jsonl", 4, "all"), rng)[:2] == (make_task("jsonl", file).prompts("all")[4], "all")
    with pytest.raises(UserError, match='only a single file or list has the split "all"'):
        named.question(Wish("abacus", 1, "all"), rng)


def test_verdicts_in_words() -> None:
    broken = Verdict(0.0, Status.ERROR, detail="division by zero")
    assert verdict_line(broken, "18") == "error: nothing parsed, gold 18, reward 0 (division by zero)"
    assert verdict_line(Verdict(0.25, Status.WRONG, parsed="x" * 100), "").endswith("xxx..., reward 0.25")
    assert summary_line([Reply("", "", 0, Finish.STOP, broken)]) == ""


def test_judges_of_tasks_are_closed() -> None:
    session = scripted_session([Scripted(words(), ["#### 2"])])
    session.take("/task abacus 1")
    session.desk.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.take("/again")


# Taking turns


def test_turns_are_taken_a_token_each_and_one_at_a_time() -> None:
    said: list[str] = []
    working = threading.Lock()

    def job(name: str, tokens: int) -> Callable[[Callable[[], None]], str]:
        def speak(pause: Callable[[], None]) -> str:
            for _ in range(tokens):
                assert working.acquire(blocking=False)
                said.append(name)
                working.release()
                pause()
            return name.upper()

        return speak

    assert take_turns([job("a", 2), job("b", 4), job("c", 3)]) == ["A", "B", "C"]
    assert "".join(said) == "abcabcbcb"


def test_an_error_in_a_turn_is_raised() -> None:
    def fails(pause: Callable[[], None]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        take_turns([fails, lambda pause: None])


def test_ctrl_c_reaches_everybody_who_takes_turns() -> None:
    def talkative(pause: Callable[[], None]) -> int:
        turns = 0
        with suppress(ReplyStopped):
            while True:
                time.sleep(0.001)
                turns += 1
                pause()
        return turns

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    first, second = take_turns([talkative, talkative])
    assert first > 1 and 0 <= first - second <= 1


# The command


def test_prompts_are_answered_and_the_answers_repeat(models: tuple[str, str], chat: Chat) -> None:
    ask = ("--prompt", QUESTION, "--prompt", "Hello ?", "--max", "8")
    code, out, err = chat(models[0], *ask)
    assert code == 0 and len(out.splitlines()) == 2
    assert err.count("no such words in the tokenizer of") == 1 and ": Hello\n" in err
    assert "cut off: /max N allows more" in err
    assert chat(models[0], *ask) == (code, out, err)
    assert chat(models[0], *ask, "--seed", "1")[1] != out


def test_questions_from_a_pipe_are_not_echoed(models: tuple[str, str], chat: Chat) -> None:
    script = f"/max 6\n{QUESTION}\n\n/task abacus 4\n/quit\nnever asked\n"
    code, out, err = chat(*models, "--temperature", "0", "--reward.workers", "0", stdin=script)
    lines = out.splitlines()
    task = Abacus().prompts("test")[4]
    assert code == 0 and QUESTION not in out and "> " not in out and "answers end after 6 tokens" in err
    assert [line for line in lines if line.startswith("[")] == [f"[{model}]" for model in models] * 2
    assert lines[4:6] == ["abacus, test question 4:", task.question]
    assert sum(f"gold {task.answer}, reward 0" in line for line in lines) == 2
    assert len(lines) == 4 + 2 + 6


def test_a_prompt_longer_than_the_context_is_one_line_and_the_chat_goes_on(models: tuple[str, str], chat: Chat) -> None:
    code, out, err = chat(models[0], "--max", "4", stdin=f"{'Ann ' * CONTEXT}\n{QUESTION}\n")
    assert code == 2 and len(out.splitlines()) == 1
    assert f"{CONTEXT + 2} tokens leave no room for an answer in a context of {CONTEXT}" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["/no/such/folder"], "/no/such/folder"),
        (["run:nonesuch@last"], "unknown run 'nonesuch'"),
        (["MODEL", "--eval.temprature", "1"], "did you mean 'eval.temperature'"),
        (["MODEL", "--samples", "0"], "eval.samples"),
        (["MODEL", "--task", "nonesuch"], "unknown task"),
        ([], "required: MODEL"),
    ],
)
def test_mistakes_in_the_command_exit_with_2(
    models: tuple[str, str], chat: Chat, options: list[str], message: str
) -> None:
    code, out, err = chat(*(models[0] if word == "MODEL" else word for word in options), "--prompt", QUESTION)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_a_model_without_a_chat_template(tmp_path: Path, chat: Chat) -> None:
    model = save_random_model(tmp_path / "base", 3, template=False)
    code, out, err = chat(model, "--prompt", QUESTION)
    assert (code, out) == (2, "") and model in err and 'prompt.style = "raw"' in err
    raw = (model, "--prompt.style", "raw", "--prompt", QUESTION, "--prompt", QUESTION, "--max", "4")
    assert chat(*raw)[0] == 0
    # A template without room for earlier turns: every question is asked alone.
    code, out, err = chat(*raw, "--prompt.template", "{question}", "--temperature", "0")
    assert code == 0 and "is asked without the earlier turns" in err
    first, second = out.splitlines()
    assert first == second


def test_a_checkpoint_brings_its_runs_settings(models: tuple[str, str], tmp_path: Path, chat: Chat) -> None:
    config = """
[task]
name = "abacus"
[task.args]
max_start = 2
max_steps = 2
[prompt]
system = "Ann has"
[reward]
wrong = -0.5
unparsable = -0.5
workers = 0
[sampling]
max_new_tokens = 5
stop = [";"]
[eval]
temperature = 0.0
max_new_tokens = 0
"""
    run = Run.create(tmp_path, "toy", config)
    with checkpoints.saving(run.path, 10) as folder:
        shutil.copytree(models[0], folder / "model")
    cfg = settings_of(["run:toy@10"], {"runs_dir": str(tmp_path)})
    assert (cfg.eval.max_new_tokens, cfg.eval.temperature, cfg.prompt.system) == (5, 0.7, "Ann has")
    assert cfg.eval.stop == [";"]
    other = settings_of(["run:toy@10"], {"runs_dir": str(tmp_path), "task": "gsm8k"})
    assert (other.task.args, other.reward.wrong, other.prompt.system) == ({}, 0.0, "Ann has")
    code, out, err = chat("run:toy@last", "--runs_dir", str(tmp_path), "--prompt", "/task 3")
    assert code == 0 and Abacus(max_start=2, max_steps=2).prompts("test")[3].question in out
    assert "reward -0.5" in out and "cut off" in err
    code, out, _ = chat("run:toy@10", "--runs_dir", str(tmp_path), "--prompt", "/task gsm8k 3", "--task.path", "/none")
    assert code == 2 and out == ""


def environment() -> dict[str, str]:
    source = Path(__file__).resolve().parents[2] / "src"
    return {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}


def test_stray_bytes_in_a_pipe(models: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "assay", "chat", models[0], "--max", "3"]
    done = subprocess.run(command, input=b"\xff\xfe Ann\n/nonsense\nAnn", capture_output=True, env=environment())
    assert done.returncode == 2 and len(done.stdout.decode().splitlines()) == 2
    assert b"Traceback" not in done.stderr and b"unknown command /nonsense" in done.stderr


class Terminal:
    """A person at a terminal, 100 columns wide."""

    def __init__(self, *arguments: str) -> None:
        self._own, theirs = pty.openpty()
        command = [sys.executable, "-m", "assay", "chat", *arguments]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), start_new_session=True
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C. A prompt is printed just before its line is waited for; a signal between the two would be lost."""
        time.sleep(0.5)
        self.process.send_signal(signal.SIGINT)

    def read_until(self, pattern: str, limit_s: float = 60.0) -> str:
        seen, deadline = "", time.monotonic() + limit_s
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, f"no {pattern!r} in {seen!r}"
            if select.select([self._own], [], [], 0.1)[0]:
                seen += os.read(self._own, 65536).decode(errors="replace")
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


def test_two_models_side_by_side_in_a_terminal(models: tuple[str, str]) -> None:
    terminal = Terminal(*models, "--max", "12", "--reward.workers", "0")
    try:
        assert "/help lists all commands" in terminal.read_until("> $")
        terminal.type("/task abacus 3\r")
        seen = terminal.read_until(r"reward[^┃]*\n(.*\n)*.*> $")
        assert re.search(r"one.*┃.*two", seen)  # two columns
        assert re.search(r"reward 0.*│.*reward 0", seen)
        # Ctrl-C goes to the whole process as from a keyboard; twice in a row at the prompt leaves.
        terminal.interrupt()
        assert "once more leaves" in terminal.read_until(r"leaves.*\s+.*> $")
        terminal.interrupt()
        assert terminal.process.wait(timeout=20) == 130
    finally:
        terminal.close()
