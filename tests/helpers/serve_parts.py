"""A small model with a byte-level tokenizer in a folder, and a server on it in a thread."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from engine_parts import small_decoder, small_spec
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from waiting import until as until

from assay.config import HttpConfig
from assay.engine import make_engine
from assay.models import export
from assay.models.decoder import Decoder
from assay.server.server import Serving, address_of, run_server
from assay.system.http_server import bind
from assay.text import Renderer, Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAME = "tiny"


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that characters take up to four tokens; and three special tokens."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], additional_special_tokens=special[1:], chat_template=TEMPLATE
    )
    return Tokenizer(hf)


@functools.cache
def tiny_model(seed: int = 0, max_length: int = 256) -> Decoder:
    spec = small_spec("qwen2", vocab_size=byte_tokenizer().vocab_size, layers=2, max_length=max_length)
    return small_decoder(spec, seed)


def renderer() -> Renderer:
    return Renderer(byte_tokenizer())


def save_folder(model: Decoder, folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    export.save_model(model, folder, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    tokenizer.save(folder)
    return folder


@dataclass
class RunningServer:
    url: str
    engine: Any

    @property
    def api(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def serving(
    model: Decoder | None = None, http: dict[str, Any] | None = None, **options: Any
) -> Iterator[RunningServer]:
    """A server in a thread of this process; `options`: of the engine."""
    model, text = model or tiny_model(), renderer()
    options = {"device": "cpu", "dtype": torch.float32, "decode": text.decode} | options
    engine = make_engine("native", model, **options)
    cfg = HttpConfig(**{"port": 0, "drain_s": 5, "frontends": 0} | (http or {}))
    listener = bind(cfg.host, cfg.port)
    ready = threading.Event()
    loops: list[Any] = []

    async def run() -> None:
        task = asyncio.current_task()
        loops.append((asyncio.get_running_loop(), task))
        await run_server(engine, Serving(text, cfg, NAME, on_ready=ready.set), listener)

    def work() -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(run())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(60)
        yield RunningServer(address_of(listener), engine)
    finally:
        loop, task = loops[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        listener.close()
        engine.close()


@contextmanager
def command(*words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`assay serve` in a process, and its URL. `variables`: of its environment."""
    run = [sys.executable, "-m", "assay", "serve", *words, "--port", "0", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TEST_KEY": "secret"} | variables
    with subprocess.Popen(run, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"at (http://\S+)/v1", line):
                    yield process, match[1]
                    break
            else:
                raise AssertionError("".join(lines))
        finally:
            process.kill()


def metric_of(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))
