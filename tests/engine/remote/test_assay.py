"""The engine assay: servers given by URL, and servers that it starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from http_parts import small_server
from safetensors.torch import load_file
from serve_parts import byte_tokenizer, renderer, serving, tiny_model
from stepped import Stepped

from assay.cli import serve
from assay.cli.main import main, parse
from assay.config import ServerConfig
from assay.engine import Request, RequestError, SamplingParams, generate, make_engine
from assay.engine.base import EngineOptions
from assay.engine.remote.assay import AssayEngine, LaunchedAssay
from assay.engine.remote.server_side import KEY
from assay.models.base import fingerprint
from assay.models.decoder import Decoder
from assay.testing.engine import check_engine
from assay.types import UserError

ROOT = Path(__file__).resolve().parents[3]
PROMPT = byte_tokenizer().encode("Ann has 7")
REQUESTS = [Request([*PROMPT, n], SamplingParams(n=3, max_new_tokens=12, temperature=0.8), seed=n) for n in range(8)]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "max_length": 128, "max_batch": 16}


@contextmanager
def connected(*urls: str, model: Any = None, **changes: Any) -> Iterator[AssayEngine]:
    settings = ServerConfig(urls=list(urls), **changes.pop("settings", {}))
    options = {**OPTIONS, "decode": renderer().decode, **changes}
    engine = make_engine("assay", model or tiny_model(), {"settings": settings}, **options)
    assert isinstance(engine, AssayEngine)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(http={"allow_updates": True}, max_batch=16) as server:
        yield server.url


def test_the_engine_passes_all_checks(url: str) -> None:
    with connected(url) as engine:
        assert check_engine(Stepped(engine), PROMPT, tiny_model(), renderer().decode) == []
        capabilities = engine.info.capabilities
        assert capabilities.exact_seeds and capabilities.fingerprint and not capabilities.handles


def test_completions_are_those_of_the_native_engine_bit_by_bit(url: str) -> None:
    native = make_engine("native", tiny_model(), **OPTIONS)
    with connected(url) as engine:
        assert generate(engine, REQUESTS) == generate(native, REQUESTS)
        assert engine.score([PROMPT], 0.7) == native.score([PROMPT], 0.7)


def test_weights_reach_all_servers(url: str) -> None:
    other = tiny_model(seed=3)
    with serving(http={"allow_updates": True}, max_batch=16) as second, connected(url, second.url) as engine:
        engine.update_weights(other, version=7)
        assert engine.fingerprint() == fingerprint(other.weights(), torch.float32)
        assert len(engine.digests()) == len(dict(other.weights()))
        native = make_engine("native", other, **OPTIONS)
        native.update_weights(other, version=7)
        assert generate(engine, REQUESTS) == generate(native, REQUESTS)
        assert not list(engine.transport.folder.glob("weights-*"))  # type: ignore[union-attr]


def refusal(*urls: str, **changes: Any) -> str:
    with pytest.raises(UserError) as raised, connected(*urls, **changes):
        pass
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_servers_that_cannot_be_used_are_reported_before_the_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert "is not reachable" in refusal(f"http://127.0.0.1:{port}")
    assert "assay serve MODEL --allow-updates" in refusal(f"http://127.0.0.1:{port}")
    with serving() as plain:
        assert "start it with --allow-updates" in refusal(plain.url)
    assert "max_length = 256, the policy needs 512" in refusal(url, model=tiny_model(0, 512), max_length=512)
    assert "--engine.dtype bfloat16" in refusal(url, dtype=torch.bfloat16)
    assert "NOT_SET" in refusal(url, settings={"api_key_env": "NOT_SET"})
    assert "needs servers on the trainer's GPU" in refusal(url, settings={"transport": "ipc"})
    monkeypatch.setenv("TEST_KEY", "right")
    with serving(http={"allow_updates": True, "api_key_env": "TEST_KEY"}) as locked:
        assert "refused access (401)" in refusal(locked.url)
        with connected(locked.url, settings={"api_key_env": "TEST_KEY"}) as engine:
            assert engine.fingerprint()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, b""), "is no assay server"),
        ((500, {"error": "upstream 404"}), "answered 500: upstream 404"),
        ((200, b"<html>"), "not JSON"),
        ((200, {"version": 0}), "no description"),
    ],
)
def test_another_program_is_reported(answer: Any, message: str) -> None:
    with small_server(lambda path, body: answer) as other:
        assert message in refusal(other.url)


def test_a_server_with_another_model_of_the_same_vocabulary_is_refused_before_the_run() -> None:
    spec = replace(tiny_model().spec, hidden=64)
    with serving(Decoder(spec), http={"allow_updates": True}, max_batch=16) as other:
        text = refusal(other.url)
    assert "shape" in text and "the server must serve the model of model.source" in text


GARBAGE = {"/engine/weights": "not JSON", "/engine/fingerprint": "no valid 'fingerprint'", "/engine/score": "no scores"}


@pytest.mark.parametrize("path", GARBAGE)
def test_garbage_in_answers_is_reported_in_one_line(url: str, path: str) -> None:
    """A server that describes itself correctly, and then answers one path with garbage."""
    info = httpx.get(f"{url}/engine/info").json()
    answers: dict[str, Any] = {"/engine/info": info, path: b"<html>" if path == "/engine/weights" else [1]}
    with small_server(lambda at, body: (200, answers.get(at, {}))) as server:
        if path == "/engine/weights":
            text = refusal(server.url)
        else:
            with connected(server.url) as engine, pytest.raises(UserError) as raised:
                engine.fingerprint() if path == "/engine/fingerprint" else engine.score([PROMPT])
            text = str(raised.value)
    assert GARBAGE[path] in text and "\n" not in text


def test_weights_of_another_model_are_rejected_by_name(url: str) -> None:
    class Renamed:
        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in tiny_model().weights():
                yield name.replace("layers.1", "layers.9"), weight

    with connected(url) as engine:
        with pytest.raises(UserError, match=r"no weight 'model\.layers\.9"):
            engine.update_weights(Renamed(), version=1)
        engine.update_weights(tiny_model(), version=2)
        assert engine.fingerprint() == fingerprint(tiny_model().weights(), torch.float32)


def test_other_weights_of_a_server_are_noticed(url: str) -> None:
    with connected(url) as engine, connected(url) as other:
        engine.update_weights(tiny_model(), version=5)
        other.update_weights(tiny_model(seed=1), version=0)  # as a server does when it starts
        with pytest.raises(RequestError, match="weights of version 0, not 5: it was restarted"):
            generate(engine, REQUESTS[:1])
        engine.update_weights(tiny_model(), version=6)
        other.update_weights(tiny_model(seed=1), version=7)
        with pytest.raises(RequestError, match="weights of version 7, but this run has sent only versions up to 6"):
            generate(engine, REQUESTS[:1])


@pytest.mark.slow
def test_started_servers_are_started_again_and_end_with_the_engine() -> None:
    lines: list[str] = []
    settings = {"settings": ServerConfig(servers=2), "save_tokenizer": byte_tokenizer().save}
    engine = make_engine("assay", tiny_model(), settings, **OPTIONS, notify=lines.append)
    assert isinstance(engine, AssayEngine) and engine.launched is not None
    programs, folder = list(engine.launched.programs.values()), engine.launched.folder
    assert len(programs) == 2 and engine.fingerprint() == fingerprint(tiny_model().weights(), torch.float32)
    assert generate(engine, REQUESTS) == generate(make_engine("native", tiny_model(), **OPTIONS), REQUESTS)
    os.kill(programs[0].pid, signal.SIGKILL)
    generate(engine, REQUESTS)  # the other server serves all requests
    assert len(lines) == 1 and "it ended (killed by SIGKILL)" in lines[0]
    deadline, version = time.monotonic() + 120, 0
    while len(lines) == 1:  # the server is started again, and joins as soon as it is ready
        assert time.monotonic() < deadline
        version += 1
        engine.update_weights(tiny_model(seed=1), version)
        time.sleep(0.2)
    assert f"serves again, with the weights of version {version}" in lines[1]
    assert engine.fingerprint() == fingerprint(tiny_model(seed=1).weights(), torch.float32)
    native = generate(make_engine("native", tiny_model(seed=1), **OPTIONS), REQUESTS)
    for ours, expected in zip(generate(engine, REQUESTS), native, strict=True):
        assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
    programs = [*programs, *engine.launched.programs.values()]
    engine.close()
    assert all(program.ended for program in programs)
    assert folder.exists()  # the log of the server that was killed is kept
    for program in programs:
        with pytest.raises(ProcessLookupError):
            os.kill(program.pid, 0)


@pytest.mark.slow
def test_training_gives_the_same_bits_as_the_native_engine(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def reward(completion, answer):\n    return sum(map(ord, completion)) % 4 / 3\n"
    )
    small = ["--sft.steps=2", "--train.steps=2", "--eval.examples=4", "--eval.final_examples=4", "--device=cpu"]
    small += [f"--reward.function={tmp_path}/reward.py:reward", "--reward.workers=0"]
    words = ["train", str(ROOT / "configs" / "demo.toml"), f"--runs_dir={tmp_path}", *small]
    assert main([*words, "--name=native", "--engine.name=native"]) == 0
    assert main([*words, "--name=assay", "--engine.name=assay"]) == 0

    def metrics(name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        timed = ("time/", "speed/", "memory/", "throughput/")
        return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]

    ours, theirs = metrics("assay"), metrics("native")
    assert ours == theirs and {line["step"] for line in ours} >= {1, 2}
    assert all(line["optim/grad_norm"] > 0 for line in ours if line.get("optim/lr") and line["step"])
    weights = [next((tmp_path / name / "checkpoints").glob("*2/model/*.safetensors")) for name in ("assay", "native")]
    first, second = map(load_file, weights)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.slow
def test_weights_reach_a_server_on_the_same_gpu_without_files() -> None:
    options = {**OPTIONS, "device": torch.device("cuda", 0), "dtype": torch.bfloat16, "kv_cache_gib": 0.25}
    model = tiny_model().to("cuda")
    settings = ServerConfig(transport="ipc")
    engine = make_engine("assay", model, {"settings": settings, "save_tokenizer": byte_tokenizer().save}, **options)
    try:
        for version in (1, 2):
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.01
            engine.update_weights(model, version)
            assert engine.fingerprint() == fingerprint(model.weights(), torch.bfloat16)
        (completions,) = generate(engine, REQUESTS[:1])
        assert all(completion.version == 2 for completion in completions)
    finally:
        engine.close()


def servers(options: dict[str, Any] | None = None, **settings: Any) -> LaunchedAssay:
    values = {"device": "cpu", "dtype": torch.bfloat16, "max_batch": 7, "kv_cache_gib": 0.5} | (options or {})
    return LaunchedAssay(ServerConfig(**settings), EngineOptions(**values))


def test_the_command_has_the_settings_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = servers({"sleep_while_training": True}, devices=["cuda:1", "cuda:2"])
    words = launched._command(1, 1234, 96)
    assert words[:4] == [sys.executable, "-m", "assay", "serve"]
    monkeypatch.setenv(KEY, "secret")
    cfg = serve.settings_of(parse(serve, "serve", words[4:]))  # the command line accepts all of them
    assert (cfg.http.port, cfg.http.allow_updates, cfg.http.api_key_env) == (1234, True, KEY)
    assert (cfg.engine.dtype, cfg.engine.max_batch, cfg.engine.kv_cache_gib) == ("bfloat16", 7, 0.5)
    assert (cfg.device, cfg.model.max_length, cfg.engine.sleep_while_training) == ("cuda:2", 96, True)


def test_keys_are_in_the_environment_and_differ() -> None:
    first, second = servers(), servers()
    assert first._environment(0)[KEY] == first.key != second.key
    assert first.key not in " ".join(first._command(0, 1, 96))  # other users can see arguments


def test_a_model_of_another_family_is_refused() -> None:
    class Other:
        max_length = 96

    launched = servers()
    with pytest.raises(UserError, match=r"must be started by hand: set server\.urls"):
        launched.start(Other(), lambda folder: None)  # type: ignore[arg-type]
    assert not launched.folder.exists()
