"""The reward-model judge with a real SGLang server on a GPU: its scores are the logits of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from classifier_server import NAME, check_long_answer, check_outputs, judged_outputs, running, save_served_classifier

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.gpu]
LABELS = 3


class Served(NamedTuple):
    url: str
    folder: Path


@pytest.fixture(scope="module")
def served(sglang_python: str, sglang_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`python -m sglang.launch_server --model-path MODEL --is-embedding`."""
    folder = save_served_classifier(tmp_path_factory.mktemp("classifier"), LABELS)
    command = [sglang_python, "-m", "sglang.launch_server", "--model-path", str(folder), "--is-embedding"]
    command += ["--served-model-name", NAME, "--dtype", "bfloat16", "--mem-fraction-static", "0.15"]
    command += ["--max-running-requests", "16", "--disable-cuda-graph", *sglang_args]
    with running(command, tmp_path_factory.mktemp("server"), {"HF_HUB_OFFLINE": "1"}) as url:
        yield Served(url, folder)


def test_scores_are_the_logits_of_transformers(served: Served) -> None:
    outputs = judged_outputs(served.url, LABELS, api="sglang", tokenizer=str(served.folder))
    check_outputs(outputs, served.folder, "bfloat16")


def test_an_answer_that_is_too_long_is_an_error_of_its_own(served: Served) -> None:
    check_long_answer(served.url, "longer than the model's context length", api="sglang", tokenizer=str(served.folder))
