"""Several servers of which some may fail: they are retired, and serve again after they have proved their weights.

A server is retired when it cannot be reached, does not answer questions about its health in time, returns garbage, or
samples with earlier weights because it was restarted. Its requests are sent to other servers, with the same seeds. The
next weight update includes every retired server that is healthy again. Such a server gets requests only after it has
shown that its weights are those of the other servers.

The last server is retired only if it has ended, hangs, or has lost its weights. Then all requests fail, and `lost` is
true until a weight update reaches a server again: training repeats the update until then, for `recover_s` seconds. With
`recover_s` = 0, the last server is never retired.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy as np

from assay.engine.base import EngineInfo
from assay.engine.remote.http import (
    HttpServers,
    Server,
    ServerBusy,
    ServerError,
    ServerFailed,
    ServerGarbage,
    ServerSilent,
    ServerStale,
    ServerState,
    ServerUnreachable,
    is_lost,
)
from assay.engine.remote.scoring import gap_problem
from assay.engine.remote.transport import NcclTransport, Transport
from assay.types import UserError, plural

CHECKS = 4  # questions about a server's health within the time limit of an answer
LONGEST_PAUSE_S = 5.0  # between two of these questions
UNHEALTHY = 2  # answers with an error, one after the other, after which a server is retired
LATE = 1.5  # times the time limit, after which an answer is not late because of the server
JOIN_S = 2.0  # time limit of a retired server's answer, so that servers that stay away do not delay updates
PROVED = range(2, 18)  # tokens whose log-probabilities are compared
PROOF_LIMIT = 0.1  # largest root mean square difference in nats; other weights cause far more


class SupervisedServers(HttpServers):
    health_path: ClassVar[str] = "/health"
    info: EngineInfo
    transport: Transport | None = None
    health_timeout_s: float  # time limit of an answer to a question about health; 0: there are no questions
    recover_s: float  # how long to wait for a server after all of them have failed
    notify: Callable[[str], None]  # gets a line when a server is retired and when it serves again, from any thread
    failures = retries = 0  # retired servers, and requests that were sent again
    _watcher: asyncio.Task | None = None

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
        return [self.valid_logprobs(one, len(ids) - 1) for one, ids in zip(scores, sequences, strict=True)]

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
        if len(self.all_servers) == 1:
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
        return min(others or serving, key=lambda one: one.running)

    def retire(self, server: Server, reason: str, gone: bool = False) -> bool:
        with self._states:
            if server.state is ServerState.RETIRED:
                return True
            others = [one for one in self.serving() if one is not server]
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
        self.loop.post(lambda: [task.cancel() for task in list(server.tasks)])
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

    # -- questions about health, in the thread of the event loop

    def _watch(self) -> None:
        """Begin to ask all servers about their health."""
        if self.health_timeout_s and len(self.all_servers) > 1:

            async def start() -> asyncio.Task:
                return asyncio.ensure_future(self._ask_forever())

            self._watcher = self.loop.call(start())

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

        while True:
            await asyncio.sleep(min(self.health_timeout_s / CHECKS, LONGEST_PAUSE_S))
            await asyncio.gather(*map(ask, self.serving()))

    def _disconnect(self) -> None:
        if (watcher := self._watcher) is not None:
            self.loop.post(watcher.cancel)
        super()._disconnect()

    # -- the way back, on the main rank

    def invite(self) -> None:
        """Let retired servers that are healthy take part in the weight update that follows."""
        for server in self.all_servers:
            if server.state is not ServerState.RETIRED:
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


def check_proof(url: str, proof: Any, other_url: str, expected: Any) -> None:
    """Raise `ServerStale` unless a server has the proof that is expected, which is that of another server."""
    if isinstance(expected, np.ndarray):
        if problem := gap_problem(proof, expected, PROOF_LIMIT):
            raise ServerStale(f"{url} has other weights than {other_url}: {problem}")
    elif proof != expected:
        raise ServerStale(f"{url} has other weights than {other_url}")
