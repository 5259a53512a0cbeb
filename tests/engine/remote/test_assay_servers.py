"""`assay serve` processes that the engine starts: command and environment. test_engine_server.py starts real ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from assay.cli import serve
from assay.cli.main import parse
from assay.config import ServerConfig
from assay.engine.base import EngineOptions
from assay.engine.remote.assay import LaunchedAssay
from assay.engine.remote.server_side import KEY
from assay.types import UserError


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
