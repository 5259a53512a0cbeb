"""A real SGLang server on a GPU for the tests of this folder.

ASSAY_SGLANG_PYTHON: interpreter of an environment with SGLang; default: .venv-sglang/bin/python.
ASSAY_SGLANG_ARGS: more arguments of the server, such as "--attention-backend triton".
ASSAY_SMOLLM2: SmolLM2-135M-Instruct as a folder or GGUF file; without it, a small random Llama is served.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

CUDA = torch.cuda.is_available()
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("train", "engine")]

from assay.config import SGLangConfig  # noqa: E402
from assay.engine import make_engine  # noqa: E402
from assay.engine.remote.sglang.engine import SGLangEngine  # noqa: E402
from assay.models import Decoder, ModelSpec, load_model  # noqa: E402
from assay.models.export import save_model  # noqa: E402
from assay.tasks import make_task  # noqa: E402
from assay.text import Tokenizer, load_tokenizer, word_tokenizer  # noqa: E402


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
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M or a random Llama, in float32, with its tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    if source := os.environ.get("ASSAY_SMOLLM2"):
        model, tokenizer = load_model(source, device=torch.device("cpu")), load_tokenizer(source)
    else:
        model, tokenizer = random_llama()
    save_model(model, folder, torch.float32, eos_ids=tokenizer.eos_ids)
    tokenizer.save(folder)
    return folder


def random_llama() -> tuple[Decoder, Tokenizer]:
    """With heads of size 64, which all attention kernels have."""
    tokenizer = word_tokenizer(make_task("abacus").words())  # type: ignore[attr-defined]
    sizes = {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 384}
    model = Decoder(ModelSpec("llama", vocab_size=tokenizer.vocab_size, max_length=512, tied=True, **sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.empty(weight.shape).normal_(0.0, 1.0, generator=generator)
            weight.copy_(0.1 * noise if weight.dim() == 2 else 1.0 + 0.1 * noise)
    return model, tokenizer


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(str(model_folder))


@pytest.fixture
def policy(model_folder: Path) -> Decoder:
    """In the dtype of the engine, so that log-probabilities can be compared."""
    model = load_model(str(model_folder), device=torch.device("cuda"), dtype=torch.bfloat16)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture(scope="session")
def engine(
    sglang_python: str, sglang_args: list[str], model_folder: Path, tokenizer: Tokenizer
) -> Iterator[SGLangEngine]:
    """The engine sglang with a server that it has started. Tests leave other weights in it."""
    model = load_model(str(model_folder), device=torch.device("cuda"), dtype=torch.bfloat16)
    config = SGLangConfig(python=sglang_python, args=sglang_args, gpu_memory=0.1)
    engine = make_engine(
        "sglang",
        model,
        {"settings": config, "save_tokenizer": tokenizer.save},
        decode=tokenizer.decode,
        device="cuda",
        dtype=torch.bfloat16,
        max_batch=16,
        max_length=256,
        sleep_while_training=True,
    )
    assert isinstance(engine, SGLangEngine)
    yield engine
    engine.close()
