"""Servers that the engine starts: command, environment, and what is reported if they do not start."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parts import small_decoder, small_spec

from assay.config import VLLMConfig
from assay.engine.base import EngineOptions
from assay.engine.remote.server_side import KEY
from assay.integrations.vllm.access import KeyCheck
from assay.integrations.vllm.servers import LaunchedVLLM
from assay.types import UserError

POLICY = small_decoder(small_spec())


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of servers that did not start are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def servers(options: dict[str, Any] | None = None, **settings: Any) -> LaunchedVLLM:
    values = {"device": "cpu", "dtype": torch.float32, "max_batch": 7} | (options or {})
    return LaunchedVLLM(VLLMConfig(**settings), EngineOptions(**values))


def start(launched: LaunchedVLLM, tmp_path: Path) -> None:
    launched.start(POLICY, lambda folder: (folder / "tokenizer.json").write_text("{}"))


def test_a_missing_interpreter_or_package_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vllm.python = '/no/python' is not a program"):
        start(servers(python="/no/python"), tmp_path)
    with pytest.raises(UserError, match=r"not installed in this environment: set vllm.python"):
        start(servers(), tmp_path)


def test_arguments_follow_the_options() -> None:
    launched = servers(args=["--swap-space", "1"], transport="nccl")
    text = " ".join(launched._arguments(1234, 96))
    for part in ("--port 1234", "--max-num-seqs 7", "--max-model-len 97", "--dtype float32", "--load-format dummy"):
        assert part in text
    assert "--logprobs-mode processed_logprobs" in text and text.endswith("--enforce-eager --swap-space 1")
    cuda = servers({"device": "cuda", "sleep_while_training": True, "kv_cache_gib": 2.0}, gpu_memory=0.3)
    text = " ".join(cuda._arguments(1, 96))
    assert "--gpu-memory-utilization 0.3" in text and "--enable-sleep-mode" in text and "--enforce-eager" not in text
    assert "--kv-cache-memory-bytes 2147483648" in text


def test_the_key_is_in_the_environment_and_checked_by_a_middleware() -> None:
    launched = servers()
    words = launched._arguments(1234, 96)
    assert words[words.index("--middleware") + 1] == f"{KeyCheck.__module__}.{KeyCheck.__qualname__}"
    assert launched._environment(0)[KEY] == launched.key and launched.key not in " ".join(words)


def test_the_environment_is_without_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    environment = servers()._environment(0)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"] == os.environ["PATH"]
    assert servers({"device": "cuda:2"})._environment(0)["CUDA_VISIBLE_DEVICES"] == "6"
    assert servers({"device": "cuda"}, devices=["1", "2,3"])._environment(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
