"""The reward-model judge with a real vLLM server: its scores are the logits of transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from classifier_server import NAME, check_long_answer, check_outputs, judged_outputs, running, save_served_classifier

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
CUDA = torch.cuda.is_available()
DTYPE = "bfloat16" if CUDA else "float32"


class Served(NamedTuple):
    url: str
    folder: Path
    labels: int


@pytest.fixture(scope="module", params=[1, 3])
def served(
    request: pytest.FixtureRequest, vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """`vllm serve MODEL --runner pooling`, one model after the other. The command is missing in builds for CPUs."""
    labels = request.param
    folder = save_served_classifier(tmp_path_factory.mktemp("classifier"), labels)
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--runner", "pooling"]
    command += ["--served-model-name", NAME, "--dtype", DTYPE, "--max-num-seqs", "16", "--enforce-eager"]
    command += ["--gpu-memory-utilization", "0.1"] if CUDA else []
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not CUDA:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running(command, tmp_path_factory.mktemp("server"), environment) as url:
        yield Served(url, folder, labels)


@pytest.mark.parametrize("api", ["classify", "pooling"])
@pytest.mark.parametrize("sent", ["messages", "token ids"])
def test_scores_are_the_logits_of_transformers(served: Served, api: str, sent: str) -> None:
    settings: dict[str, Any] = {"api": api} | ({"tokenizer": str(served.folder)} if sent == "token ids" else {})
    check_outputs(judged_outputs(served.url, served.labels, **settings), served.folder, DTYPE)


@pytest.mark.parametrize("api", ["classify", "pooling"])
def test_an_answer_that_is_too_long_is_an_error_of_its_own(served: Served, api: str) -> None:
    check_long_answer(served.url, "maximum context length", api=api)
