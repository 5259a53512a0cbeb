"""`assay serve MODEL -- COMMAND`: environment, exit codes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from serve_parts import save_folder, tiny_model

from assay.cli import serve
from assay.cli.main import main, parse

CLIENT = """
import json, os, sys, time, urllib.request
def models():
    return json.load(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models"))["data"][0]["id"]
print(models(), os.environ["OPENAI_API_KEY"], *sys.argv[1:], flush=True)
try:
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
