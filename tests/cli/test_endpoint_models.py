"""`assay eval` and `assay chat` with models behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns
from stub_endpoint import Fault, StubEndpoint, message, stub_endpoint

from assay.cli.main import main
from assay.system import openai_client as client_module

SECRET = "sk-this-is-secret-0123456789"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setenv("MY_KEY", SECRET)


def solves(body: dict[str, Any]) -> Any:
    """Adds two numbers; fails on sums with 13."""
    question = body["messages"][-1]["content"] if "messages" in body else body["prompt"].splitlines()[-2]
    first, second = (int(word) for word in question.replace("?", "").split() if word.isdigit())
    if 13 in (first, second):
        return Fault(400, message("unlucky"))
    return f"The sum is #### {first + second + (body['model'] == 'wrong')}"


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    rows = [{"id": f"p{n}", "prompt": f"What is {n} + {n + 1} ?", "answer": str(2 * n + 1)} for n in range(6)]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def evaluate(server: StubEndpoint, problems: Path, *words: str, models: tuple[str, ...] = ("right",)) -> list[Any]:
    out = problems.parent / "out.json"
    given = ["--openai.url", server.url, "--openai.retries", "1", "--openai.api_key_env", "MY_KEY", *words]
    code = main(["eval", *models, "--data", str(problems), "--engine", "openai", "--json", str(out), *given])
    return json.loads(out.read_text()) if code == 0 else [code]


def test_eval_of_two_models_without_weights(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--reward.extract", "hash", "--prompt.system", "add", "--eval.max_new_tokens", "9")
    with stub_endpoint(solves, key=SECRET, faults=(Fault(429, message("slow")), Fault(drop=True))) as server:
        right, wrong = evaluate(server, problems, *words, models=("right", "wrong"))
    assert (right["accuracy"], wrong["accuracy"], wrong["paired"]["lost"]) == (1.0, 0.0, 6)
    assert right["mean_length"] == 6  # as the endpoint counts
    first = server.requests[0]
    assert first["messages"][0] == {"role": "system", "content": "add"} and first["max_tokens"] == 9
    assert not server.problems and len(server.requests) == 14
    printed = capsys.readouterr()
    assert "right: 6 requests, 60 prompt tokens, 36 completion tokens, 2 repeated" in printed.out
    everything = printed.err + printed.out + "".join(file.read_text() for file in problems.parent.iterdir())
    assert SECRET not in everything


def test_a_failed_request_is_a_status(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlucky = {"id": "u", "prompt": "What is 13 + 4 ?", "answer": "17"}
    problems.write_text(problems.read_text() + json.dumps(unlucky) + "\n")
    answers = problems.parent / "answers.jsonl"
    with stub_endpoint(solves, key=SECRET) as server:
        (result,) = evaluate(server, problems, "--reward.extract", "hash", "--answers", str(answers))
    assert result["statuses"] == {"error": 1, "ok": 6}
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert rows[0]["completion"] == "The sum is #### 1" and rows[0]["length"] == 6
    assert not any(isinstance(value, list) for row in rows for value in row.values())  # text, no tokens
    assert "warning: right: 1 of 7 answers failed and count as not correct" in capsys.readouterr().out
    assert json.loads(answers.read_text().splitlines()[-1])["status"] == "error"


def test_a_wrong_key_ends_the_evaluation_in_one_line(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_endpoint(solves, key="another") as server:
        assert evaluate(server, problems, "--openai.max_concurrent", "1") == [2]
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("assay: ") and "openai.api_key_env" in error and SECRET not in error
    assert len(server.requests) == 1


def test_chat_streams_and_keeps_the_history(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand again\n"))
    with stub_endpoint(lambda body: f"message {len(body['messages'])}") as server:
        assert main(["chat", "m", "--engine", "openai", "--openai.url", server.url]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["message 1", "message 3"]
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "message 1"}
    assert all(body["stream"] for body in server.requests) and not server.problems


def rates(body: dict[str, Any]) -> Any:
    """A judge: 5 for answers with a 7, 1 for others; fails on answers with a 9."""
    answer = body["messages"][0]["content"].partition("<answer>")[2].partition("</answer>")[0]
    return Fault(400, message("no")) if "9" in answer else "5" if "7" in answer else "1"


def test_eval_with_a_model_as_judge(problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "answers.jsonl"
    with stub_endpoint(solves, key=SECRET) as server, stub_endpoint(rates, key=SECRET) as judge:
        words = ["--reward.function", "judge", "--judge.url", judge.url, "--judge.model", "j", "--judge.cache", ""]
        words += ["--judge.rubric", "Has a 7.", "--judge.api_key_env", "MY_KEY", "--answers", str(answers)]
        (result,) = evaluate(server, problems, *words)
    assert result["statuses"] == {"error": 1, "ok": 1, "wrong": 4} and not judge.problems
    printed = capsys.readouterr().out
    assert "judge j: 5 requests, 50 prompt tokens, 10 completion tokens" in printed
    assert "1 of 6 answers failed" in printed and SECRET not in printed


def test_score_with_a_model_as_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"completion": text, "question": "Which number?"} for text in ("7", "8", "9")]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with stub_endpoint(rates) as judge:
        words = ["--reward", "judge", "--judge.url", judge.url, "--judge.model", "j", "--judge.rubric", "Has a 7."]
        words += ["--judge.cache", str(tmp_path / "cache")]
        assert main(["score", str(source), "--out", str(out), *words]) == 0
        assert main(["score", str(source), "--out", str(out), "--force", "--correct", "2", *words]) == 0
    verdicts = [json.loads(line)["verdict"] for line in out.read_text().splitlines()]
    assert [(verdict["reward"], verdict["status"]) for verdict in verdicts] == [(2, "ok"), (0, "wrong"), (0, "error")]
    assert len(judge.requests) == 4 and "Which number?" in judge.requests[0]["messages"][0]["content"]
    assert "2 from the cache" in capsys.readouterr().err
    assert main(["score", str(source), "--out", str(out), "--force", "--reward", "judge", "--judge.modle", "j"]) == 2
    assert "did you mean 'judge.model'?" in capsys.readouterr().err


def test_training_with_a_model_as_judge(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    judged = ["--reward.function", "", "--reward.functions", '["task", "judge"]', "--reward.weights", "[1, 0.5]"]
    with stub_endpoint(lambda body: str(len(body["messages"][0]["content"]) % 5 + 1), key=SECRET) as judge:
        words = ["--judge.url", judge.url, "--judge.model", "j", "--judge.rubric", "Short.", "--judge.cache", ""]
        assert small.train(*judged, *words, "--judge.api_key_env", "MY_KEY", "--train.steps", 2) == 0
        assert small("eval", "run:small@last") == 2  # a run's settings do not decide where a key is sent
        assert "set judge.url" in capsys.readouterr().err
        assert small("eval", "run:small@last", "--judge.url", judge.url, "--judge.api_key_env", "MY_KEY") == 0
    assert not judge.problems
    metrics = [json.loads(line) for line in (small.runs / "small" / "metrics.jsonl").read_text().splitlines()]
    assert any(0 < row.get("parts/judge", 0) < 1 for row in metrics)
    files = [file for file in small.runs.rglob("*") if file.is_file()]
    assert files and not any(SECRET.encode() in file.read_bytes() for file in files)
    assert SECRET not in "".join(capsys.readouterr())


def test_an_endpoint_cannot_be_trained_or_served_and_styles_belong_to_apis(
    problems: Path, capsys: pytest.CaptureFixture[str], stderr_of: Callable[..., str]
) -> None:
    config, runs = problems.with_name("run.toml"), problems.with_name("runs")
    config.write_text('model = "preset:nano"\ntask = "abacus"\nengine = "openai"\n')
    assert "'engine.name'" in stderr_of(main(["train", str(config), "--runs_dir", str(runs)])) and not runs.exists()
    with stub_endpoint(solves) as server:
        assert evaluate(server, problems, "--prompt.style", "raw") == [2]
        assert 'needs openai.api = "completions"' in capsys.readouterr().err
        assert "assay serve has its own engine" in stderr_of(main(["serve", "m", "--engine", "openai"]))


def test_episodes_with_several_turns(tmp_path: Path) -> None:
    """The endpoint sees every turn as messages, and finds the number by bisection."""

    def guess(body: dict[str, Any]) -> str:
        low, high = 1, 100
        for asked, answered in zip(body["messages"][1::2], body["messages"][2::2], strict=True):
            assert (asked["role"], answered["role"]) == ("assistant", "user")
            if "higher" in answered["content"].lower():
                low = int(asked["content"]) + 1
            else:
                high = int(asked["content"]) - 1
        return str((low + high) // 2)

    out = tmp_path / "out.json"
    words = ["--env", "guess", "--env.args.high", "100", "--env.args.tries", "7", "--eval.final_examples", "4"]
    with stub_endpoint(guess) as server:
        code = main(["eval", "m", *words, "--engine", "openai", "--openai.url", server.url, "--json", str(out)])
    assert code == 0 and not server.problems
    (result,) = json.loads(out.read_text())
    assert result["accuracy"] == 1.0 and result["mean_length"] >= 1
    assert max(len(body["messages"]) for body in server.requests) > 3
