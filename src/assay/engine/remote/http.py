"""HTTP requests to the servers of an engine, sent by an event loop in its own thread. Errors say what to do.

`SupervisedServers`: servers of which some may fail. They are retired, and serve again after they have proved their
weights.

A server is retired when it cannot be reached, does not answer questions about its health in time, returns garbage, or
samples with earlier weights because it was restarted. Its requests are sent to other servers, with the same seeds. The
next weight update includes every retired server that is healthy again. Such a server gets requests only after it has
shown that its weights equal the weights of the other servers.

The last server is retired only if it has ended, hangs, or has lost its weights. Then all requests fail, and `lost` is
true until a weight update reaches a server again: training repeats the update until then, for `recover_s` seconds. With
`recover_s` = 0, the last server is never retired.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import numpy as np

from assay.engine.base import EngineInfo
from assay.engine.remote.launch import LaunchedServers, cluster_engines, nodes_folder
from assay.engine.remote.scoring import gap_problem, logprob_problem
from assay.engine.remote.transport import NcclTransport, Transport
from assay.system.awaiting import LoopThread, run_in_thread
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
from assay.types import UserError, describe_error, excerpt, hide_credentials, plural

T = TypeVar("T")
C = TypeVar("C", bound=Collection[Any])
PAUSES_S = (0.2, 0.5, 1.0)  # before a request of all servers is sent again to those whose connection was lost
ABORT_S = 5.0  # time limit of ending a collective operation after an error
SPARE_FILES = 256  # file descriptors that are left for everything but connections
MAX_BYTES = 16 << 20  # of an answer without sequences; the largest are digests of all weights, by name
TOKEN_BYTES = 1 << 10  # of an answer per token; it has its id, its text (up to three times) and its log-probability


class ServerError(UserError):
    """A server could not be used. The line names it and says what to do."""

    status = 0  # of its answer, if it has answered with an error


class ServerUnreachable(ServerError):
    """The connection was refused or lost."""


class ServerBusy(ServerError):
    """The server refused the request because it has too many."""


class ServerSilent(ServerError):
    """The server did not answer within the time limit."""


class ServerFailed(ServerError):
    """The server answered with an error of its own (HTTP status 5xx)."""


class ServerGarbage(ServerError):
    """The answer of the server does not have the expected form."""


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
        self, keys: Mapping[str, str], timeout_s: float = 0.0, launched: LaunchedServers | None = None
    ) -> None:
        """`keys`: API keys by URL; empty: none.

        `timeout_s`: time limit of a whole answer, and of each line of an answer in lines; 0: wait without a limit.

        `launched`: the servers, if this process has started them.
        """
        self.timeout_s, self.launched = timeout_s, launched
        self._secrets: set[str] = set()
        self.all_servers = [self._new_server(url, key) for url, key in keys.items()]
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

        `is_json`: False for an answer that is text, which is returned as it is. `tokens`: number of tokens
        that the answer is about, which limits its size.
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
        """`request`, from a thread other than the thread of the event loop."""
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
            calls = (self.request(server, method, path, body(server), **options) for server in servers)
            guarded = (self.guarded(server, call) for server, call in zip(servers, calls, strict=True))
            return await asyncio.gather(*guarded, return_exceptions=True)

        asked = self.require(self.servers)
        for pause in (*PAUSES_S, 0.0):
            answers |= zip(asked, self.loop.call(together(asked)), strict=True)
            failed = {server: answers.pop(server) for server in asked if isinstance(answers[server], BaseException)}
            if not answers and (other := next((e for e in failed.values() if not is_lost(e)), None)):
                raise other  # all servers fail: the request may be at fault
            gone = {server: is_lost(e) and not pause for server, e in failed.items()}
            asked = [
                server
                for server, e in failed.items()
                if not isinstance(e, ServerError) or not self.retire(server, str(e), gone[server])
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
        check: Callable[[Any], object],
        abort: Callable[[], None],
    ) -> None:
        """Run `work`, a collective operation in which servers take part when they get requests, and send these.

        Servers answer afterwards; `check` raises an error for a wrong answer. After an error, `work` would wait for
        ever: the error is raised at once, and `abort` tries to end `work`, which runs in its own thread.
        """

        async def post(server: Server, path: str, body: Any) -> None:
            check(await self.guarded(server, self.post(server, path, body)))

        calls = [self.loop.submit(post(server, *request)) for server, request in posts.items()]
        done = run_in_thread(work, "assay-collective")
        try:
            wait([*calls, done], return_when=FIRST_EXCEPTION)
            for future in [call for call in calls if call.done()] + [done, *calls]:  # errors of servers are the cause
                future.result()
        except BaseException:
            with suppress(Exception):
                abort()
            raise
        finally:
            for call in calls:
                call.cancel()
            wait([done], ABORT_S)

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
        """Stop using a failed server. False if that is not possible.

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
        return [float(value) for value in values]

    def garbage(self, what: str) -> ServerGarbage:
        """The error for an answer that does not have the expected form."""
        return ServerGarbage(
            f"the {self.kind} server returned {self._hide(what)}: is another program or version running there?"
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
        client = new_client(url, api_key, proxies=not (nodes_folder() or cluster_engines()))
        self._secrets |= {api_key, query, urlsplit(url).password or ""}
        return Server(hide_credentials(url), client, query)

    def _content(self, server: Server, path: str, answer: Answer, is_json: bool = True) -> Any:
        status = answer.status_code
        if status in (429, 503):
            raise ServerBusy(f"{server.url}{path} is overloaded: {self._hide(message_of(answer))}")
        if status in (401, 403):
            advice = f"set {self.section}.api_key_env to the environment variable that holds its API key"
            refusal = ServerError(f"{server.url} refused access ({status}): {advice}")
            refusal.status = status
            raise refusal
        if status >= 400:
            failed = status >= 500
            hint = self.launched.hint(server.url) if failed and self.launched is not None else ""
            kind = ServerFailed if failed else ServerError
            error = kind(f"{server.url}{path} answered {status}: {self._hide(message_of(answer))}{hint}")
            error.status = status
            raise error
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


CHECKS = 4  # questions about a server's health within the time limit of an answer
LONGEST_PAUSE_S = 5.0  # between two of these questions
UNHEALTHY = 2  # answers with an error, one after the other, after which a server is retired
LATE = 1.5  # times the time limit, after which an answer is not late because of the server
JOIN_S = 2.0  # time limit of a retired server's answer, so that servers that stay away do not delay updates
PROVED = range(2, 18)  # tokens whose log-probabilities are compared
PROOF_LIMIT = 0.1  # largest root mean square difference in nats; other weights cause far more


class SupervisedServers(HttpServers):
    """See the description of this module."""

    health_path: ClassVar[str] = "/health"
    info: EngineInfo
    transport: Transport | None = None
    health_timeout_s: float  # time limit of a health check; 0: there are no health checks
    recover_s: float  # how long to wait for a server after all of them have failed
    notify: Callable[[str], None]  # gets a line when a server is retired and when it serves again, from any thread
    failures = retries = 0  # retired servers, and requests that were sent again
    _watcher: Future[None] | None = None

    @property
    def may_change(self) -> bool:
        """Whether servers may come and go."""
        return cluster_engines() > 0

    @property
    def lost(self) -> bool:
        """Whether all servers have failed."""
        return not self.serving()

    def _check_server(self, server: Server) -> None:
        """Raise a `UserError` unless the server serves this model, vocabulary and length."""

    def _join(self, server: Server) -> None:
        """Bring a server that was retired into the state of the others, which may sleep."""

    async def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """For each sequence, the log-probabilities of all tokens but the first, which the caller checks."""
        raise UserError(f"{self.kind} servers do not report log-probabilities of given tokens (capability score)")

    def _checked_score(
        self, server: Server, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        scores = self.loop.call(self.guarded(server, self._score(server, sequences, temperature)))
        if len(scores) != len(sequences):
            raise self.garbage("not one list of log-probabilities per sequence")
        return [self.valid_logprobs(row, len(ids) - 1) for row, ids in zip(scores, sequences, strict=True)]

    def score_anywhere(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        while True:
            self.require(self.serving())
            with self._retiring(server := self.least_busy()):
                return self._checked_score(server, sequences, temperature)

    def score_everywhere(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        """By URL, without servers that fail."""
        scores: dict[str, list[list[float]]] = {}
        for server in self.serving():
            with self._retiring(server):
                scores[server.url] = self._checked_score(server, sequences)
        return self.require(scores)

    @contextmanager
    def _retiring(self, server: Server) -> Iterator[None]:
        """Retire a server that fails; raise its error if that is not possible."""
        try:
            yield
        except ServerError as error:
            if not self.retire(server, str(error), is_lost(error)):
                raise

    def _proof(self, server: Server) -> Any:
        """What shows the weights of a server: scores of fixed tokens, or something that must be equal exactly."""
        return np.array(self._checked_score(server, [list(PROVED)])[0])

    def server_metrics(self) -> dict[str, float]:
        """Empty for a single server."""
        if len(self.all_servers) == 1 and not self.may_change:
            return {}
        counts = {"serving": len(self.serving()), "failures": self.failures, "retries": self.retries}
        return {f"servers/{name}": float(count) for name, count in counts.items()}

    def serving(self) -> list[Server]:
        return [server for server in self.all_servers if server.state is ServerState.SERVING]

    def least_busy(self, avoided: Server | None = None) -> Server:
        """The server with the fewest unfinished samples; not `avoided`, if there is another one.

        If all servers have failed, it is one of these, and must not be used.
        """
        serving = self.serving() or self.all_servers
        others = [server for server in serving if server is not avoided]
        return min(others or serving, key=lambda server: server.running)

    def retire(self, server: Server, reason: str, gone: bool = False) -> bool:
        with self._states:
            if server.state is ServerState.RETIRED:
                return True
            others = [other for other in self.serving() if other is not server]
            was_serving = server.state is ServerState.SERVING
            if self.info.version < 0:  # before the first weight update, settings may be wrong
                return False
            can_recover = self.recover_s > 0 and not isinstance(self.transport, NcclTransport)
            if not (others or (can_recover and (gone or not was_serving))):
                return False
            server.state, server.reason = ServerState.RETIRED, reason
            self.failures += was_serving
        what = "has failed and gets no more requests" if was_serving else "cannot serve again yet"
        self.notify(f"a server {what} ({plural(len(others), 'other') if others else 'none'} left): {reason}")
        self.loop.post(partial(end_tasks, server))
        return True

    async def retire_if_failed(self, server: Server, error: ServerError, repeated: bool = False) -> bool:
        """Retire a server after this error of a request, if the server is the cause.

        `repeated`: the connection was lost several times, which is needed to retire the last server.
        """
        if isinstance(error, ServerUnreachable) and server.state is not ServerState.RETIRED:
            with suppress(ServerError):  # a single connection may be lost
                await self.request(server, "GET", self.health_path, timeout_s=JOIN_S, is_json=False)
                return False
        at_fault = isinstance(error, ServerUnreachable | ServerSilent | ServerGarbage | ServerStale)
        gone = isinstance(error, ServerStale) or (isinstance(error, ServerUnreachable) and repeated)
        return at_fault and self.retire(server, str(error), gone)

    # -- health checks, in the thread of the event loop

    def _watch(self) -> None:
        """Begin to ask all servers about their health."""
        if self.health_timeout_s and (len(self.all_servers) > 1 or self.may_change):
            self._watcher = self.loop.submit(self._ask_forever())

    async def _ask_forever(self) -> None:
        unhealthy: dict[Server, int] = {}

        async def ask(server: Server) -> None:
            asked = time.monotonic()
            try:
                await self.request(server, "GET", self.health_path, timeout_s=self.health_timeout_s, is_json=False)
                unhealthy[server] = 0
            except (ServerUnreachable, ServerSilent) as error:
                # If the event loop itself was held up meanwhile, an answer may be there that was not read in time.
                if time.monotonic() - asked < LATE * self.health_timeout_s:
                    self.retire(server, str(error), gone=True)
            except (ServerFailed, ServerBusy) as error:
                unhealthy[server] = unhealthy.get(server, 0) + 1
                if unhealthy[server] >= UNHEALTHY:
                    self.retire(server, str(error), gone=True)
            except ServerError:  # of something in between; requests show whether the server works
                pass

        while True:
            await asyncio.sleep(min(self.health_timeout_s / CHECKS, LONGEST_PAUSE_S))
            await asyncio.gather(*map(ask, self.servers))  # also those that are joining

    def _disconnect(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        super()._disconnect()

    # -- the way back, on the main rank

    def invite(self) -> None:
        """Let retired servers that are healthy, and new ones, take part in the weight update that follows."""
        usable: Collection[str] = [server.url for server in self.all_servers]
        if self.launched is not None:
            usable = self.launched.refresh()
            self.follow(usable)
        for server in self.all_servers:
            if server.state is not ServerState.RETIRED or server.url not in usable:
                continue
            if self.launched is not None and (not server.restarted or self.launched.death(server.url)):
                self.launched.restart(server.url)
                server.restarted = True
            try:
                self.loop.call(self.request(server, "GET", self.health_path, timeout_s=JOIN_S, is_json=False))
                self._check_server(server)
                server.state = ServerState.JOINING
                self._join(server)
            except UserError as error:
                server.state, server.reason = ServerState.RETIRED, str(error)

    def follow(self, keys: Mapping[str, str]) -> None:
        """Use the servers with these URLs: new ones have to join, and the requests of others are sent again.

        Without any, the last ones stay, retired: all have failed, and their successors are being started.
        """
        known = {server.url: server for server in self.all_servers}
        for server in (server for url, server in known.items() if url not in keys):
            if server.state is not ServerState.RETIRED:
                server.state, server.reason = ServerState.RETIRED, f"{server.url} is not used any more"
            self.loop.post(partial(end_tasks, server))
        new = [self._new_server(url, key) for url, key in keys.items() if url not in known]
        for server in new:
            server.state, server.reason = ServerState.RETIRED, f"{server.url} has no weights yet"
            server.restarted = True
        self.all_servers = [*(server for url, server in known.items() if url in keys), *new] or [*known.values()]

    def admit(self, version: int) -> None:
        """Let the servers serve that have received the weights of this version and prove them."""
        for server in self.servers:
            if server.state is not ServerState.JOINING:
                continue
            try:
                if (proved := self._proof_of_another()) is not None:  # else training compares it with the policy
                    check_proof(server.url, self._proof(server), *proved)
            except UserError as error:
                self.retire(server, str(error))
                continue
            server.state = ServerState.SERVING
            server.restarted = False
            self.notify(f"the {self.kind} server {server.url} serves again, with the weights of version {version}")

    def _proof_of_another(self) -> tuple[str, Any] | None:
        """The URL of a server that serves, and its proof. Servers that fail to give theirs are retired."""
        for server in self.serving():
            try:
                return server.url, self._proof(server)
            except ServerError as error:
                if not self.retire(server, str(error), is_lost(error)):
                    raise ServerError(f"no other server proves its weights: {error}") from None
        return None

    def adopt(self, urls: Iterable[str]) -> None:
        """Use the servers that the main rank uses."""
        serving = set(urls)
        for server in self.all_servers:
            if server.url in serving:
                server.state = ServerState.SERVING
            elif server.state is not ServerState.RETIRED and not self.retire(server, "another process cannot use it"):
                server.state = ServerState.RETIRED


def end_tasks(server: Server) -> None:
    for task in list(server.tasks):
        task.cancel()


def check_proof(url: str, proof: Any, other_url: str, expected: Any) -> None:
    """Raise `ServerStale` unless the proof of a server matches `expected`, the proof of another server."""
    if isinstance(expected, np.ndarray):
        if problem := gap_problem(proof, expected, PROOF_LIMIT):
            raise ServerStale(f"{url} has other weights than {other_url}: {problem}")
    elif proof != expected:
        raise ServerStale(f"{url} has other weights than {other_url}")
