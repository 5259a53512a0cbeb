"""Base class of the engines that are HTTP servers, such as vLLM.

An event loop in its own thread sends the requests: each to the server with the fewest unfinished samples, and as one
HTTP request per sample, so that a sample can be aborted by closing its connection. Sampling changes nothing on the
server: a request whose connection is lost is sent again, to another server if there is one.

A backend derives from `RemoteEngine` and implements `_check_servers`, `_payload`, `_parse` and `_publish`; the other
methods whose names begin with an underscore have defaults.

Several ranks share the servers. The first rank of a tensor-parallel group sends the group's requests and shares the
events with the other ranks, so all of them must make the same calls. Weights are published by the main rank (rank 0 of
all); the other ranks only take part in gathering them. A `UserError` of one rank is raised on all of them.
"""

from __future__ import annotations

import asyncio
import math
import resource
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import index
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from assay.engine.base import (
    Capabilities,
    EngineInfo,
    EngineOptions,
    Event,
    Failed,
    Finished,
    Request,
    TokenChunk,
    WeightSource,
)
from assay.engine.native.tensor_parallel import NO_TIMEOUT, new_cpu_group
from assay.engine.sequence import Job, check_scored, job_for, unknown_handle
from assay.mesh import waiting
from assay.models.base import PolicyModel
from assay.types import Completion, Finish, UserError, describe_error, missing_extra

T = TypeVar("T")
POLL_S = 0.001  # `step(wait=False)` waits this long for an event, so that a caller that polls does not spin
CONNECT_S = 10.0  # time limit of opening a connection
KEEP_ALIVE_S = 2.0  # idle connections are closed after this; servers close theirs after 5 s or more
ATTEMPTS = 4  # of a request whose connection is lost
MAX_WAIT_S = 5.0  # between two attempts of a request that a busy server refused
SPARE_FILES = 256  # file descriptors that are left for everything but connections


class ServerError(UserError):
    """A server could not be used. The line names it and says what to do."""


class ServerUnreachable(ServerError):
    """The connection was refused or lost."""


class ServerBusy(ServerError):
    """The server refused the request because it has too many."""


@dataclass(eq=False)
class Server:
    url: str
    client: Any  # httpx.AsyncClient
    running: int = 0  # unfinished samples that this process has sent to it


@dataclass(eq=False)
class SampleBatch:
    """Samples of one request that are sent as one HTTP request."""

    job: Job
    samples: list[int]
    server: Server
    counted: int = 0  # samples that the server's counter includes

    def assign(self, server: Server) -> None:
        self.end()
        self.server, self.counted = server, len(self.samples)
        server.running += self.counted

    def end(self, *_: object) -> None:
        self.server.running -= self.counted
        self.counted = 0


@dataclass(eq=False)
class RunningRequest:
    job: Job
    samples: set[int]  # neither finished nor aborted
    tasks: dict[int, asyncio.Task] = field(default_factory=dict)  # by sample


class RemoteEngine(ABC):
    """Implements `Engine` for servers. See the description of this module."""

    kind: ClassVar[str]  # name of the server in messages, e.g. "vLLM"
    section: ClassVar[str]  # section of its settings, e.g. "vllm"
    splits_samples: ClassVar[bool] = True  # one HTTP request per sample; False: one for all samples of a request

    def __init__(
        self,
        model: PolicyModel,
        urls: Sequence[str],
        options: EngineOptions,
        capabilities: Capabilities,
        *,
        timeout_s: float = 0.0,
        api_key: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        """`timeout_s`: fail if a server does not answer a request within this time; 0: wait without a limit.

        `ranks`: those of `options.group` if they exist already. The served weights have version -1 until the first
        `update_weights`.
        """
        self.vocab_size, self.options, self.timeout_s = model.vocab_size, options, timeout_s
        self.ranks = ranks or Ranks(options.group)
        self.loop = LoopThread()
        self.servers = [Server(url, self._new_client(url, api_key)) for url in map(check_url, urls)]
        max_length = min(model.max_length, options.max_length or model.max_length)
        self.info = EngineInfo(-1, max_length, options.max_batch, options.dtype, capabilities)
        self.next_id = count()
        self.events: deque[Event] = deque()
        self.running: dict[int, RunningRequest] = {}
        self.error: BaseException | None = None  # an unexpected exception in the thread, raised by `step`
        self.arrived = threading.Condition()  # guards the four above
        self.asleep = False
        connections = min(options.max_batch * len(self.servers), allowed_connections())
        self.slots = self.loop.call(semaphore(connections))
        try:
            self.ranks.on_leaders(self._check_servers)
        except BaseException:
            self._close()
            raise

    # -- implemented by each backend; these run on the leaders, `_publish` and the later ones on the main rank

    @abstractmethod
    def _check_servers(self) -> None:
        """Raise a `UserError` unless all servers are reachable and serve this model, vocabulary and length."""

    @abstractmethod
    def _payload(self, job: Job, samples: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of the HTTP request for these samples (with `splits_samples` always one)."""

    @abstractmethod
    def _parse(self, response: Any, job: Job, samples: Sequence[int], version: int) -> list[Completion]:
        """Completions of the samples, made with `_completion`. `version`: of the weights when the request was sent."""

    @abstractmethod
    def _publish(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load full weights into all servers; they must not use cached prefixes of earlier weights afterwards.

        If `self.asleep`, the servers sleep; they must be awake afterwards.
        """

    def _begin_update(self) -> None:  # noqa: B027
        """Called on all ranks before an update. Engines with `inflight_updates` must not send requests until its end.

        `_end_update` follows, also if the update fails.
        """

    def _end_update(self) -> None:  # noqa: B027
        pass

    def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        raise UserError(f"{self.kind} servers do not report log-probabilities of given tokens (capability score)")

    def _fingerprint(self) -> str | None:
        return None

    def _sleep(self) -> None:  # noqa: B027
        """Release memory of the servers."""

    def _wake(self) -> None:  # noqa: B027
        """Allocate it again. May be called by several ranks, and while the servers are awake."""

    def _reset_prefix_cache(self) -> None:  # noqa: B027
        """Only for servers with a prefix cache."""

    def _close_servers(self) -> None:  # noqa: B027
        """Stop servers that this engine has started."""

    def _why_unreachable(self, server: Server) -> str:
        """What the line about an unreachable server says after the cause."""
        return f"start a {self.kind} server there, or correct {self.section}.urls"

    def _hint(self, server: Server) -> str:
        """What a line about a failure within the server says at its end."""
        return ""

    async def _generate(self, server: Server, job: Job, samples: Sequence[int]) -> list[Completion]:
        path, payload = self._payload(job, samples)
        version = self.info.version
        return self._parse(await self.post(server, path, payload), job, samples, version)

    # -- for the backends

    async def request(self, server: Server, method: str, path: str, payload: Any = None, timeout_s: float = 0) -> Any:
        """Send a request; the JSON of the answer (None if it is empty). Raises a `ServerError`."""
        import httpx

        limit = timeout_s or self.timeout_s or None
        timeout = httpx.Timeout(limit, connect=min(limit or CONNECT_S, CONNECT_S), pool=None)
        try:
            response = await server.client.request(method, path, json=payload, timeout=timeout)
        except httpx.ConnectTimeout:
            raise ServerUnreachable(self._unreachable(server, "no answer to connecting")) from None
        except httpx.TimeoutException:
            advice = f"look at its log, or raise {self.section}.timeout_s"
            raise ServerError(f"{server.url}{path} did not answer within {limit:g} s: {advice}") from None
        except httpx.TransportError as error:
            raise ServerUnreachable(self._unreachable(server, describe_error(error))) from None
        return self._content(server, path, response)

    async def post(self, server: Server, path: str, payload: Any = None, timeout_s: float = 0) -> Any:
        return await self.request(server, "POST", path, payload, timeout_s)

    def call(self, server: Server, method: str, path: str, payload: Any = None, timeout_s: float = 0) -> Any:
        """`request`, from another thread than that of the event loop."""
        return self.loop.call(self.request(server, method, path, payload, timeout_s))

    def call_all(self, method: str, path: str, payload: Any = None, timeout_s: float = 0) -> list[Any]:
        """Send the same request to all servers at once. Waits for all answers, then raises the first error."""

        async def together() -> list[Any]:
            calls = (self.request(server, method, path, payload, timeout_s) for server in self.servers)
            return await asyncio.gather(*calls, return_exceptions=True)

        answers = self.loop.call(together())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def garbage(self, what: str) -> ServerError:
        """The error for an answer that has not the expected form."""
        return ServerError(f"a {self.kind} server returned {what}: is another program or version running there?")

    def _completion(
        self,
        job: Job,
        token_ids: Any,
        engine_logprobs: Any,
        sampling_logprobs: Any,
        finish: Finish,
        version: int,
        **more: Any,
    ) -> Completion:
        """A completion of what a server returned, if its tokens and log-probabilities are valid."""
        ids = [one for one in token_ids or () if isinstance(one, int) and 0 <= one < self.vocab_size]
        if not ids or len(ids) != len(token_ids) or len(ids) > job.limit:
            raise self.garbage(f"{len(token_ids or ())} tokens, where 1 to {job.limit} of the vocabulary were expected")
        for values in (engine_logprobs, sampling_logprobs):
            valid = all(isinstance(one, float | int) and math.isfinite(one) for one in values or ())
            if values is None or len(values) != len(ids) or not valid:
                raise self.garbage("not one finite log-probability per token")
        return Completion(ids, list(engine_logprobs), list(sampling_logprobs), finish, version, **more)

    # -- the interface

    def add(self, request: Request) -> int:
        request_id = next(self.next_id)
        if not self.ranks.leads:
            return request_id
        try:
            if request.continues is not None:
                raise unknown_handle(request, request_id)
            limits = {"max_length": self.info.max_length, "vocabulary": self.vocab_size}
            job = job_for(request, request_id, (), can_decode=self.options.decode is not None, **limits)
            job.tokens = [index(token) for token in job.tokens]  # JSON has no NumPy integers
        except UserError as error:
            with self.arrived:
                self.events.append(Failed(request_id, str(error)))
            return request_id
        running = RunningRequest(job, {sample.index for sample in job.samples})
        with self.arrived:
            self.running[request_id] = running
        self.loop.post(partial(self._start, running))
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        return self.ranks.from_leader(lambda: self._step(wait))

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        for one in ids:
            request_id, sample = one if isinstance(one, tuple) else (one, None)
            with self.arrived:
                self.events = deque(event for event in self.events if not concerns(event, request_id, sample))
                if (running := self.running.get(request_id)) is None:
                    continue
                dropped = running.samples & ({sample} if sample is not None else running.samples)
                running.samples -= dropped
                if not running.samples:
                    del self.running[request_id]
                self.arrived.notify_all()
            self.loop.post(partial(cancel_unneeded, running))

    def release(self, handles: Iterable[int]) -> None:  # noqa: B027
        """Nothing is kept on the servers."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        check_scored(sequences, temperature, self.info.max_length, self.vocab_size)
        return self.ranks.from_leader(lambda: self._score(self._least_busy(), sequences, temperature))

    def score_each(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        """`score` of each server, by URL."""
        check_scored(sequences, 1.0, self.info.max_length, self.vocab_size)
        return self.ranks.from_leader(
            lambda: {server.url: self._score(server, sequences, 1.0) for server in self.servers}
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def update_weights(self, source: WeightSource, version: int) -> None:
        self.ranks.on_leaders(self._check_idle_for_update)
        weights = iter(source.weights())

        def publish() -> None:
            try:
                self._publish(weights, version)
            finally:
                drain(weights)  # the other ranks gather all weights, also if this one failed

        try:
            self._begin_update()
            self.ranks.barrier()
            self.ranks.on_main(publish, meanwhile=lambda: drain(weights))
            self.asleep = False
            self.info = replace(self.info, version=version)
        finally:
            self._end_update()

    def _check_idle_for_update(self) -> None:
        if self.running and not self.info.capabilities.inflight_updates:
            raise UserError(f"{self.kind} cannot update weights while requests are running: finish or abort them")

    def fingerprint(self) -> str | None:
        return self.ranks.on_main(self._fingerprint) if self.info.capabilities.fingerprint else None

    def sleep(self) -> None:
        self.ranks.on_leaders(self._check_idle)
        if self.options.sleep_while_training and not self.asleep:
            self.ranks.on_main(self._sleep)
            self.asleep = True

    def _check_idle(self) -> None:
        if self.running:
            raise UserError("the engine cannot sleep while requests are running: finish or abort them first")

    def wake(self) -> None:
        if self.asleep:
            self.ranks.on_main(self._wake)
            self.asleep = False

    def reset_prefix_cache(self) -> None:
        if not self.asleep:  # sleeping servers have none
            self.ranks.on_main(self._reset_prefix_cache)

    def close(self) -> None:
        self.abort(list(self.running))
        self._close()

    # -- the event loop: these run in its thread

    def _start(self, running: RunningRequest) -> None:
        """Assign a request to the server with the fewest unfinished samples, and start its tasks."""
        server = self._least_busy()
        samples = sorted(running.samples)
        for group in [[one] for one in samples] if self.splits_samples else [samples]:
            part = SampleBatch(running.job, group, server)
            part.assign(server)
            task = asyncio.ensure_future(self._serve(running, part))
            task.add_done_callback(part.end)  # also called for a task that is cancelled before it begins
            running.tasks |= dict.fromkeys(group, task)

    async def _serve(self, running: RunningRequest, part: SampleBatch) -> None:
        """Serve some samples of one request, and put their events."""
        try:
            async with self.slots:
                completions = await self._generate_with_retries(part)
            for sample, completion in zip(part.samples, completions, strict=True):
                self._finish(running, sample, completion)
        except UserError as error:
            self._fail(running, str(error))
        except Exception as error:  # a bug: `step` raises it
            with self.arrived:
                self.error = error
                self.arrived.notify_all()

    async def _generate_with_retries(self, part: SampleBatch) -> list[Completion]:
        lost, wait_s, started = 0, 0.1, time.monotonic()
        while True:
            try:
                return await self._generate(part.server, part.job, part.samples)
            except ServerUnreachable:
                lost += 1
                if lost == ATTEMPTS:
                    raise
                others = [one for one in self.servers if one is not part.server]
                part.assign(min(others or [part.server], key=lambda one: one.running))
            except ServerBusy:
                if self.timeout_s and time.monotonic() - started > self.timeout_s:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _finish(self, running: RunningRequest, sample: int, completion: Completion) -> None:
        job = running.job
        with self.arrived:
            if sample not in running.samples:
                return  # aborted
            running.samples.discard(sample)
            if not running.samples:
                del self.running[job.id]
            if job.request.stream:
                chunk = TokenChunk(job.id, sample, list(completion.token_ids), list(completion.engine_logprobs))
                self.events.append(chunk)
            self.events.append(Finished(job.id, sample, completion))
            self.arrived.notify_all()

    def _fail(self, running: RunningRequest, error: str) -> None:
        with self.arrived:
            if not running.samples:
                return  # aborted, or another sample has failed
            running.samples.clear()
            del self.running[running.job.id]
            self.events.append(Failed(running.job.id, f"{running.job.name}: {error}"))
            self.arrived.notify_all()
        cancel_unneeded(running)

    # -- the rest

    def _least_busy(self) -> Server:
        return min(self.servers, key=lambda one: one.running)

    def _step(self, wait: bool) -> list[Event]:
        if self.asleep and self.running:
            self._wake()  # on this rank alone: others may have no requests
            self.asleep = False
        with self.arrived:
            if not wait and not self.events and self.running:
                self.arrived.wait(POLL_S)
            while wait and not self.events and self.running and self.error is None:
                self.arrived.wait()
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            events, self.events = list(self.events), deque()
            return events

    def _new_client(self, url: str, api_key: str) -> Any:
        try:
            import httpx
        except ImportError:
            raise missing_extra(f"engine {self.section}", self.section) from None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        # A proxy that the environment names is for other hosts.
        return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, trust_env=not is_loopback(url))

    def _unreachable(self, server: Server, cause: str) -> str:
        return f"the {self.kind} server {server.url} is not reachable ({cause}): {self._why_unreachable(server)}"

    def _content(self, server: Server, path: str, response: Any) -> Any:
        if response.status_code in (429, 503):
            raise ServerBusy(f"{server.url}{path} is overloaded: {message_of(response)}")
        if response.status_code in (401, 403):
            advice = f"set {self.section}.api_key_env to the environment variable that holds its API key"
            raise ServerError(f"{server.url} refused access ({response.status_code}): {advice}")
        if response.status_code >= 400:
            hint = self._hint(server) if response.status_code >= 500 else ""
            raise ServerError(f"{server.url}{path} answered {response.status_code}: {message_of(response)}{hint}")
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise self.garbage(f"something that is not JSON ({shortened(response.text)!r})") from None

    def _close(self) -> None:
        async def close_clients() -> None:
            for server in self.servers:
                await server.client.aclose()

        if self.loop.running:
            with suppress(Exception):
                self.loop.call(close_clients())
            self.loop.stop()
            self._close_servers()


def concerns(event: Event, request_id: int, sample: int | None) -> bool:
    return event.request_id == request_id and (sample is None or getattr(event, "sample", None) == sample)


def cancel_unneeded(running: RunningRequest) -> None:
    """Cancel the HTTP requests of which no sample is needed any more."""
    needed = {id(running.tasks[sample]) for sample in running.samples if sample in running.tasks}
    current = asyncio.current_task() if running.tasks else None
    for task in running.tasks.values():
        if id(task) not in needed and task is not current:
            task.cancel()


def drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


def check_url(text: str) -> str:
    """The URL of a server without a final /v1 or slash."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"'{text}' is not the URL of a server: write it as http://HOST:PORT")
    return url


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def message_of(response: Any) -> str:
    """The error message in an answer: OpenAI's format, that of FastAPI, or the beginning of the text."""
    with suppress(ValueError):
        content = response.json()
        if isinstance(content, Mapping):
            error = content.get("error", content.get("detail", content.get("message", content)))
            return shortened(str(error.get("message", error) if isinstance(error, Mapping) else error))
    return shortened(response.text) or response.reason_phrase


def shortened(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def allowed_connections() -> int:
    """The number of connections that this process may open, after its limit of open files has been raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(16, (65536 if soft == resource.RLIM_INFINITY else soft) - SPARE_FILES)


async def semaphore(value: int) -> asyncio.Semaphore:
    return asyncio.Semaphore(value)


class LoopThread:
    """An asyncio event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="assay-http", daemon=True)
        self.thread.start()

    @property
    def running(self) -> bool:
        return self.thread.is_alive() and not self.loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def post(self, work: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Ranks:
    """The ranks that use the same servers: all of them, and the tensor-parallel `group` of this one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.world = dist.new_group(backend="gloo", timeout=NO_TIMEOUT) if several else None
        self.group = new_cpu_group(group) if several and group is not None and group.size() > 1 else None
        self.leads = self.group is None or self.group.rank() == 0
        self.is_main = not several or dist.get_rank() == 0

    def from_leader(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank of the tensor-parallel group; all its ranks get the result or `UserError`."""
        return self._shared(work, self.leads, self.group)

    def on_main(self, work: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Call `work` on the main rank and `meanwhile` on all others; all get the result or `UserError`."""
        if not self.is_main:
            meanwhile()
        return self._shared(work, self.is_main, self.world)

    def barrier(self) -> None:
        if self.world is not None:
            self.on_leaders(lambda: None)

    def on_leaders(self, work: Callable[[], None]) -> None:
        """Call `work` on the first rank of every group. A `UserError` is raised on all ranks."""
        error: UserError | None = None
        if self.leads:
            try:
                work()
            except UserError as raised:
                error = raised
        errors: list[Any] = [error]
        if self.world is not None:
            errors = [None] * self.world.size()
            with waiting():
                dist.all_gather_object(errors, error, group=self.world)
        if first := next((one for one in errors if one is not None), None):
            raise first

    def _shared(self, work: Callable[[], T], here: bool, group: dist.ProcessGroup | None) -> T:
        if group is None:
            return work()
        outcome: list[Any] = [None, None]
        if here:
            try:
                outcome[0] = work()
            except UserError as error:
                outcome[1] = error
        with waiting():
            dist.broadcast_object_list(outcome, group=group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
