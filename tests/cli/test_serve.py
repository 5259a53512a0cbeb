"""`assay serve`: mistakes are reported before a model is loaded; settings of a run's checkpoint; a client after --."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serve_parts import save_folder, tiny_model

from assay.cli import serve
from assay.cli.main import main, parse


def test_short_options_are_settings() -> None:
    cfg = serve.settings_of(
        parse(serve, "serve", ["model", "--port", "9000", "--host", "::1", "--name", "m", "--allow-updates"])
    )
    assert (cfg.http.port, cfg.http.host, cfg.http.name, cfg.http.allow_updates) == (9000, "::1", "m", True)


def test_processes_for_http_are_the_default_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(serve.sys, "platform", "linux")
    assert serve.default_frontends("cuda:0") == 4 and serve.default_frontends("cpu") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/at/all"], "no such"),
        (["model", "--port", "70000"], "http.port"),
        (["model", "--host", "0.0.0.0"], "set an API key"),
        (["model", "--api-key-env", "NOT_SET_HERE"], "NOT_SET_HERE"),
        (["preset:nano"], "untrained"),
        (["model", "--prompt.few_shot", "2"], "few_shot_file"),
        ([], "MODEL"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = [] if "--port" in words else ["--port", "0"]
    assert main(["serve", *words, *port]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main(["serve", "model", "--port", str(other.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_settings_without_effect_on_a_classification_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    words = ["--prompt.system", "Hi", "--http.frontends", "2", "--allow-updates"]
    assert main(["serve", str(tmp_path), "--port", "0", *words]) == 2
    message = "--prompt.system, --http.frontends, --allow-updates cannot be used with a classification model"
    assert message in capsys.readouterr().err.splitlines()[-1]


# `assay serve MODEL -- COMMAND`: environment, exit codes and signals


CLIENT = """
import json, os, sys, time, urllib.request
def models():
    return json.load(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models"))["data"][0]["id"]
try:
    print(models(), os.environ["OPENAI_API_KEY"], *sys.argv[1:], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print(models(), flush=True)  # the server still runs
    sys.exit(7)
"""


def test_words_after_two_dashes_belong_to_the_client(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(serve, "serve", ["model", "--port", "9000", "--", "client", "--port", "1", "--debug", "-h"])
    assert args.client == ["--", "client", "--port", "1", "--debug", "-h"]
    assert serve.settings_of(args).http.port == 9000
    for words in (["no-such-program", "-h"], []):
        assert main(["serve", "model", "--port", "0", "--", *words]) == 2
        assert "comes the command of a client" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_server_ends_with_the_client_and_its_exit_code(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder = save_folder(tiny_model(), tmp_path)
    words = [sys.executable, "-m", "assay", "serve", str(folder), "--name", "tiny", "--port", "0", "--device", "cpu"]
    words += ["--", sys.executable, "-c", CLIENT, "--debug"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "tiny none --debug\n"
            if number == signal.SIGINT:  # a terminal sends it to all of its processes
                os.killpg(process.pid, number)
                assert process.stdout.readline() == "tiny\n"
            else:
                process.send_signal(number)
            assert process.wait(30) == code
        finally:
            process.kill()
