"""SGLang servers that the engine starts: command, environment, and what is reported if they do not start."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parts import small_decoder, small_spec
from sglang_parts import RULES

from assay.config import SGLangConfig
from assay.engine.base import EngineOptions
from assay.integrations.sglang.servers import LaunchedSGLang
from assay.types import UserError


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of servers that did not start are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def servers(options: dict[str, Any] | None = None, **settings: Any) -> LaunchedSGLang:
    values = {"device": "cuda", "dtype": torch.bfloat16, "max_batch": 7} | (options or {})
    return LaunchedSGLang(SGLangConfig(**settings), EngineOptions(**values))


def test_a_missing_interpreter_or_package_is_reported() -> None:
    policy = small_decoder(small_spec())
    for settings, message in (
        ({"python": "/no/python"}, r"sglang.python = '/no/python' is not a program"),
        ({}, r"SGLang is not installed in this environment: set sglang.python"),
    ):
        with pytest.raises(UserError, match=message):
            servers(**settings).start(policy, lambda folder: None)


def test_arguments_follow_the_options_and_exist_in_sglang() -> None:
    launched = servers({"sleep_while_training": True}, args=["--tp-size", "2"], deterministic=True, gpu_memory=0.3)
    words = launched._arguments(1234, 96)
    text = " ".join(words)
    for part in ("--port 1234", "--max-running-requests 7", "--context-length 112", "--dtype bfloat16"):
        assert part in text
    for part in ("--load-format dummy", "--mem-fraction-static 0.3", "--cuda-graph-max-bs-decode 7"):
        assert part in text
    assert text.endswith("--enable-weights-cpu-backup --enable-deterministic-inference --tp-size 2")
    cpu = servers({"device": "cpu", "prefill_tokens": 512, "sleep_while_training": True})._arguments(1, 96)
    assert "--device cpu" in " ".join(cpu) and "--enable-memory-saver" not in cpu
    assert "--enable-weights-cpu-backup" not in servers({"sleep_while_training": True}, keep_weights=False)._arguments(
        1, 9
    )
    for word in [*words, *cpu]:
        if word.startswith("--") and word != "--config":  # not one of the arguments that are fields of a class
            assert word.removeprefix("--").replace("-", "_") in RULES["server_arguments"], word


def test_the_key_is_in_a_file_that_other_users_cannot_read() -> None:
    launched, other = servers(), servers()
    words = launched._arguments(1234, 96)
    file = Path(words[words.index("--config") + 1])
    assert json.loads(file.read_text()) == {"api-key": launched.key} and launched.key != other.key
    assert file.stat().st_mode & 0o077 == 0 and launched.key not in " ".join(words)


def test_the_environment_is_without_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SGLANG_RETURN_ORIGINAL_LOGPROB"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    environment = servers()._environment(0)
    assert not {"RANK", "WORLD_SIZE"} & set(environment)
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0" and environment["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    assert servers({"device": "cuda:2"})._environment(0)["CUDA_VISIBLE_DEVICES"] == "6"
    assert servers(devices=["1", "2,3"])._environment(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
