"""HTTP requests to the servers of an engine, sent by an event loop in its own thread. Errors say what to do."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, TypeVar

from assay.config import ServerConfig, SGLangConfig, VLLMConfig
from assay.endpoint import LoopThread, check_url, is_loopback, message_of, shortened
from assay.engine.remote.launch import LaunchedServers
from assay.engine.remote.nodes import nodes_folder
from assay.types import UserError, describe_error, missing_extra

T = TypeVar("T")
CONNECT_S = 10.0  # time limit of opening a connection
PAUSES_S = (0.2, 0.5, 1.0)  # before a request of all servers is sent again to those whose connection was lost
KEEP_ALIVE_S = 2.0  # idle connections are closed after this; servers close theirs after 5 s or more
SPARE_FILES = 256  # file descriptors that are left for everything but connections


class ServerError(UserError):
    """A server could not be used. The line names it and says what to do."""


class ServerUnreachable(ServerError):
    """The connection was refused or lost."""


class ServerBusy(ServerError):
    """The server refused the request because it has too many."""


class ServerSilent(ServerError):
    """The server did not answer within the time limit."""


class ServerFailed(ServerError):
    """The server answered with an error of its own (HTTP status 5xx)."""


class ServerGarbage(ServerError):
    """The answer of the server has not the expected form."""


class ServerStale(ServerError):
    """The server has sampled with weights of an earlier version."""


class ServerState(Enum):
    SERVING = "serving"
    JOINING = "joining"  # receives weights, but no other requests yet
    RETIRED = "retired"  # has failed, and is not used


@dataclass(eq=False)
class Server:
    url: str
    client: Any  # httpx.AsyncClient
    running: int = 0  # unfinished samples that this process has sent to it
    state: ServerState = ServerState.SERVING
    reason: str = ""  # why it was retired
    tasks: set[asyncio.Task] = field(default_factory=set)  # its requests; cancelled when it is retired


class HttpServers:
    """Servers, and requests to them."""

    kind: ClassVar[str]  # name of the server in messages, e.g. "vLLM"
    section: ClassVar[str]  # section of its settings, e.g. "vllm"
    start_advice: ClassVar[str] = "start a server there"  # what to do if it is not reachable

    def __init__(
        self, urls: Sequence[str], timeout_s: float = 0.0, api_key: str = "", launched: LaunchedServers | None = None
    ) -> None:
        """`timeout_s`: fail if a server does not answer a request within this time; 0: wait without a limit.

        `launched`: the servers, if this process has started them.
        """
        self.timeout_s, self.launched = timeout_s, launched
        self.all_servers = [Server(url, self._new_client(url, api_key)) for url in map(check_url, urls)]
        self.loop = LoopThread()

    @property
    def servers(self) -> list[Server]:
        """Those that are not retired."""
        return [server for server in self.all_servers if server.state is not ServerState.RETIRED]

    async def request(
        self, server: Server, method: str, path: str, payload: Any = None, timeout_s: float = 0, is_json: bool = True
    ) -> Any:
        """Send a request; the JSON of the answer (None if it is empty). Raises a `ServerError`.

        `is_json`: False for an answer that is text, which is returned as it is.
        """
        limit = timeout_s or self.timeout_s
        with self._reported(server, path, limit):
            response = await server.client.request(method, path, json=payload, timeout=timeouts(limit))
        return self._content(server, path, response, is_json)

    async def post(self, server: Server, path: str, payload: Any = None, timeout_s: float = 0) -> Any:
        return await self.request(server, "POST", path, payload, timeout_s)

    def call(self, server: Server, method: str, path: str, payload: Any = None, timeout_s: float = 0) -> Any:
        """`request`, from another thread than that of the event loop."""
        return self.loop.call(self.guarded(server, self.request(server, method, path, payload, timeout_s)))

    def call_all(
        self, method: str, path: str, payload: Any = None, timeout_s: float = 0, is_json: bool = True
    ) -> list[Any]:
        """The answers of `call_each`."""
        return list(self.call_each(method, path, payload, timeout_s, is_json).values())

    def call_each(
        self, method: str, path: str, payload: Any = None, timeout_s: float = 0, is_json: bool = True
    ) -> dict[Server, Any]:
        """Send a request to all servers at once, and wait for all answers. `payload`: may be a function of the server.

        Servers that fail are retired, if that is possible, and have no answer in the result. Otherwise, a request whose
        connection is lost is sent again some times, and any other error is raised.
        """
        body: Callable[[Server], Any] = payload if callable(payload) else lambda _: payload
        answers: dict[Server, Any] = {}

        async def together(servers: Sequence[Server]) -> list[Any]:
            calls = (self.request(one, method, path, body(one), timeout_s, is_json) for one in servers)
            guarded = (self.guarded(one, call) for one, call in zip(servers, calls, strict=True))
            return await asyncio.gather(*guarded, return_exceptions=True)

        asked = self.servers
        for pause in (*PAUSES_S, 0.0):
            answers |= zip(asked, self.loop.call(together(asked)), strict=True)
            failed = {one: answers.pop(one) for one in asked if isinstance(answers[one], BaseException)}
            if not answers and (other := next((e for e in failed.values() if not is_lost(e)), None)):
                raise other  # all servers fail: the request may be at fault
            asked = [one for one, e in failed.items() if not isinstance(e, ServerError) or not self.retire(one, str(e))]
            if not asked:
                break
            if not pause or not is_lost(failed[asked[0]]):
                raise failed[asked[0]]
            time.sleep(pause)
        return {server: answers[server] for server in self.all_servers if server in answers}

    async def guarded(self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """The result of requests to a server, which end with an error when it is retired."""
        task = asyncio.ensure_future(work)
        server.tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ServerUnreachable(server.reason) from None  # `retire` has cancelled the task
        finally:
            server.tasks.discard(task)

    def retire(self, server: Server, reason: str) -> bool:
        """Stop to use a server that has failed. False if that is not possible."""
        return False

    def field(self, answer: Any, name: str, kind: type[T]) -> T:
        """A field of an answer, which must have this type."""
        if not isinstance(answer, dict) or not isinstance(answer.get(name), kind):
            raise self.garbage(f"{shortened(str(answer), 80)!r}, which has no valid '{name}'")
        return answer[name]

    def garbage(self, what: str) -> ServerGarbage:
        """The error for an answer that has not the expected form."""
        return ServerGarbage(f"a {self.kind} server returned {what}: is another program or version running there?")

    async def post_for_lines(self, server: Server, path: str, payload: Any) -> AsyncIterator[Any]:
        """Send a request; the lines of the answer as they arrive, as JSON."""
        post = server.client.stream("POST", path, json=payload, timeout=timeouts(self.timeout_s))
        with self._reported(server, path, self.timeout_s):
            async with post as response:
                if response.status_code != 200:
                    await response.aread()
                    self._content(server, path, response)
                async for line in response.aiter_lines():
                    yield self._json(line)

    @contextmanager
    def _reported(self, server: Server, path: str, limit: float) -> Iterator[None]:
        """Exceptions of httpx become errors that say what to do."""
        import httpx

        try:
            yield
        except httpx.ConnectTimeout:
            raise self._unreachable(server, "no answer to connecting") from None
        except httpx.TimeoutException:
            advice = f"look at its log, or raise {self.section}.timeout_s"
            raise ServerSilent(f"{server.url}{path} sent nothing for {limit:g} s: {advice}") from None
        except httpx.TransportError as error:
            raise self._unreachable(server, describe_error(error)) from None

    def _unreachable(self, server: Server, cause: str) -> ServerUnreachable:
        death = self.launched.death(server.url) if self.launched is not None else ""
        advice = death or f"{self.start_advice}, or correct {self.section}.urls"
        return ServerUnreachable(f"the {self.kind} server {server.url} is not reachable ({cause}): {advice}")

    def _new_client(self, url: str, api_key: str) -> Any:
        try:
            import httpx
        except ImportError:
            raise missing_extra(f"engine {self.section}", self.section) from None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        proxies = not is_loopback(url) and nodes_folder() is None  # those of the environment are for other hosts
        return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, trust_env=proxies)

    def _content(self, server: Server, path: str, response: Any, is_json: bool = True) -> Any:
        if response.status_code in (429, 503):
            raise ServerBusy(f"{server.url}{path} is overloaded: {message_of(response)}")
        if response.status_code in (401, 403):
            advice = f"set {self.section}.api_key_env to the environment variable that holds its API key"
            raise ServerError(f"{server.url} refused access ({response.status_code}): {advice}")
        if response.status_code >= 400:
            failed = response.status_code >= 500
            hint = self.launched.hint(server.url) if failed and self.launched is not None else ""
            kind = ServerFailed if failed else ServerError
            raise kind(f"{server.url}{path} answered {response.status_code}: {message_of(response)}{hint}")
        if not response.content:
            return None
        return self._json(response.text) if is_json else response.text

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise self.garbage(f"something that is not JSON ({shortened(text, 80)!r})") from None

    def _disconnect(self) -> None:
        """Close all connections and end the thread."""

        async def close_clients() -> None:
            for server in self.all_servers:
                await server.client.aclose()

        with suppress(Exception):
            self.loop.call(close_clients())
        self.loop.stop()


def is_lost(error: BaseException) -> bool:
    return isinstance(error, ServerUnreachable)


def api_key(settings: ServerConfig | VLLMConfig | SGLangConfig, section: str) -> str:
    """The key of given servers, from the environment variable that the settings name."""
    name = settings.api_key_env
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise UserError(f"the environment variable {name} ({section}.api_key_env) is not set")
    return key


def timeouts(limit: float) -> Any:
    import httpx

    return httpx.Timeout(limit or None, connect=min(limit or CONNECT_S, CONNECT_S), pool=None)


def allowed_connections() -> int:
    """The number of connections that this process may open, after its limit of open files has been raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(16, (65536 if soft == resource.RLIM_INFINITY else soft) - SPARE_FILES)
