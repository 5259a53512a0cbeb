"""The engine vllm with real servers: interface, log-probabilities, training in one and in 2 x 2 processes, failures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import pytest
import torch
from broken_sync import KINDS, break_sync
from real_server import CUDA, FEW, MEAN_GAP, ROOT, TEXT, check_killed_server, finish, gap_of_scores, hf_scores, scores
from small_run import SmallRuns
from stepped import Stepped
from sync_parts import LR, Learning

from assay.config import ReferenceServerConfig
from assay.engine.base import Request, SamplingParams
from assay.engine.client import generate
from assay.engine.remote.scoring import ScoringClient
from assay.engine.remote.transport import IpcTransport
from assay.integrations.vllm import VLLMEngine
from assay.models import Decoder, Lora, fingerprint
from assay.testing.engine import check_engine
from assay.text import Tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
VLLM = (*FEW, "--engine", "vllm", "--vllm.gpu_memory", 0.1)


@pytest.mark.skipif(CUDA, reason="tokens are compared exactly, which needs float32")
def test_the_engine_satisfies_the_interface(engine: VLLMEngine, policy: Decoder, tokenizer: Tokenizer) -> None:
    engine.update_weights(policy, 1)
    problems = check_engine(Stepped(engine), tokenizer.encode(TEXT), policy, tokenizer.decode, hottest=2.0)
    assert problems == []


def test_log_probabilities_at_temperature_0_7_are_those_of_transformers(
    engine: VLLMEngine, policy: Decoder, tokenizer: Tokenizer, model_folder: Path
) -> None:
    engine.update_weights(policy, 2)
    exact, rounded = (hf_scores(model_folder, dtype) for dtype in (torch.float32, engine.info.dtype))
    prompt = tokenizer.encode(TEXT)
    params = SamplingParams(n=4, temperature=0.7, max_new_tokens=24)
    for completion in generate(engine, [Request(prompt, params, seed=3)])[0]:
        ids = [*prompt, *completion.token_ids]
        expected, noisy, cold = (f(ids, t)[len(prompt) - 1 :] for f, t in ((exact, 0.7), (rounded, 0.7), (exact, 1.0)))
        gap = (torch.tensor(completion.engine_logprobs) - expected).abs()
        limit = max(MEAN_GAP, 2 * float((noisy - expected).abs().mean()))  # what transformers itself has in this dtype
        assert gap.mean() < limit and gap.max() < 10 * limit
        assert (cold - expected).abs().mean() > 2 * gap.mean()  # at temperature 1: must fit worse


def test_every_weight_is_replaced_by_an_update(engine: VLLMEngine, policy: Decoder, tokenizer: Tokenizer) -> None:
    """Also a tied head, which vLLM itself does not reload on a CPU."""
    for version, name in enumerate([None, *dict(policy.weights())][:14], start=10):
        if name is not None:
            weight = dict(policy.weights())[name]
            with torch.no_grad():
                noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(version))
                weight.mul_(1.0 + 0.2 * noise.to(weight))
        engine.update_weights(policy, version)
        assert gap_of_scores(engine, policy, tokenizer) < 5 * MEAN_GAP, name
        if CUDA:
            assert engine.fingerprint() == fingerprint(policy.weights(), engine.info.dtype), name


@pytest.mark.skipif(CUDA, reason="the probe needs float32 to detect all of them")
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_the_probe_detects_every_broken_sync(engine: VLLMEngine, policy: Decoder, kind: str) -> None:
    """At the learning rate of the shipped configs for these models. On a CPU, vLLM has no fingerprints."""
    if kind == "unmerged":
        policy.add_lora(Lora(2, 4.0))
    engine.update_weights(policy, 0)
    learning = Learning(policy, engine=engine, lr=3e-5 if os.environ.get("ASSAY_SMOLLM2") else LR)
    if kind == "none":
        gaps = [learning.update() for _ in range(3)]
        assert all(one["sync/probe_gap"] < 0.8 * one["sync/probe_limit"] for one in gaps), gaps
        return
    break_sync(engine, policy, kind)
    try:
        steps, text = learning.steps_to_error(4)
    finally:
        del engine.update_weights  # type: ignore[attr-defined]
    assert steps <= (2 if kind == "unmerged" else 1) and f"trainer: {engine.servers[0].url}: " in text


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_sent_through_gpu_memory_to_servers_that_sleep(
    engine: VLLMEngine, policy: Decoder, tokenizer: Tokenizer, level: Literal[1, 2]
) -> None:
    assert isinstance(engine.transport, IpcTransport)
    engine.settings.sleep_level = level
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] > free + 2**30  # the KV cache is released
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.01)
    engine.transport.chunk_bytes = 2**20  # many chunks, some of which end within a fused layer
    engine.update_weights(policy, 30 + level)
    assert engine.fingerprint() == fingerprint(policy.weights(), engine.info.dtype)
    assert gap_of_scores(engine, policy, tokenizer) < 5 * MEAN_GAP
    assert generate(engine, [Request(tokenizer.encode(TEXT), SamplingParams(max_new_tokens=4), 0)])


@pytest.fixture
def running_server(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options for a command that uses the server of `engine`, with its key."""
    monkeypatch.setenv("KEY_OF_THE_SERVER", engine.launched.key)
    return "--vllm.urls", engine.servers[0].url, "--vllm.api_key_env", "KEY_OF_THE_SERVER"


def test_training_through_the_command_line_uses_a_running_server(
    running_server: tuple[str, ...], model_folder: Path, tmp_path: Path
) -> None:
    small = SmallRuns(tmp_path)
    words = ("--model", model_folder, "--model.max_length", 256, "--sft.steps", 0, "--optim.lr", 1e-4)
    run = small.process("train", ROOT / "configs/demo.toml", *VLLM, *words, *running_server)
    finish(run, small)


def test_evaluation_with_a_config_gives_the_answers_of_the_native_engine(
    running_server: tuple[str, ...], model_folder: Path, tmp_path: Path
) -> None:
    small, answers = SmallRuns(tmp_path), {}
    words = (model_folder, "--config", ROOT / "configs/demo.toml", "--eval.final_examples", 6)
    for name, options in {"native": (), "vllm": running_server}.items():
        file = tmp_path / f"{name}.jsonl"
        assert small("eval", *words, "--model.max_length", 256, "--engine", name, *options, "--answers", file) == 0
        answers[name] = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(answers["vllm"]) == 6 and any(row["completion"] for row in answers["vllm"])
    assert CUDA or answers["vllm"] == answers["native"]  # greedy; in bfloat16, ties are broken differently


def test_a_served_reference_has_the_scores_of_the_model(
    engine: VLLMEngine, policy: Decoder, tokenizer: Tokenizer, running_server: tuple[str, ...]
) -> None:
    engine.update_weights(policy, 9)
    options = dict(zip(running_server[::2], running_server[1::2], strict=True))
    settings = ReferenceServerConfig(
        url=options["--vllm.urls"], api_key_env=options.get("--vllm.api_key_env", ""), server="vllm"
    )
    sequences = [[*tokenizer.encode(TEXT), *range(5, 25)], [3, 9, 27]]
    for own, ids in zip(ScoringClient(settings, 1.0).score(sequences), sequences, strict=True):
        assert (torch.tensor(own) - scores(policy, ids)).abs().mean() < 5 * MEAN_GAP


@pytest.mark.skipif(CUDA, reason="needs four GPUs, or CPUs")
def test_four_processes_train_with_one_server(vllm_python: str, tmp_path: Path) -> None:
    """FSDP x TP: rank 0 starts the server and publishes full weights; two groups of ranks send requests."""
    small = SmallRuns(tmp_path)
    layout = ("--parallel.tp", 2, "--parallel.mode", "fsdp", "--vllm.python", vllm_python)
    words = ("--model", "preset:tiny", "--sft.steps", 2, *layout)
    run = small.launch(4, "train", ROOT / "configs/demo.toml", *VLLM, *words)
    finish(run, small)


def test_a_server_that_dies_is_named_with_its_log(engine: VLLMEngine, tokenizer: Tokenizer) -> None:
    check_killed_server(engine, tokenizer)  # last: no server is left
