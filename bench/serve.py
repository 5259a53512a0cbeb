"""Measure a server with the interface of the OpenAI API (`assay serve`, vLLM): tokens per second, time to first token.

    python bench/serve.py model 0.5b models/random-0.5b     # a folder with random weights, a config and a tokenizer
    assay serve models/random-0.5b --name bench
    python bench/serve.py load http://127.0.0.1:8000 --model bench --json serve.json

Every client is a connection that streams one completion after the other, with a prompt of its own, given as token ids.
The clients run in several processes, which only count bytes while a stream runs, so that they are not the bottleneck.
With several URLs, the servers are measured one after the other at each number of clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CLIENTS = (1, 64, 1024)
TAIL = 4096  # bytes at the end of a response that are kept: they contain the usage
ATTEMPTS = 20  # to connect


@dataclass
class Load:
    """What every client does."""

    url: str
    model: str
    prompt: int  # tokens
    new: int
    rounds: int  # requests per client
    vocabulary: int
    seed: int
    key: str = ""
    temperature: float = 1.0
    seeds: bool = True  # a seed with every request


@dataclass
class Outcome:
    """Measurements of some clients, in seconds since the start."""

    first_token: list[float] = field(default_factory=list)  # time to first token per request
    latency: list[float] = field(default_factory=list)
    chunks: int = 0  # reads from connections
    tokens: int = 0
    prompt_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0

    def add(self, other: Outcome) -> None:
        self.first_token += other.first_token
        self.latency += other.latency
        self.errors += other.errors
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.chunks += other.chunks
        self.begun = min(self.begun or other.begun, other.begun)
        self.ended = max(self.ended, other.ended)


class StreamingClient(asyncio.Protocol):
    """One connection. While a response arrives, it only looks for the first event and keeps the last bytes."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.done: asyncio.Future[None] | None = None
        self.reset()

    def reset(self) -> None:
        self.head, self.tail = b"", b""
        self.first = 0.0
        self.reads = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        if not self.first:
            self.head += data
            # The first event of a completion contains the text of at least one token.
            if b"data: {" in self.head:
                self.first = time.perf_counter()
        self.tail = (self.tail + data)[-TAIL:]
        # The last chunk of a chunked response has no bytes.
        if self.tail.endswith(b"0\r\n\r\n") and (b"[DONE]" in self.tail or b" 200 " not in self.head[:20]):
            self.finish()
        elif not self.first and b"\r\n\r\n" in self.head and b" 200 " not in self.head[:20]:
            self.finish()  # an error

    def connection_lost(self, error: Exception | None) -> None:
        self.finish()

    def finish(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    async def request(self, data: bytes) -> None:
        self.reset()
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        await self.done


def http_request(load: Load, draw: random.Random) -> bytes:
    body = json.dumps(
        {
            "model": load.model,
            "prompt": [draw.randrange(load.vocabulary) for _ in range(load.prompt)],
            "max_tokens": load.new,
            "temperature": load.temperature,
            **({"seed": draw.randrange(1 << 31)} if load.seeds else {}),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    parts = urlsplit(load.url)
    key = f"Authorization: Bearer {load.key}\r\n" if load.key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{key}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def usage_of(tail: bytes) -> dict[str, int]:
    """The usage in the last event of a stream."""
    start = tail.rfind(b'"usage":')
    if start < 0 or b"[DONE]" not in tail:
        raise ValueError(tail[-300:].decode(errors="replace"))
    usage, _ = json.JSONDecoder().raw_decode(tail[start + len(b'"usage":') :].decode(errors="replace").lstrip())
    return usage


async def connect(load: Load) -> Any:
    parts = urlsplit(load.url)
    for attempt in range(ATTEMPTS):
        try:
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(StreamingClient, parts.hostname, parts.port or 80))[1]
        except OSError:  # e.g. the queue of new connections is full
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep(0.1)


async def run_client(client: Any, requests: Sequence[bytes], outcome: Outcome) -> None:
    for data in requests:
        begun = time.perf_counter()
        await client.request(data)
        ended = time.perf_counter()
        outcome.chunks += client.reads
        try:
            usage = usage_of(client.tail)
        except ValueError as error:
            outcome.errors.append(str(error) or "the connection was closed")
            if client.transport.is_closing():
                return
            continue
        outcome.first_token.append(client.first - begun)
        outcome.latency.append(ended - begun)
        outcome.tokens += usage["completion_tokens"]
        outcome.prompt_tokens += usage["prompt_tokens"]
        outcome.ended = max(outcome.ended, ended)
    client.transport.close()


def run_process(load: Load, numbers: Sequence[int], barrier: Any, results: Any) -> None:
    """Run some of the clients. All processes send their first requests when the clients of all are connected."""
    outcome = Outcome()

    async def run() -> None:
        draws = [random.Random(load.seed * 1_000_003 + number) for number in numbers]
        requests = [[http_request(load, draw) for _ in range(load.rounds)] for draw in draws]
        clients = [await connect(load) for _ in numbers]
        await asyncio.to_thread(barrier.wait)
        outcome.begun = outcome.ended = time.perf_counter()
        await asyncio.gather(*(run_client(*pair, outcome) for pair in zip(clients, requests, strict=True)))

    try:
        asyncio.run(run())
    except Exception as error:
        barrier.abort()
        outcome.errors.append(f"{type(error).__name__}: {error}")
    results.put(outcome)


def measure(load: Load, clients: int, processes: int) -> Outcome:
    context = multiprocessing.get_context("spawn")
    processes = min(processes, clients)
    barrier, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=run_process, args=(load, range(rank, clients, processes), barrier, results))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    total = Outcome()
    for _ in workers:
        total.add(results.get())
    for worker in workers:
        worker.join()
    return total


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest value that is at least as large as this fraction of all."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))], 4) if ordered else None


def row_of(server: str, load: Load, clients: int, outcome: Outcome) -> dict[str, Any]:
    seconds = outcome.ended - outcome.begun
    return {
        "server": server,
        "clients": clients,
        "requests": len(outcome.latency),
        "errors": len(outcome.errors),
        "first_error": outcome.errors[0] if outcome.errors else None,
        "prompt_tokens": load.prompt,
        "new_tokens": load.new,
        "generated_tokens": outcome.tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(outcome.tokens / seconds, 1) if seconds > 0 else 0.0,
        "ttft_s": {"p50": quantile(outcome.first_token, 0.5), "p99": quantile(outcome.first_token, 0.99)},
        "latency_s": {"p50": quantile(outcome.latency, 0.5), "p99": quantile(outcome.latency, 0.99)},
        "reads_per_request": round(outcome.chunks / max(len(outcome.latency), 1), 1),
    }


def run_load(args: argparse.Namespace) -> int:
    from assay.bench.results import describe_machine, describe_versions
    from assay.runs.files import write_json

    names = args.names or args.urls
    if len(names) != len(args.urls):
        raise SystemExit("give one of --names per URL")
    rows = []
    key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    for clients in args.clients:
        rounds = args.rounds or max(2, min(8, 256 // clients))
        for name, url in zip(names, args.urls, strict=True):
            load = Load(
                url.rstrip("/"), args.model, args.prompt, args.new, rounds, args.vocabulary, args.seed, key,
                seeds=args.seeds,
            )  # fmt: skip
            if not args.cold:  # compiles kernels and captures graphs for this number of clients
                measure(Load(**{**asdict(load), "rounds": 1, "seed": args.seed + 1}), clients, args.processes)
            rows.append(row_of(name, load, clients, measure(load, clients, args.processes)))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:  # after every row: a later one may never end
                content = {"machine": describe_machine(), "versions": describe_versions(), "rows": rows}
                write_json(args.json, {"command": shlex.join(["python", "bench/serve.py", *sys.argv[1:]]), **content})
    return 1 if any(row["errors"] for row in rows) else 0


def make_model(args: argparse.Namespace) -> int:
    """A folder with random weights of a known shape, its config, and a tokenizer with a text for every token."""
    import torch

    from assay.bench.workload import SHAPES, random_model
    from assay.models.export import save_model

    if args.shape not in SHAPES:
        raise SystemExit(f"known shapes: {', '.join(SHAPES)}")
    spec = SHAPES[args.shape]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = synthetic_tokenizer(spec.vocab_size)
    model = random_model(spec, device, args.seed)
    save_model(model, args.folder, torch.bfloat16, eos_ids=[tokenizer.eos_token_id], pad_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(str(args.folder))
    print(args.folder)
    return 0


def synthetic_tokenizer(size: int) -> Any:
    """A byte-level tokenizer with `size` tokens: all bytes, then words of letters. Texts are encoded as bytes."""
    from itertools import count, product

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = ("Ġ" + "".join(letters) for length in count(2) for letters in product("etaoinshrdlu", repeat=length))
    while len(vocab) < size - 1:
        vocab[next(words)] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    model = commands.add_parser("model", help="write a folder with random weights")
    model.add_argument("shape", help="0.5b, 1.5b, ... (shapes of assay bench)")
    model.add_argument("folder", type=Path)
    model.add_argument("--seed", type=int, default=0)
    model.set_defaults(run=make_model)
    load = commands.add_parser("load", help="measure servers")
    load.add_argument("urls", nargs="+", metavar="URL")
    load.add_argument("--names", nargs="+", help="names of the servers in the results")
    load.add_argument("--model", required=True, help="name of the model in requests")
    load.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    load.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    load.add_argument("--new", type=int, default=256, help="tokens per answer")
    load.add_argument("--rounds", type=int, default=0, help="requests per client; 0: 2 to 8, fewer if there are many")
    load.add_argument("--vocabulary", type=int, default=151_000, help="prompts are token ids below this")
    load.add_argument("--processes", type=int, default=min(6, os.cpu_count() or 1), help="processes of clients")
    load.add_argument("--no-seeds", dest="seeds", action="store_false", help="send no seeds: they slow down vLLM")
    load.add_argument("--cold", action="store_true", help="do not send one round of requests before the measurement")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--api-key-env", default="", help="environment variable with the API key")
    load.add_argument("--json", type=Path)
    load.set_defaults(run=run_load)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
