from __future__ import annotations

import os
from pathlib import Path

import pytest

from assay.text import Tokenizer, load_tokenizer

MODELS = Path(os.environ.get("ASSAY_MODELS", Path(__file__).parents[2] / ".models"))


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The real tokenizer of SmolLM2-135M-Instruct, from its GGUF file."""
    path = MODELS / "smollm2-135m-instruct.q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"no {path.name} under {MODELS}")
    return load_tokenizer(str(path))
