"""One server for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from serve_parts import RunningServer, save_folder, serving, tiny_model
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of the server in transformers."""
    folder = save_folder(tiny_model(), tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
