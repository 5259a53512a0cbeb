"""Parts of tests/real_vllm and tests/real_sglang: the model that is served, its exact scores, and checks of runs.

ASSAY_SMOLLM2: SmolLM2-135M-Instruct as a folder or GGUF file; without it, a small random Llama is served.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_parts import small_decoder

from assay.engine.base import Request, SamplingParams
from assay.engine.client import generate
from assay.models import Decoder, ModelSpec, load_model
from assay.models.export import save_model
from assay.runs.rollouts import read_rollouts
from assay.tasks import make_task
from assay.text import Tokenizer, load_tokenizer, word_tokenizer
from assay.types import UserError

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
ROOT = Path(__file__).resolve().parents[2]
TEXT = "Tom has 3 apples ."
MEAN_GAP = 0.03 if CUDA else 2e-4  # of log-probabilities, in nats: on a GPU in bfloat16
FEW = (
    *("--train.prompts", 2, "--train.samples", 4, "--train.steps", 3, "--sampling.max_new_tokens", 16),
    *("--eval.every", 0, "--eval.examples", 2, "--eval.final_examples", 2, "--save.every", 0, "--engine.max_batch", 16),
    # Rewards that differ also for a model that solves nothing.
    *("--reward.length", 1.0, "--reward.target_length", 20),
)


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
    """On a GPU with heads of size 64, which all attention kernels have."""
    tokenizer = word_tokenizer(make_task("abacus").words())  # type: ignore[attr-defined]
    head = 64 if CUDA else 32
    sizes = {"hidden": 4 * head, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": head, "intermediate": 6 * head}
    spec = ModelSpec("llama", vocab_size=tokenizer.vocab_size, max_length=512, tied=True, **sizes)
    model = small_decoder(spec, scale=0.1, spread=0.1)
    return model, tokenizer


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(str(model_folder))


@pytest.fixture
def policy(model_folder: Path) -> Decoder:
    """In the dtype of the engine, so that log-probabilities can be compared."""
    model = load_model(str(model_folder), device=torch.device(DEVICE), dtype=DTYPE)
    assert isinstance(model, Decoder)
    return model


@torch.no_grad()
def scores(policy: Decoder, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    tokens = torch.tensor(ids, device=policy.device)
    rows = (policy.unembed(policy.hidden(tokens, [len(ids)]))[:-1].double() / temperature).log_softmax(-1)
    return rows.gather(1, tokens[1:, None])[:, 0].cpu()


def gap_of_scores(engine: Any, policy: Decoder, tokenizer: Tokenizer) -> float:
    ids = [*tokenizer.encode(TEXT), *range(5, 25)]
    return float((torch.tensor(engine.score([ids])[0]) - scores(policy, ids)).abs().mean())


def finish(run: Any, small: Any, name: str = "demo", steps: int = 3) -> None:
    """Log-probabilities of engine and trainer agree in every step, so each step used the weights of the one before."""
    output = run.communicate(timeout=1500)[0]
    assert run.returncode == 0, output
    trained = 0
    for step in range(1, steps + 1):
        for rollout in [r for group in read_rollouts(small.runs / name, step) for r in group.rollouts]:
            if rollout.trainer_logprobs is not None:
                engine = [value for turn in rollout.turns for value in turn.completion.engine_logprobs]
                assert np.abs(np.asarray(rollout.trainer_logprobs) - engine).mean() < 5 * MEAN_GAP
                trained += 1
    assert trained
    norms = [row.get("optim/grad_norm", 0) for row in small.metrics(name)]
    assert sum(norm > 0 for norm in norms) >= 2  # the weights have changed


def check_killed_server(engine: Any, tokenizer: Tokenizer) -> None:
    """A server that dies is named with its log. Afterwards no server is left."""
    (program,) = engine.launched.programs.values()
    os.kill(program.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"is not reachable .* it ended \(killed by SIGKILL\): .* \(see .*\.log\)"):
        generate(engine, [Request(tokenizer.encode(TEXT), SamplingParams(max_new_tokens=4), 0)])


Scores = Callable[[Sequence[int], float], torch.Tensor]


def hf_scores(folder: Path, dtype: torch.dtype) -> Scores:
    """A function of token ids and a temperature: log-probabilities of all tokens but the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def scores(ids: Sequence[int], temperature: float) -> torch.Tensor:
        tokens = torch.tensor([list(ids)])
        rows = (model(tokens).logits[0, :-1].double() / temperature).log_softmax(-1)
        return rows.gather(1, tokens[0, 1:, None])[:, 0]

    return scores
