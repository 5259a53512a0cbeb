"""HTTP requests to the servers of an engine, sent by an event loop in its own thread. Errors say what to do."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from assay.engine.remote.launch import LaunchedServers, nodes_folder
from assay.system.awaiting import LoopThread
from assay.system.openai_client import (
    Answer,
    BadBody,
    check_url,
    message_of,
    new_client,
    opened,
    parse_json,
    read_answer,
    read_lines,
)
from assay.types import UserError, describe_error, excerpt, hide_credentials, missing_extra

T = TypeVar("T")
C = TypeVar("C", bound=Collection[Any])
PAUSES_S = (0.2, 0.5, 1.0)  # before a request of all servers is sent again to those whose connection was lost
ABORT_S = 5.0  # time limit of ending a collective operation after an error
SPARE_FILES = 256  # file descriptors that are left for everything but connections
ROUNDING = 1e-3  # largest log-probability above 0: in float32, the rounding error of logits up to 1,000 is below 1e-4
LOWEST = -1e30  # log-probabilities of sampled tokens are larger
MAX_BYTES = 16 << 20  # of an answer without sequences; the largest are digests of all weights, by name
TOKEN_BYTES = 1 << 10  # of an answer per token; it has its id, its text (up to three times) and its log-probability


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
    url: str  # without credentials
    client: Any  # httpx.AsyncClient
    query: str = ""  # of its URL, sent with every request
    running: int = 0  # unfinished samples that this process has sent to it
    state: ServerState = ServerState.SERVING
    reason: str = ""  # why it was retired
    restarted: bool = False  # its process, since it was retired
    tasks: set[asyncio.Task] = field(default_factory=set)  # its requests; cancelled when it is retired

    def target(self, path: str) -> str:
        """A path with the query of the URL."""
        return f"{path}{'&' if '?' in path else '?'}{self.query}" if self.query else path


class HttpServers:
    """Servers, and requests to them."""

    kind: ClassVar[str]  # name of the server in messages, e.g. "vLLM"
    section: ClassVar[str]  # section of its settings, e.g. "vllm"
    extra: ClassVar[str] = ""  # that installs the HTTP client; empty: it is named like the section
    start_advice: ClassVar[str] = "start a server there"  # what to do if it is not reachable

    def __init__(
        self, urls: Sequence[str], timeout_s: float = 0.0, api_key: str = "", launched: LaunchedServers | None = None
    ) -> None:
        """`timeout_s`: time limit of a whole answer, and of each line of an answer in lines; 0: wait without a limit.

        `launched`: the servers, if this process has started them.
        """
        self.timeout_s, self.launched = timeout_s, launched
        self._secrets = {api_key}
        self.all_servers = [self._new_server(url, api_key) for url in urls]
        self._states = threading.Lock()  # guards the states of servers
        self.loop = LoopThread()

    @property
    def servers(self) -> list[Server]:
        """Those that are not retired."""
        return [server for server in self.all_servers if server.state is not ServerState.RETIRED]

    async def request(
        self,
        server: Server,
        method: str,
        path: str,
        payload: Any = None,
        timeout_s: float = 0,
        is_json: bool = True,
        tokens: int = 0,
    ) -> Any:
        """Send a request; the JSON of the answer (None if it is empty). Raises a `ServerError`.

        `is_json`: False for an answer that is text, which is returned as it is. `tokens`: those that the answer is
        about, which limit its size.
        """
        limit = timeout_s or self.timeout_s
        with self._reported(server, path, limit):
            async with (
                asyncio.timeout(limit or None),
                opened(server.client, method, server.target(path), payload) as response,
            ):
                answer = await read_answer(response, max_bytes(tokens))
        return self._content(server, path, answer, is_json)

    async def post(self, server: Server, path: str, payload: Any = None, **options: Any) -> Any:
        return await self.request(server, "POST", path, payload, **options)

    def call(self, server: Server, method: str, path: str, payload: Any = None, **options: Any) -> Any:
        """`request`, from another thread than that of the event loop."""
        return self.loop.call(self.guarded(server, self.request(server, method, path, payload, **options)))

    def call_all(self, method: str, path: str, payload: Any = None, **options: Any) -> list[Any]:
        """The answers of `call_each`."""
        return list(self.call_each(method, path, payload, **options).values())

    def call_each(self, method: str, path: str, payload: Any = None, **options: Any) -> dict[Server, Any]:
        """Send a request to all servers at once, and wait for all answers. `payload`: may be a function of the server.

        Servers that fail are retired, if that is possible, and have no answer in the result. Otherwise, a request whose
        connection is lost is sent again some times, and any other error is raised.
        """
        body: Callable[[Server], Any] = payload if callable(payload) else lambda _: payload
        answers: dict[Server, Any] = {}

        async def together(servers: Sequence[Server]) -> list[Any]:
            calls = (self.request(one, method, path, body(one), **options) for one in servers)
            guarded = (self.guarded(one, call) for one, call in zip(servers, calls, strict=True))
            return await asyncio.gather(*guarded, return_exceptions=True)

        asked = self.require(self.servers)
        for pause in (*PAUSES_S, 0.0):
            answers |= zip(asked, self.loop.call(together(asked)), strict=True)
            failed = {one: answers.pop(one) for one in asked if isinstance(answers[one], BaseException)}
            if not answers and (other := next((e for e in failed.values() if not is_lost(e)), None)):
                raise other  # all servers fail: the request may be at fault
            gone = {one: is_lost(e) and not pause for one, e in failed.items()}
            asked = [
                one
                for one, e in failed.items()
                if not isinstance(e, ServerError) or not self.retire(one, str(e), gone[one])
            ]
            if not asked:
                break
            if not pause or not is_lost(failed[asked[0]]):
                raise failed[asked[0]]
            time.sleep(pause)
        self.require(answers)
        return {server: answers[server] for server in self.all_servers if server in answers}

    def call_during(
        self,
        work: Callable[[], None],
        posts: Mapping[Server, tuple[str, Any]],
        check: Callable[[Any], object] = lambda answer: None,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `work`, a collective operation in which servers take part when they get requests, and send these.

        Servers answer afterwards; `check` raises an error for a wrong answer. After an error, `work` would wait for
        ever: the error is raised at once, and `abort` tries to end `work`, which runs in its own thread.
        """
        done: Future[None] = Future()

        async def post(server: Server, path: str, body: Any) -> None:
            check(await self.guarded(server, self.post(server, path, body)))

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        loop, thread = self.loop.loop, threading.Thread(target=run, name="assay-collective", daemon=True)
        calls = [asyncio.run_coroutine_threadsafe(post(one, *request), loop) for one, request in posts.items()]
        thread.start()
        try:
            wait([*calls, done], return_when=FIRST_EXCEPTION)
            for one in [call for call in calls if call.done()] + [done, *calls]:  # errors of servers are the cause
                one.result()
        except BaseException:
            with suppress(Exception):
                abort()
            raise
        finally:
            for call in calls:
                call.cancel()
            thread.join(ABORT_S)

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

    def require(self, usable: C) -> C:
        """`usable`, which is empty if all servers have failed: that is an error."""
        if not usable:
            raise ServerError(f"all {self.kind} servers have failed: {self.all_servers[-1].reason}")
        return usable

    def retire(self, server: Server, reason: str, gone: bool = False) -> bool:
        """Stop to use a server that has failed. False if that is not possible.

        `gone`: it has ended, hangs, or has lost its weights, so that no other request can succeed either.
        """
        return False

    def field(self, answer: Any, name: str, kind: type[T]) -> T:
        """A field of an answer, which must have this type."""
        if not isinstance(answer, dict) or not isinstance(answer.get(name), kind):
            raise self.garbage(f"{excerpt(str(answer), 80)!r}, which has no valid '{name}'")
        return answer[name]

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Exceptions of code that reads an answer of another form become an error: a server returned `what`."""
        try:
            yield
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration):
            raise self.garbage(what) from None

    def valid_logprobs(self, values: Any, count: int) -> list[float]:
        """Log-probabilities of this number of tokens. Rounding errors above 0 stay, as in the native engine."""
        if problem := logprob_problem(values, count):
            raise self.garbage(problem)
        return [float(one) for one in values]

    def garbage(self, what: str) -> ServerGarbage:
        """The error for an answer that has not the expected form."""
        return ServerGarbage(
            f"a {self.kind} server returned {self._hide(what)}: is another program or version running there?"
        )

    def _hide(self, text: str) -> str:
        """A text of a server, without the credentials that were sent to it."""
        for secret in filter(None, self._secrets):
            text = text.replace(secret, "***")
        return text

    async def post_for_lines(
        self, server: Server, path: str, payload: Any, tokens: int = 0
    ) -> AsyncGenerator[Any, None]:
        """Send a request; the lines of the answer as they arrive, as JSON. `tokens`: see `request`."""
        limit = self.timeout_s
        with self._reported(server, path, limit):
            async with opened(server.client, "POST", server.target(path), payload, limit) as response:
                if response.status_code != 200:
                    self._content(server, path, await read_answer(response, max_bytes(0), limit))
                    raise self.garbage(f"status {response.status_code} instead of lines")
                async with aclosing(read_lines(response, max_bytes(tokens), limit)) as lines:
                    async for line in lines:
                        yield self._json(line)

    @contextmanager
    def _reported(self, server: Server, path: str, limit: float) -> Iterator[None]:
        """Exceptions of httpx become errors that say what to do."""
        import httpx

        try:
            yield
        except httpx.ConnectTimeout:
            raise self._unreachable(server, "no answer to connecting") from None
        except TimeoutError:
            advice = f"look at its log, or raise {self.section}.timeout_s"
            raise ServerSilent(f"{server.url}{path} did not answer within {limit:g} s: {advice}") from None
        except BadBody as error:
            raise self.garbage(str(error)) from None
        except httpx.TransportError as error:
            raise self._unreachable(server, describe_error(error)) from None

    def _unreachable(self, server: Server, cause: str) -> ServerUnreachable:
        death = self.launched.death(server.url) if self.launched is not None else ""
        advice = death or f"{self.start_advice}, or correct {self.section}.urls"
        return ServerUnreachable(f"the {self.kind} server {server.url} is not reachable ({cause}): {advice}")

    def _new_server(self, text: str, api_key: str) -> Server:
        """`text`: its URL, which may contain credentials."""
        base, _, query = text.partition("?")
        url = check_url(base)
        try:
            client = new_client(url, api_key, proxies=nodes_folder() is None)
        except ImportError:
            raise self.missing_httpx() from None
        self._secrets |= {query, urlsplit(url).password or ""}
        return Server(hide_credentials(url), client, query)

    def missing_httpx(self) -> UserError:
        return missing_extra(f"engine {self.kind.lower()}", self.extra or self.section)

    def _content(self, server: Server, path: str, answer: Answer, is_json: bool = True) -> Any:
        status = answer.status_code
        if status in (429, 503):
            raise ServerBusy(f"{server.url}{path} is overloaded: {self._hide(message_of(answer))}")
        if status in (401, 403):
            advice = f"set {self.section}.api_key_env to the environment variable that holds its API key"
            raise ServerError(f"{server.url} refused access ({status}): {advice}")
        if status >= 400:
            failed = status >= 500
            hint = self.launched.hint(server.url) if failed and self.launched is not None else ""
            kind = ServerFailed if failed else ServerError
            raise kind(f"{server.url}{path} answered {status}: {self._hide(message_of(answer))}{hint}")
        if status >= 300:
            raise self.garbage(f"a redirect (status {status}), which is not followed")
        if not answer.text:
            return None
        return self._json(answer.text) if is_json else answer.text

    def _json(self, text: str) -> Any:
        try:
            return parse_json(text)
        except ValueError:
            raise self.garbage(f"something that is not JSON ({excerpt(text, 80)!r})") from None

    def _disconnect(self) -> None:
        """Close all connections and end the thread."""

        async def close_clients() -> None:
            for server in self.all_servers:
                await server.client.aclose()

        with suppress(Exception):
            self.loop.call(close_clients())
        self.loop.stop()


def logprob_problem(values: Any, count: int) -> str:
    """What is wrong with log-probabilities that a server returned; empty if there are `count` valid ones."""
    if not isinstance(values, list) or len(values) != count:
        return f"not one log-probability for each of {count} tokens"
    invalid = [one for one in values if type(one) not in (int, float) or not LOWEST < one <= ROUNDING]
    return f"the log-probability {excerpt(str(invalid[0]), 30)}, which is not a number up to 0" if invalid else ""


def is_lost(error: BaseException) -> bool:
    return isinstance(error, ServerUnreachable)


def max_bytes(tokens: int) -> int:
    """Size limit of an answer about this number of tokens; 0: it is about something else."""
    return (1 << 16) + TOKEN_BYTES * tokens if tokens else MAX_BYTES


def allowed_connections() -> int:
    """The number of connections that this process may open, after its limit of open files has been raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(16, (65536 if soft == resource.RLIM_INFINITY else soft) - SPARE_FILES)
