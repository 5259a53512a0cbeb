"""A real SGLang server on a GPU for the tests of this folder.

ASSAY_SGLANG_PYTHON: interpreter of an environment with SGLang; default: .venv-sglang/bin/python.
ASSAY_SGLANG_ARGS: more arguments of the server, such as "--attention-backend triton".
ASSAY_SMOLLM2: see tests/helpers/real_server.py.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_server import *  # noqa: F403 (fixtures)
from real_server import CUDA, DEVICE, DTYPE, ROOT

from assay.config import SGLangConfig
from assay.engine import make_engine
from assay.integrations.sglang import SGLangEngine
from assay.models import load_model
from assay.text import Tokenizer


@pytest.fixture(scope="session")
def sglang_python() -> str:
    python = Path(os.environ.get("ASSAY_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    if not CUDA:
        pytest.skip("SGLang needs a GPU")
    if not python.exists():
        pytest.skip("SGLang is not installed: set ASSAY_SGLANG_PYTHON")
    return str(python)


@pytest.fixture(scope="session")
def sglang_args() -> list[str]:
    return shlex.split(os.environ.get("ASSAY_SGLANG_ARGS", ""))


@pytest.fixture(scope="session")
def engine(
    sglang_python: str, sglang_args: list[str], model_folder: Path, tokenizer: Tokenizer
) -> Iterator[SGLangEngine]:
    """The engine sglang with a server that it has started. Tests leave other weights in it."""
    model = load_model(str(model_folder), device=torch.device(DEVICE), dtype=DTYPE)
    config = SGLangConfig(python=sglang_python, args=sglang_args, gpu_memory=0.1)
    engine = make_engine(
        "sglang",
        model,
        {"settings": config, "save_tokenizer": tokenizer.save},
        decode=tokenizer.decode,
        **{"device": DEVICE, "dtype": DTYPE, "max_batch": 16, "max_length": 256, "sleep_while_training": True},
    )
    assert isinstance(engine, SGLangEngine)
    yield engine
    engine.close()
