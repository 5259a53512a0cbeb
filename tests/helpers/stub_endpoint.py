"""A strict stand-in for an OpenAI-compatible endpoint: it checks requests, and injects faults on demand.

Faults on the level of connections (lost connections, broken answers) need a plain socket server: `raw_server`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from http_parts import Answer, JsonServer, running

KINDS: dict[tuple[type, ...], tuple[str, ...]] = {
    (str,): ("model",),
    (int, float): ("temperature",),
    (float,): ("top_p", "min_p"),
    (int,): ("top_k", "min_tokens", "max_tokens", "max_completion_tokens", "seed", "top_logprobs"),
    (bool,): ("stream", "logprobs"),
    (list,): ("stop",),
    (dict,): ("stream_options",),
}
FIELDS = {name: kinds for kinds, names in KINDS.items() for name in names}


@dataclass
class Fault:
    """An answer that is not the regular one. `drop`: close the connection, after `content` if there is some."""

    status: int = 200
    content: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    drop: bool = False
    delay_s: float = 0.0


Reply = str | dict[str, Any] | Fault  # the text of the answer, its choice, or a fault
Answering = Callable[[dict[str, Any]], Reply]


def message(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error"}}


def problem(path: str, body: Any) -> str:
    """What is wrong with a request; empty if nothing is."""
    own = {"/v1/chat/completions": ("messages", list), "/v1/completions": ("prompt", str)}.get(path)
    if own is None or not isinstance(body, dict):
        return f"no such path: {path}"
    unknown = body.keys() - FIELDS.keys() - {own[0], "note"}
    if unknown:
        return f"unknown field '{min(unknown)}'"
    wrong = [name for name, kinds in FIELDS.items() if name in body and not isinstance(body[name], kinds)]
    if wrong or not isinstance(body.get(own[0]), own[1]) or not isinstance(body.get("model"), str):
        return f"fields of a wrong type or missing: {wrong}"
    messages = body.get("messages", [{"role": "user", "content": "?"}])
    if not messages or not all(m.keys() == {"role", "content"} and isinstance(m["content"], str) for m in messages):
        return "bad messages"
    return "" if messages[-1]["role"] == "user" else "the last message is not the user's"


class StubEndpoint(JsonServer):
    """Answers with `answering(body)`. `faults`: what the first requests get instead, in order.

    `plain`: requests of any path and form are accepted, and an answer is sent as it is.
    """

    def __init__(
        self, answering: Answering, key: str = "", faults: tuple[Fault, ...] = (), plain: bool = False
    ) -> None:
        super().__init__()
        self.answering, self.key, self.faults, self.plain = answering, key, list(faults), plain
        self.paths: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.problems: list[str] = []
        self.lock = threading.Lock()
        self.running = self.most_running = 0

    @contextmanager
    def counted(self, body: Any) -> Iterator[Fault | None]:
        with self.lock:
            self.requests.append(body)
            self.times.append(time.monotonic())
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            fault = self.faults.pop(0) if self.faults else None
        try:
            yield fault
        finally:
            with self.lock:
                self.running -= 1

    def respond(self, path: str, body: Any, headers: dict[str, str]) -> Answer | None:
        with self.counted(body) as fault:
            sent = headers.get("authorization", "nothing")
            if self.key and sent != f"Bearer {self.key}":
                return 401, message(f"Incorrect API key provided: {sent}")
            self.paths.append(path)
            if wrong := "" if self.plain else problem(path, body):
                self.problems.append(wrong)
                return 404 if "path" in wrong else 400, message(wrong)
            reply = fault or self.answering(body)
            if isinstance(reply, Fault):
                return faulty_answer(reply)
            if self.plain:
                return 200, reply
            choice = {"text": reply} if isinstance(reply, str) else reply
            if body.get("stream"):
                return 200, streamed(body, choice["text"]), {"content-type": "text/event-stream"}
            return 200, regular_answer(body, choice)


def faulty_answer(fault: Fault) -> Answer | None:
    time.sleep(fault.delay_s)
    if not fault.drop:
        return fault.status, fault.content, dict(fault.headers)
    if fault.content is None:
        return None
    return fault.status, fault.content, {"content-length": "100000", "connection": "close"}


def streamed(body: dict[str, Any], text: str) -> bytes:
    words = [word if number == 0 else f" {word}" for number, word in enumerate(text.split(" "))]
    chat = "messages" in body
    parts: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}] if chat else []
    parts += [{"delta": {"content": word}} if chat else {"text": word} for word in words]
    parts += [{"delta": {}, "finish_reason": "stop"} if chat else {"text": "", "finish_reason": "stop"}]
    events = [{"choices": [{"index": 0, **part}]} for part in parts]
    events += [{"choices": [], "usage": usage_of(body, len(words) + 1)}]
    return "".join(f"data: {event}\n\n" for event in [*map(json.dumps, events), "[DONE]"]).encode()


def usage_of(body: dict[str, Any], tokens: int) -> dict[str, int]:
    """10 prompt tokens per request."""
    return {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}


def regular_answer(body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """A whole answer: one token per word, and the end token."""
    text, rest = choice["text"], {key: value for key, value in choice.items() if key != "text"}
    content = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
    whole = {"index": 0, "finish_reason": "stop", **content, **rest}
    return {"id": "x", "choices": [whole], "usage": usage_of(body, len(text.split()) + 1)}


def stub_endpoint(
    answering: Answering, key: str = "", faults: tuple[Fault, ...] = (), plain: bool = False
) -> AbstractContextManager[StubEndpoint]:
    return running(StubEndpoint(answering, key, faults, plain))


@contextmanager
def raw_server(begin: bytes, pause_s: float, rest: bytes) -> Iterator[tuple[str, list[int]]]:
    """A server that answers every request with `begin`, and then sends `rest` again and again until the client closes.

    Yields its URL and a list with the number of bytes that it has sent.
    """
    sent, stopped = [0], threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            part = begin
            while not stopped.is_set():
                connection.sendall(part)
                sent[0] += len(part)
                part = rest
                time.sleep(pause_s if rest else 0.01)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
        finally:
            stopped.set()
            listener.shutdown(socket.SHUT_RDWR)
