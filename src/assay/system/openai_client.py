"""Client of OpenAI-compatible endpoints: concurrency, retries with back-off, rate limits, token counts.

The API key comes from the environment. It is held by the HTTP client only, and removed from all error messages.

Answers come from programs that may be broken or hostile: their size and duration are limited, they must not be
compressed, and redirects are not followed. All HTTP clients of assay use `opened`, `read_answer` and `read_lines`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import cycle
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from assay.config import EndpointConfig
from assay.system.awaiting import LoopThread
from assay.system.http_server import is_loopback
from assay.types import UserError, describe_error, excerpt, hide_credentials, missing_extra, plural

T = TypeVar("T")
CONNECT_S = 10.0  # time limit of opening a connection
KEEP_ALIVE_S = 2.0  # idle connections are closed after this; servers close theirs after 5 s or more
POOLS = 64  # of connections; see `SpreadTransport`
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0  # between two attempts: doubled each time, up to the maximum
MAX_RETRY_AFTER_S = 600.0  # an endpoint that asks for a longer pause is not waited for
RETRIED = (408, 425, 429)  # and all from 500 on
REFUSED = (401, 403, 404)  # every other request would get the same answer
NO_CREDIT = "insufficient_quota"  # error code of status 429 where waiting does not help
# Of an answer: 16,000 tokens with 20 alternatives each, as the OpenAI API describes them, are 40 MB.
MAX_BYTES = 64 << 20
STREAM_LIMITS = 30  # a stream may take this many times the time limit of its next line


class BadBody(Exception):
    """The body of an answer is compressed or too large."""


class EndpointError(UserError):
    """A request failed. `timed_out`: there was no answer in time. `refused`: others would fail in the same way."""

    def __init__(self, text: str, *, status: int = 0, timed_out: bool = False, refused: bool = False) -> None:
        super().__init__(text)
        self.status, self.timed_out, self.refused = status, timed_out, refused


class Retry(Exception):
    """An attempt failed in a way that may pass. `pause_s`: how long the endpoint asks to wait."""

    def __init__(self, error: EndpointError, pause_s: float = 0.0) -> None:
        super().__init__()
        self.error, self.pause_s = error, pause_s


@dataclass
class Usage:
    """What was sent so far: answered requests, repeated attempts, and tokens as the endpoint counts them."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0  # answers without token counts

    def add(self, answer: Mapping[str, Any]) -> int | None:
        """Count an answer; returns its number of completion tokens, if the endpoint reports it."""
        usage: Any = answer.get("usage")
        names = ("prompt_tokens", "completion_tokens") if isinstance(usage, Mapping) else ()
        counts = [usage.get(name) for name in names]
        self.requests += 1
        if not counts or not all(isinstance(count, int) and count >= 0 for count in counts):
            self.uncounted += 1
            return None
        self.prompt_tokens += counts[0]
        self.completion_tokens += counts[1]
        return counts[1]

    def __str__(self) -> str:
        tokens = f"{plural(self.prompt_tokens, 'prompt token')}, {plural(self.completion_tokens, 'completion token')}"
        parts = [plural(self.requests, "request"), tokens if self.uncounted < self.requests else "tokens not reported"]
        return ", ".join(parts + ([f"{self.retries:,} repeated"] if self.retries else []))


class Endpoint:
    """One endpoint. Requests are coroutines that run in an event loop of its own, in a thread (`loop`)."""

    def __init__(self, settings: EndpointConfig, section: str, root: bool = False) -> None:
        """`section`: name of the section of `settings`, for messages. `root`: paths do not begin with /v1."""
        self.section, self.extra, self.attempts = section, dict(settings.extra), settings.retries + 1
        self.url = base_url(settings.url, section)
        if root:
            self.url = self.url.removesuffix("/v1")
        self.timeout_s = settings.timeout_s
        self.usage = Usage()
        self._key = key_of(settings.api_key_env, section)
        try:
            self._client = new_client(self.url, self._key)
        except ImportError:
            raise missing_extra(f"{section}.url", "openai") from None
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._resume_at = 0.0  # no request is sent before: the endpoint asked for a pause
        self._refusal: EndpointError | None = None
        self.loop = LoopThread()

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request; the JSON object of the answer. Raises an `EndpointError`."""

        async def attempt() -> dict[str, Any]:
            payload = {**body, **self.extra}
            async with asyncio.timeout(self.timeout_s or None), opened(self._client, "POST", path, payload) as response:
                answer = await read_answer(response)
            self._check(path, answer)
            return self._object(path, answer.text)

        return await self._with_retries(path, attempt)

    async def stream(self, path: str, body: Mapping[str, Any], receive: Callable[[dict[str, Any]], None]) -> None:
        """Send a request with `stream`; `receive` gets the objects of the answer as they arrive.

        An answer that breaks off after it has begun is not requested again.
        """
        begun = False

        async def attempt() -> None:
            nonlocal begun
            payload, limit = {**body, **self.extra, "stream": True}, self.timeout_s
            async with (
                asyncio.timeout(STREAM_LIMITS * limit or None),
                opened(self._client, "POST", path, payload, limit) as response,
            ):
                if response.status_code != 200:
                    self._check(path, await read_answer(response, timeout_s=limit))
                async with aclosing(read_lines(response, timeout_s=limit)) as lines:
                    async for line in lines:
                        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                        if data == "[DONE]":
                            return
                        if data:
                            begun = True
                            receive(self._object(path, data))

        try:
            await self._with_retries(path, attempt, lambda: not begun)
        except EndpointError as error:
            raise error if not begun else EndpointError(f"the answer broke off: {error}") from None

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self.loop.running:
            with suppress(Exception):
                self.loop.call(self._client.aclose())
            self.loop.stop()

    # -- attempts

    async def _with_retries(
        self, path: str, attempt: Callable[[], Awaitable[T]], may_repeat: Callable[[], bool] = lambda: True
    ) -> T:
        for number in range(1, self.attempts + 1):
            try:
                async with self._slots:
                    while (left := self._resume_at - time.monotonic()) > 0:
                        await asyncio.sleep(left + random.uniform(0.0, 0.1))
                    if self._refusal is not None:
                        raise EndpointError(str(self._refusal), status=self._refusal.status, refused=True)
                    return await self._attempt(path, attempt)
            except Retry as retry:
                error, pause_s = retry.error, retry.pause_s
            except EndpointError as failure:
                if failure.refused and not self.usage.requests:  # nothing was answered: stop asking
                    self._refusal = failure
                raise
            if number == self.attempts or not may_repeat():
                tried = f" ({number} attempts)" if number > 1 else ""
                raise EndpointError(f"{error}{tried}", status=error.status, timed_out=error.timed_out)
            self.usage.retries += 1
            if pause_s:  # all requests have to wait
                self._resume_at = max(self._resume_at, time.monotonic() + pause_s)
            wait_s = min(FIRST_WAIT_S * 2 ** (number - 1), MAX_WAIT_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, path: str, attempt: Callable[[], Awaitable[T]]) -> T:
        import httpx

        try:
            return await attempt()
        except TimeoutError:
            text = f"{self.url}{path} gave no answer within {self.timeout_s:g} s: raise {self.section}.timeout_s"
            raise Retry(EndpointError(text, timed_out=True)) from None
        except BadBody as error:
            raise EndpointError(f"{self.url}{path} sent {error}: {self._is_it_one()}") from None
        except httpx.TransportError as error:
            cause = self._without_key(describe_error(error))
            text = f"{self.url} is not reachable ({cause}): is it running, and is {self.section}.url right?"
            raise Retry(EndpointError(text)) from None

    def _check(self, path: str, answer: Answer) -> None:
        """Raise an error that says what to do, or `Retry`, unless the answer has status 200."""
        status = answer.status_code
        if status == 200:
            return
        message = self._without_key(message_of(answer))
        what = f"{self.url}{path} answered {status}: {message}"
        if status == 429 and NO_CREDIT in answer.text:
            raise EndpointError(f"{what}; this account has no credit left", status=status, refused=True)
        if status in RETRIED or status >= 500:
            pause_s = retry_after(answer.headers)
            if pause_s > MAX_RETRY_AFTER_S:
                raise EndpointError(f"{what}; it asks to wait for {pause_s:,.0f} s: try again later", status=status)
            advice = f"; lower {self.section}.max_concurrent or raise {self.section}.retries" if status == 429 else ""
            raise Retry(EndpointError(what + advice, status=status), pause_s)
        raise EndpointError(f"{what}; {self._advice(status)}", status=status, refused=status in REFUSED)

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            return f"set {self.section}.api_key_env to the environment variable that holds a valid API key"
        if status == 404:
            return f"check the name of the model, and {self.section}.url"
        return f"it rejects this request: check the length of the prompt and the settings, also {self.section}.extra"

    def _object(self, path: str, text: str) -> dict[str, Any]:
        try:
            answer = parse_json(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            shown = self._without_key(excerpt(text, 80))
            raise EndpointError(f"{self.url}{path} answered {shown!r}, which is no JSON object: {self._is_it_one()}")
        if answer.get("error"):
            raise EndpointError(f"{self.url}{path} failed: {self._without_key(message_in(answer))}")
        return answer

    def garbage(self, path: str, answer: Mapping[str, Any], what: str) -> EndpointError:
        """The error for an answer that does not follow the OpenAI API."""
        shown = self._without_key(excerpt(json.dumps(answer), 80))
        return EndpointError(f"{self.url}{path} answered {shown}, which has no {what}: {self._is_it_one()}")

    def _is_it_one(self) -> str:
        return f"is {self.section}.url an OpenAI-compatible endpoint?"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def new_client(url: str, api_key: str, proxies: bool = True) -> Any:
    """A client of httpx, with limits on opening connections only. `proxies`: use proxies of the environment."""
    import httpx

    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
    # A proxy that the environment names is for other hosts.
    proxies = proxies and not is_loopback(urlsplit(url).hostname or "")
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    base = httpx.URL(url)
    auth = httpx.BasicAuth(base.username, base.password) if base.userinfo else None
    base = base.copy_with(userinfo=b"")
    transport = None
    if not proxies:
        context = httpx.create_ssl_context(trust_env=False)
        pools = [httpx.AsyncHTTPTransport(context, trust_env=False, limits=limits) for _ in range(POOLS)]
        transport = SpreadTransport(pools)
    return httpx.AsyncClient(
        base_url=base,
        auth=auth,
        headers=headers,
        limits=limits,
        trust_env=proxies,
        timeout=timeout,
        transport=transport,  # type: ignore[arg-type]
    )


class SpreadTransport:
    """A transport of httpx that spreads requests over several pools of connections.

    The time that a pool takes per request grows with the number of its connections, because it looks at all of them:
    bench/http_requests.py measures it.
    """

    def __init__(self, pools: Sequence[Any]) -> None:
        self._pools, self._turns = pools, cycle(pools)

    async def handle_async_request(self, request: Any) -> Any:
        return await next(self._turns).handle_async_request(request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    status_code: int
    text: str
    headers: Mapping[str, str]
    reason_phrase: str


@asynccontextmanager
async def opened(client: Any, method: str, path: str, payload: Any, timeout_s: float = 0) -> AsyncIterator[Any]:
    """Send a request; its answer, of which the body is not read yet. `timeout_s`: until the answer begins; 0: none."""
    async with asyncio.timeout(timeout_s or None):
        response = await client.send(client.build_request(method, path, json=payload), stream=True)
    try:
        yield response
    finally:
        await response.aclose()


async def read_answer(response: Any, max_bytes: int = MAX_BYTES, timeout_s: float = 0) -> Answer:
    async with asyncio.timeout(timeout_s or None):
        body = b"".join([part async for part in body_parts(response, max_bytes)])
    return Answer(response.status_code, body.decode(errors="replace"), response.headers, response.reason_phrase)


async def read_lines(response: Any, max_bytes: int = MAX_BYTES, timeout_s: float = 0) -> AsyncGenerator[str, None]:
    """The lines of an answer as they arrive. `timeout_s`: time limit of the next whole line."""
    buffer, part = bytearray(), b"?"
    async with aclosing(body_parts(response, max_bytes)) as parts:
        while part:
            async with asyncio.timeout(timeout_s or None):
                while part := await anext(parts, b""):
                    buffer += part
                    if b"\n" in part:
                        break
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
    if buffer:
        yield buffer.decode(errors="replace")


async def body_parts(response: Any, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body of an answer as it arrives. Raises `BadBody`."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise BadBody(f"an answer with content encoding {excerpt(encoding, 30)!r}, which assay does not accept")
    size = 0
    async with aclosing(response.aiter_raw()) as parts:
        async for part in parts:
            size += len(part)
            if size > max_bytes:
                raise BadBody(f"an answer of more than {max_bytes:,} bytes")
            yield part


def parse_json(text: str) -> Any:
    """Raises a `ValueError` for anything that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def key_of(variable: str, section: str) -> str:
    """The API key in the environment variable that the settings name; empty if they name none."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        # A key that was put into the settings by mistake must not be printed.
        shown = variable if variable.isidentifier() and variable.isupper() else "that it names"
        raise UserError(f"{section}.api_key_env: the environment variable {shown} is not set: export it first")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"the API key in the environment variable {variable} has characters that no header can have")
    return key


def base_url(text: str, section: str) -> str:
    """The URL that paths such as /chat/completions are appended to; /v1 is added to a URL without a path."""
    if not text:
        raise UserError(f"no endpoint: set {section}.url, e.g. to http://127.0.0.1:8000")
    url = text.strip().rstrip("/")
    parts = urlsplit(check_url(url))
    if parts.username or parts.password or parts.query or parts.fragment:
        advice = f"put the key into an environment variable, and its name into {section}.api_key_env"
        raise UserError(f"{section}.url contains a user name, password or query: {advice}")
    return url if urlsplit(url).path else f"{url}/v1"


def retry_after(headers: Mapping[str, str]) -> float:
    """The pause in seconds that an answer asks for; 0: none."""
    with suppress(ValueError, KeyError):
        return max(0.0, float(headers["retry-after-ms"]) / 1000)
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        # Relative to the endpoint's own clock if it tells the time: this machine's may be wrong by hours.
        now = parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    return 0.0


def check_url(text: str) -> str:
    """The URL of a server without a final /v1 or slash."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"'{hide_credentials(text)}' is not the URL of a server: write it as http://HOST:PORT")
    return url


def message_of(answer: Answer) -> str:
    """The error message in an answer: OpenAI's format, FastAPI's format, or the beginning of the text."""
    with suppress(ValueError):
        content = parse_json(answer.text)
        if isinstance(content, Mapping):
            return message_in(content)
    return excerpt(answer.text) or excerpt(answer.reason_phrase)


def message_in(content: Mapping[str, Any]) -> str:
    error = content.get("error", content.get("detail", content.get("message", content)))
    return excerpt(str(error.get("message", error) if isinstance(error, Mapping) else error))
