"""A real vLLM server for the tests of this folder.

ASSAY_VLLM_PYTHON: interpreter of an environment with vLLM; default: .venv-vllm, which `make test-vllm` creates.
ASSAY_SMOLLM2: see tests/helpers/real_server.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_server import *  # noqa: F403 (fixtures)
from real_server import CUDA, DEVICE, DTYPE, ROOT

from assay.config import VLLMConfig
from assay.engine import make_engine
from assay.integrations.vllm import VLLMEngine
from assay.models import load_model
from assay.text import Tokenizer


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = Path(os.environ.get("ASSAY_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.exists():
        pytest.skip("vLLM is not installed: run make test-vllm, or set ASSAY_VLLM_PYTHON")
    return str(python)


@pytest.fixture(scope="session")
def engine(vllm_python: str, model_folder: Path, tokenizer: Tokenizer) -> Iterator[VLLMEngine]:
    """The engine vllm with a server that it has started. Tests leave other weights in it."""
    model = load_model(str(model_folder), device=torch.device(DEVICE), dtype=DTYPE)
    settings = {"settings": VLLMConfig(python=vllm_python, gpu_memory=0.1), "save_tokenizer": tokenizer.save}
    options: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "max_batch": 16, "max_length": 256}
    options["sleep_while_training"] = CUDA
    engine = make_engine("vllm", model, settings, decode=tokenizer.decode, **options)
    assert isinstance(engine, VLLMEngine)
    yield engine
    engine.close()
