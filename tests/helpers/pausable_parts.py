"""Engines with stand-ins for vLLM and SGLang servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from engine_parts import logits_after, small_decoder, small_spec
from http_parts import SmallServer, small_server
from sglang_parts import FakeSGLang
from vllm_parts import FakeVLLM

from assay.config import SGLangConfig, VLLMConfig
from assay.engine import make_engine
from assay.engine.base import EngineOptions
from assay.integrations.sglang import LaunchedSGLang
from assay.integrations.vllm import LaunchedVLLM

POLICY = small_decoder(small_spec())
PROMPT = [3, 1, 4, 1, 5]
FAKES: dict[str, Any] = {"vllm": FakeVLLM, "sglang": FakeSGLang}
LAUNCHERS: dict[str, Any] = {"vllm": LaunchedVLLM, "sglang": LaunchedSGLang}
CONFIGS: dict[str, Any] = {"vllm": VLLMConfig, "sglang": SGLangConfig}


def launched_servers(backend: str, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Servers that the engine would start."""
    values = {"device": "cuda", "dtype": torch.float32, "max_batch": 7} | (options or {})
    return LAUNCHERS[backend](CONFIGS[backend](**settings), EngineOptions(**values))


def decode(ids: Any) -> str:
    return "".join(chr(ord("A") + int(token)) for token in ids)


@contextmanager
def connected(backend: str, *fakes: Any, **settings: Any) -> Iterator[tuple[Any, list[SmallServer]]]:
    """An engine, and the servers that answer with `fakes`."""
    options = {"device": "cpu", "dtype": torch.float32, "decode": decode} | settings.pop("options", {})
    with ExitStack() as stack:
        servers = [stack.enter_context(small_server(fake)) for fake in fakes]
        config = CONFIGS[backend](urls=[f"{server.url}/v1" for server in servers], **settings)
        engine = make_engine(backend, POLICY, {"settings": config}, **options)
        stack.callback(engine.close)
        yield engine, servers
        assert not any(getattr(fake, "refused", []) for fake in fakes)  # all requests were valid


def logprobs_of(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of the tokens after the prompt."""
    rows = (logits_after(model, [*PROMPT, *ids])[len(PROMPT) - 1 : -1] / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
