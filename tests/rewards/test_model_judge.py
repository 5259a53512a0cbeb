"""A model as judge: what it is asked, how its replies are read and cached, and what happens if it fails."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serve_parts import NAME, serving, tiny_model
from stub_endpoint import Fault, StubEndpoint, message, stub_endpoint

from assay.config import JudgeConfig
from assay.rewards.model_judge import ModelJudge, ReplyCache, is_reply, read_score, read_yes_no, tokens_of
from assay.system import openai_client as client_module
from assay.types import Prompt, Status, UserError

PROMPT = Prompt("p", ({"role": "system", "content": "hidden"}, {"role": "user", "content": "Who wrote {gold}?"}), "Ann")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)


def choice(*tokens: tuple[str, dict[str, float]]) -> dict[str, Any]:
    """A reply whose tokens have alternatives with these probabilities; the first is the one that was sampled."""
    content = []
    for token, alternatives in tokens:
        entries = [{"token": text, "logprob": math.log(p), "bytes": None} for text, p in alternatives.items()]
        content.append({"token": token, "logprob": math.log(alternatives[token]), "top_logprobs": entries})
    return {"text": "".join(token for token, _ in tokens), "logprobs": {"content": content}}


def reply_of(*tokens: tuple[str, dict[str, float]]) -> dict[str, Any]:
    answer = choice(*tokens)
    return {"text": answer["text"], "tokens": tokens_of(answer["logprobs"]["content"])}


@contextmanager
def judging(
    reply: Any, *faults: Fault, url: str = "", key: str = "", **settings: Any
) -> Iterator[tuple[StubEndpoint, ModelJudge]]:
    answering = reply if callable(reply) else lambda body: reply
    with stub_endpoint(answering, key, faults) as server:
        given = {"url": url or server.url, "model": "m", "cache": "", "retries": 1, "timeout_s": 5} | settings
        rubric = {} if "questions" in given or "rubric_file" in given else {"rubric": "Be right."}
        with ModelJudge(JudgeConfig(**rubric | given)) as judge:
            yield server, judge


def judge_text(judge: ModelJudge, text: str, prompt: Prompt = PROMPT) -> Any:
    ((verdict,),) = judge.judge_groups([([text], prompt.answer, judge.fields(prompt))])
    return verdict


# -- reading replies


def test_the_expected_score_is_a_mean_over_the_probabilities_of_scores() -> None:
    judged = read_score(reply_of(("4", {"4": 0.5, "5": 0.2, " 4": 0.1, "3": 0.1, "The": 0.1})), 5)
    expected = (4 * 0.6 + 5 * 0.2 + 3 * 0.1) / 0.9
    assert judged is not None and judged.score == pytest.approx(expected) and judged.written == "4"
    assert judged.reward == pytest.approx((expected - 1) / 4)


@pytest.mark.parametrize(
    ("text", "scale", "score"),
    [
        *(("4", 5, 4), ("Score: 3/5", 5, 3), ("I give 2 out of 5.", 5, 2), ("first 1, then 4.5", 5, 4.5)),
        ("85", 100, 85),
        *((text, 5, None) for text in ("", "great", "0", "6", "1000", "-")),
    ],
)
def test_without_probabilities_the_last_number_of_the_scale_counts(text: str, scale: int, score: float | None) -> None:
    judged = read_score({"text": text, "tokens": []}, scale)
    assert (judged and judged.score) == score
    assert judged is None or judged.reward == pytest.approx((judged.score - 1) / (scale - 1))


def test_probabilities_count_at_the_score_and_nowhere_else() -> None:
    reasoning = reply_of(("1", {"1": 0.5, "5": 0.5}), (" is", {" is": 1.0}), (" 4", {" 4": 0.75, " 2": 0.25}))
    judged = read_score(reasoning, 5)
    assert judged is not None and judged.score == pytest.approx(3.5)
    denominator = reply_of(("3", {"3": 0.5, "1": 0.5}), ("/", {"/": 1.0}), ("5", {"5": 0.9, "9": 0.1}))
    judged = read_score(denominator, 5)
    assert judged is not None and judged.score == pytest.approx(2.0)


def test_tokens_that_are_not_the_whole_score_are_not_used() -> None:
    for tokens in ([("4/5", {"4/5": 0.5, "1": 0.5})], [("7", {"7": 0.5, "1": 0.5}), ("5", {"5": 0.9, "0": 0.1})]):
        judged = read_score(reply_of(*tokens), 100 if len(tokens) == 2 else 5)
        assert judged is not None and judged.score == (75 if len(tokens) == 2 else 4)
    other_text = {"text": "4", "tokens": reply_of(("2", {"2": 0.5, "1": 0.5}))["tokens"]}
    judged = read_score(other_text, 5)
    assert judged is not None and judged.score == 4


def test_the_probability_of_yes() -> None:
    judged = read_yes_no(reply_of(("Yes", {"Yes": 0.5, " yes": 0.1, "No": 0.15, "Maybe": 0.25})))
    assert judged is not None and judged.reward == pytest.approx(0.8) and judged.written == "yes"
    judged = read_yes_no(reply_of(("No", {"No": 0.75, "Yes": 0.25})))
    assert judged is not None and judged.reward == pytest.approx(0.25) and judged.written == "no"
    for text, probability in (("Yes.", 1.0), ("no", 0.0), ("It is not wrong, so yes", 1.0)):
        judged = read_yes_no({"text": text, "tokens": []})
        assert judged is not None and judged.reward == probability
    assert read_yes_no({"text": "Yesterday nobody knew", "tokens": []}) is None


@pytest.mark.parametrize("content", [None, "x", [1], [{"token": "4"}], [{"token": "4", "logprob": -(10**400)}], [None]])
def test_probabilities_of_another_form_are_ignored(content: Any) -> None:
    assert tokens_of(content) == []


# -- requests


def test_the_request_has_rubric_question_answer_and_gold() -> None:
    with judging(choice(("5", {"5": 0.75, "1": 0.25}))) as (server, judge):
        verdict = judge_text(judge, "By {question} and {scale}.")
        assert verdict.reward == pytest.approx(0.75) and verdict.status is Status.OK and verdict.parsed == "5"
        assert verdict.parts == {"score": pytest.approx(4.0)}
        (body,) = server.requests
        (sent,) = body["messages"]
        asked = ("Be right.", "Who wrote {gold}?", "By {question} and {scale}.", "Ann", "from 1 (worst) to 5 (best)")
        assert [text for text in asked if text not in sent["content"]] == []
        assert "hidden" not in sent["content"] and body["top_logprobs"] == 20 and body["temperature"] == 0
        judge_text(judge, "x", Prompt("q", PROMPT.messages))
        assert "<reference>" not in server.requests[1]["messages"][0]["content"]
        assert server.problems == []


def test_questions_are_asked_one_by_one_and_averaged() -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        polite = "polite?" in body["messages"][0]["content"]
        return choice(("yes", {"yes": 0.9, "no": 0.1}) if polite else ("no", {"no": 0.7, "yes": 0.3}))

    with judging(reply, questions=["Is it polite?", "Is it short?"], threshold=0.7) as (server, judge):
        verdict = judge_text(judge, "a")
        assert verdict.parts == {"yes_1": pytest.approx(0.9), "yes_2": pytest.approx(0.3)}
        assert verdict.reward == pytest.approx(0.6) and verdict.status is Status.WRONG
        assert len(server.requests) == 2 and server.problems == []


def test_a_template_and_a_rubric_from_files(tmp_path: Path) -> None:
    (tmp_path / "rubric.md").write_text("Be kind.\n")
    (tmp_path / "template.txt").write_text('{"task": "{rubric}", "text": "{answer}"}')
    files = {"rubric_file": str(tmp_path / "rubric.md"), "template_file": str(tmp_path / "template.txt")}
    with judging("3", **files) as (server, judge):
        assert [verdict.reward for verdict in judge.judge([("hello", "", {})] * 6)] == [0.5] * 6
        (request,) = server.requests  # equal ones are sent once
        assert request["messages"][0]["content"] == '{"task": "Be kind.", "text": "hello"}'
    (tmp_path / "template.txt").write_text("{rubric}")
    with pytest.raises(UserError, match=r"lacks \{answer\}"), judging("3", **files):
        pass


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": ""}, "judge.model"),
        ({"rubric": ""}, "one of judge.rubric"),
        ({"questions": ["Is it?"], "rubric": "x"}, "one of judge.rubric"),
        ({"rubric_file": "/nowhere/rubric.md"}, "judge.rubric_file: cannot read"),
        ({"url": ""}, "set judge.url"),
    ],
)
def test_incomplete_settings_are_an_error(settings: dict[str, Any], problem: str) -> None:
    given = {"url": "http://127.0.0.1:9", "model": "m", "cache": ""}
    rubric = {} if {"questions", "rubric_file"} & settings.keys() else {"rubric": "x"}
    with pytest.raises(UserError, match=problem):
        ModelJudge(JudgeConfig(**given | rubric | settings))


def test_requests_are_concurrent_and_verdicts_in_order() -> None:
    together = threading.Barrier(4)

    def reply(body: dict[str, Any]) -> str:
        together.wait(20)  # never answers one request at a time
        return body["messages"][0]["content"].partition("answer is ")[2][0]

    with judging(reply, max_concurrent=4) as (server, judge):
        texts = [f"answer is {n}" for n in (1, 5, 3, 2)]
        reports: list[tuple[int, int]] = []
        (verdicts,) = judge.judge_groups([(texts, "", {})], lambda *counts: reports.append(counts))
        assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.5, 0.25]
        assert server.most_running == 4 and reports == [(n, 4) for n in range(1, 5)]
        assert not (judge._asked or judge._waiting or judge._verdicts)  # nothing is kept of requests that have ended


def test_an_interruption_ends_all_requests_without_a_message(caplog: pytest.LogCaptureFixture) -> None:
    """Requests must not outlive their client, nor continue for answers that nobody waits for."""
    asked, go = threading.Semaphore(0), threading.Event()

    def reply(body: dict[str, Any]) -> str:
        asked.release()
        if "quick" not in body["messages"][0]["content"]:
            go.wait(60)
        return "5"

    def interrupt(done: int, count: int) -> None:
        assert all(asked.acquire(timeout=60) for _ in range(3))
        raise KeyboardInterrupt

    with judging(reply, max_concurrent=4) as (server, judge):
        with pytest.raises(KeyboardInterrupt):
            judge.judge([(text, "", {}) for text in ["quick", *map(str, range(40))]], interrupt)
        go.set()
        judge.close()
        gc.collect()
        assert len(server.requests) < 10 and not (judge._asked or judge._waiting or judge._verdicts)
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


def test_replies_are_read_from_the_cache(tmp_path: Path) -> None:
    answer = choice(("4", {"4": 0.5, "2": 0.5}))
    with judging(answer, cache=str(tmp_path)) as (server, judge):
        first = judge_text(judge, "a")
        assert judge_text(judge, "a") == first and len(server.requests) == 1
        assert "1 from the cache" in judge.describe_usage()
        judge_text(judge, "b")
        assert len(server.requests) == 2
        with ModelJudge(judge.cfg) as again:  # another process
            assert judge_text(again, "a") == first
        with ModelJudge(judge.cfg.model_copy(update={"model": "n"})) as other:
            judge_text(other, "a")
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    "tokens",
    [[["4", {"4": "x", "2": -1}]], [["4", {"4": math.nan, "2": -1}]], [["4", {"4": -(10**400), "2": 0}]], [["4"]], [5]],
)
def test_a_cached_reply_of_another_form_is_not_used(tokens: list[object]) -> None:
    assert is_reply({"text": "4", "tokens": [["4", {"4": -0.5}]]}) and not is_reply({"text": "4", "tokens": tokens})


def test_neither_failures_nor_the_key_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-0123456789")
    settings = {"key": "sk-secret-0123456789", "api_key_env": "MY_KEY", "cache": str(tmp_path)}
    with judging("4", Fault(400, message("no")), **settings) as (server, judge):
        assert [judge_text(judge, "a").status for _ in range(2)] == [Status.ERROR, Status.OK]
        assert len(server.requests) == 2
    assert "sk-secret" not in "".join(file.read_text() for file in tmp_path.rglob("*.json"))


# -- failures


@pytest.mark.parametrize(
    ("reply", "status", "detail"),
    [
        (Fault(500, message("broken")), Status.ERROR, "answered 500: broken"),
        (Fault(401, message("no")), Status.ERROR, "judge.api_key_env"),
        (Fault(content=b"garbage"), Status.ERROR, "no JSON object"),
        (Fault(content={"choices": []}), Status.ERROR, "has no text"),
        (Fault(drop=True), Status.ERROR, "not reachable"),
        (Fault(content={}, delay_s=0.5), Status.TIMEOUT, "no answer within 0.1 s"),
        ("I cannot judge this.", Status.ERROR, "replied 'I cannot judge this.', in which there is no score"),
    ],
)
def test_a_failure_is_a_status(reply: Any, status: Status, detail: str) -> None:
    with judging(reply, timeout_s=0.1 if status is Status.TIMEOUT else 5) as (_, judge):
        verdict = judge_text(judge, "a")
        assert verdict.status is status and detail in verdict.detail
        assert verdict.reward == 0.0 and verdict.parts == {}


def test_an_endpoint_with_few_alternatives_is_asked_for_fewer() -> None:
    def reply(body: dict[str, Any]) -> Any:
        if body["top_logprobs"] > 5:
            return Fault(400, message("top_logprobs must be at most 5"))
        return choice(("4", {"4": 0.5, "2": 0.5}))

    with judging(reply) as (server, judge):
        assert judge_text(judge, "a").parts["score"] == pytest.approx(3.0)
        judge_text(judge, "b")
        assert [body["top_logprobs"] for body in server.requests] == [20, 5, 5]


def test_a_random_model_behind_assay_serve_writes_no_score(recwarn: pytest.WarningsRecorder) -> None:
    """The server reports token probabilities, among which there is no score: the failure is a status."""
    model = tiny_model(max_length=512)
    with serving(model) as server, judging("4", url=server.url, model=NAME) as (_, judge):
        verdict = judge_text(judge, "a", Prompt("p", ({"role": "user", "content": "?"},)))
        assert verdict.status is Status.ERROR and "in which there is no score" in verdict.detail
        assert judge.usage.requests == 1
    assert not [one for one in recwarn if "reports no token probabilities" in str(one.message)]


REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_a_reply_is_found_by_its_request(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "new" / "folder")
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, {"text": "é\ud800"})
    assert ReplyCache(tmp_path / "new" / "folder").get(dict(reversed(REQUEST.items()))) == {"text": "é\ud800"}
    assert cache.get(REQUEST | {"model": "n"}) is None
    assert cache.get(REQUEST | {"messages": [{"role": "user", "content": "hello "}]}) is None


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b'{"text": "cut', b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"text": 5}'),
        *(os.mkfifo, lambda file: os.symlink("/dev/zero", file)),
    ],
)
def test_a_damaged_file_counts_as_missing_with_one_warning_and_is_replaced(tmp_path: Path, damage: Any) -> None:
    cache = ReplyCache(tmp_path, lambda reply: isinstance(reply["text"], str))
    cache.put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    file.unlink()
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    else:
        damage(file)
    with pytest.warns(UserWarning, match=r"judge.cache: ") as warned:
        assert cache.get(REQUEST) is None and cache.get(REQUEST) is None
    assert len(warned) == 1
    cache.put(REQUEST, {"text": "b"})
    assert cache.get(REQUEST) == {"text": "b"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change the owner of a file")
def test_replies_of_other_users_count_only_where_not_everyone_may_write(tmp_path: Path) -> None:
    ReplyCache(tmp_path).put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    os.chown(file, 12345, -1)
    assert ReplyCache(tmp_path).get(REQUEST) == {"text": "a"}  # a folder that a team shares
    tmp_path.chmod(0o1777)
    with pytest.warns(UserWarning, match="another user"):
        assert ReplyCache(tmp_path).get(REQUEST) is None


def write_often(folder: Path, number: int) -> None:
    cache = ReplyCache(folder)
    for _ in range(100):
        cache.put(REQUEST, {"text": str(number) * 5000})


def test_processes_do_not_disturb_each_other(tmp_path: Path) -> None:
    write_often(tmp_path, 0)
    writers = [multiprocessing.get_context("fork").Process(target=write_often, args=(tmp_path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        reply = ReplyCache(tmp_path).get(REQUEST)
        assert reply is not None and len(reply["text"]) == 5000
        seen |= {frozenset(reply["text"])}
    assert all(len(digits) == 1 for digits in seen)  # never a mixture
    assert len(list(tmp_path.rglob("*.*"))) == 1  # no temporary files are left


def test_a_reply_that_cannot_be_stored_is_no_error(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path)
    cache.put(REQUEST, {"text": "a"})
    (file,) = tmp_path.rglob("*.json")
    folder = file.parent
    file.unlink()
    folder.rmdir()
    folder.write_text("")  # a file where the folder should be
    with pytest.warns(UserWarning, match=r"judge.cache: cannot write") as warned:
        cache.put(REQUEST, {"text": "a"})
        assert cache.get(REQUEST) is None
    assert len(warned) == 1
    with pytest.raises(UserError, match=r"judge.cache: cannot create"):
        ReplyCache(folder / "below")
