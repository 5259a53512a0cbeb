"""`assay serve` with a model of another family, through the hf engine, and with a model of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from broken_sync import break_sync
from hub_server import hub
from serve_parts import byte_tokenizer, command, renderer, save_folder, tiny_model
from stepped import Stepped
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from assay.config import ServerConfig
from assay.engine import Request, SamplingParams, generate, make_engine
from assay.engine.remote.assay import AssayEngine
from assay.models import HFModel, load_model
from assay.models.base import fingerprint
from assay.testing.engine import check_engine
from assay.training.sync import SyncError, sync_weights

pytestmark = pytest.mark.slow
PROMPT = "Ann has 7"
IDS = byte_tokenizer().encode(PROMPT)
OPTIONS = {"device": "cpu", "dtype": torch.float32, "max_length": 128, "max_batch": 8}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neox")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    vocabulary = byte_tokenizer().vocab_size
    config = GPTNeoXConfig(vocab_size=vocabulary, max_position_embeddings=256, initializer_range=0.3, **sizes)
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def url(neox: Path) -> Iterator[str]:
    with command(str(neox), "--name", "neox", "--allow-updates", "--engine.max_batch", "8") as (_, url):
        yield url


def post(url: str, path: str, **body: Any) -> Any:
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=120).raise_for_status().json()


def greedy(folder: Path, count: int) -> str:
    """The continuation of transformers' own generation."""
    model = GPTNeoXForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([IDS])
    new = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return byte_tokenizer().decode(new[0, len(IDS) :].tolist())


def test_a_model_of_another_family_answers_as_transformers(url: str, neox: Path) -> None:
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = post(url, "completions", prompt=PROMPT, **body)["choices"][0]
    assert whole["text"] == greedy(neox, 12) and whole["finish_reason"] == "length"
    streamed = httpx.post(f"{url}/v1/completions", json={**body, "prompt": PROMPT, "stream": True}, timeout=120)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 1 and "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    messages = [{"role": "user", "content": "Hi"}]
    assert len(post(url, "chat/completions", messages=messages, n=2, max_tokens=5)["choices"]) == 2


def test_a_trainer_uses_the_server(url: str, neox: Path) -> None:
    policy = load_model(str(neox), device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(policy, HFModel)
    settings = {"settings": ServerConfig(urls=[url])}
    engine = make_engine("assay", policy, settings, decode=renderer().decode, **OPTIONS)
    assert isinstance(engine, AssayEngine)
    try:
        assert not engine.info.capabilities.inflight_updates and engine.info.capabilities.fingerprint
        assert check_engine(Stepped(engine), IDS, policy, renderer().decode) == []
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.1)
        assert sync_weights(policy, engine, 1) == fingerprint(policy.weights(), torch.float32)
        requests = [Request(IDS, SamplingParams(n=3, max_new_tokens=8), seed=5)]
        local = make_engine("hf", policy, **OPTIONS)
        local.update_weights(policy, 1)
        assert generate(engine, requests) == generate(local, requests)
        break_sync(engine, policy, "frozen")
        with torch.no_grad():
            next(iter(policy.parameters())).add_(0.1)
        with pytest.raises(SyncError, match="1 weight of"):
            sync_weights(policy, engine, 2)
    finally:
        engine.close()


def test_a_model_of_the_hub_is_downloaded_and_served(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = tiny_model()
    with hub(save_folder(model, tmp_path / "model"), "org/name") as address:
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        with command("org/name", **variables) as (_, url):
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "org/name"
            body = {"model": "org/name", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            text = post(url, "completions", **body)["choices"][0]["text"]
    ((expected,),) = generate(
        make_engine("native", model, **OPTIONS), [Request(IDS, SamplingParams(max_new_tokens=8, temperature=0.0), 0)]
    )
    assert text == renderer().decode(expected.token_ids)
