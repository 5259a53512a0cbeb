"""The engine vllm with real servers: interface, log-probabilities, training in one and in 2 x 2 processes, failures."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from broken_sync import KINDS, break_sync
from hf_scores import hf_scores
from small_run import SmallRuns
from stepped import Stepped
from sync_parts import LR, Learning

from assay.config import ReferenceServerConfig
from assay.engine.base import Request, SamplingParams
from assay.engine.check import check_engine
from assay.engine.client import generate
from assay.engine.remote.scoring import ScoringClient
from assay.engine.remote.transport import IpcTransport
from assay.engine.remote.vllm.engine import VLLMEngine
from assay.models import Decoder, Lora, fingerprint
from assay.runs.rollouts import read_rollouts
from assay.text import Tokenizer
from assay.types import UserError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = "Tom has 3 apples ."
CUDA = torch.cuda.is_available()  # then servers and trainer share the GPU and compute in bfloat16
MEAN_GAP = 0.03 if CUDA else 2e-4  # of log-probabilities, in nats
FEW = (
    *("--train.prompts", 2, "--train.samples", 4, "--train.steps", 3, "--sampling.max_new_tokens", 16),
    *("--eval.every", 0, "--eval.examples", 2, "--eval.final_examples", 2, "--save.every", 0, "--engine.max_batch", 16),
    # Rewards that differ also for a model that solves nothing.
    *("--reward.length", 1.0, "--reward.target_length", 20, "--engine.name", "vllm", "--vllm.gpu_memory", 0.1),
)


@torch.no_grad()
def scores(policy: Decoder, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor(ids, device=policy.device)
    rows = policy.unembed(policy.hidden(tokens, [len(ids)]))[:-1].double().log_softmax(-1)
    return rows.gather(1, tokens[1:, None])[:, 0].cpu()


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
    ids = [*tokenizer.encode(TEXT), *range(5, 25)]
    for version, name in enumerate([None, *dict(policy.weights())][:14], start=10):
        if name is not None:
            weight = dict(policy.weights())[name]
            with torch.no_grad():
                noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(version))
                weight.mul_(1.0 + 0.2 * noise.to(weight))
        engine.update_weights(policy, version)
        gap = (torch.tensor(engine.score([ids])[0]) - scores(policy, ids)).abs()
        assert gap.mean() < 5 * MEAN_GAP, name
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
    ids = [*tokenizer.encode(TEXT), *range(5, 25)]
    assert (torch.tensor(engine.score([ids])[0]) - scores(policy, ids)).abs().mean() < 5 * MEAN_GAP
    assert generate(engine, [Request(ids, SamplingParams(max_new_tokens=4), 0)])


@pytest.fixture
def running_server(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options for a command that uses the server of `engine`, with its key."""
    assert engine.launched is not None
    monkeypatch.setenv("KEY_OF_THE_SERVER", engine.launched.key)
    return "--vllm.urls", engine.servers[0].url, "--vllm.api_key_env", "KEY_OF_THE_SERVER"


def test_training_through_the_command_line_uses_a_running_server(
    running_server: tuple[str, ...], model_folder: Path, tmp_path: Path
) -> None:
    small = SmallRuns(tmp_path)
    words = ("--model", model_folder, "--model.max_length", 256, "--sft.steps", 0, "--optim.lr", 1e-4)
    run = small.process("train", ROOT / "configs/demo.toml", *FEW, *words, *running_server)
    output = run.communicate(timeout=1500)[0]
    assert run.returncode == 0, output
    compare_logprobs(small, "demo", steps=3)


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


def compare_logprobs(small: SmallRuns, name: str, steps: int) -> None:
    """Log-probabilities of engine and trainer agree in every step, so each step used the weights of the one before."""
    trained = 0
    for step in range(1, steps + 1):
        for group in read_rollouts(small.runs / name, step):
            for rollout in group.rollouts:
                if rollout.trainer_logprobs is not None:
                    engine = [value for turn in rollout.turns for value in turn.completion.engine_logprobs]
                    assert np.abs(np.asarray(rollout.trainer_logprobs) - engine).mean() < 5 * MEAN_GAP
                    trained += 1
    assert trained
    norms = [row.get("optim/grad_norm", 0) for row in small.metrics(name)]
    assert sum(norm > 0 for norm in norms) >= 2  # the weights have changed


@pytest.mark.skipif(CUDA, reason="needs four GPUs, or CPUs")
def test_four_processes_train_with_one_server(vllm_python: str, tmp_path: Path) -> None:
    """FSDP x TP: rank 0 starts the server and publishes full weights; two groups of ranks send requests."""
    small = SmallRuns(tmp_path)
    layout = ("--parallel.tp", 2, "--parallel.mode", "fsdp", "--vllm.python", vllm_python)
    words = ("--model", "preset:tiny", "--sft.steps", 2, *layout)
    run = small.launch(4, "train", ROOT / "configs/demo.toml", *FEW, *words)
    output = run.communicate(timeout=1500)[0]
    assert run.returncode == 0, output
    compare_logprobs(small, "demo", steps=3)


def test_a_server_that_dies_is_named_with_its_log(engine: VLLMEngine, tokenizer: Tokenizer) -> None:
    """Last: no server is left."""
    assert engine.launched is not None
    (program,) = engine.launched.programs.values()
    os.kill(program.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"is not reachable .* it ended \(killed by SIGKILL\): .* \(see .*\.log\)"):
        generate(engine, [Request(tokenizer.encode(TEXT), SamplingParams(max_new_tokens=4), 0)])
