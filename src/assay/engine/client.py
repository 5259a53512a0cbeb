"""Engines as coroutines see them: submit requests, await their completions.

    async def sample(client: EngineClient) -> list[Completion]:
        return await asyncio.gather(*client.submit(request))

    completions = run_sync(sample(client), client)

`EngineClient` is the interface to all engines, and `connect` makes a client of an engine. A client belongs to one event
loop. There are two kinds:

- A `LocalClient` steps an engine of this process, in the thread of its event loop (`drive`). It is strict by default:
  before each step, it waits until every task that `spawn` has started waits for the engine or has ended. Results are
  applied in the order of requests and samples. What the engine computes together, and with it the last bits of the
  results, then does not depend on the clock, and ranks that serve one model together make the same calls. A client that
  is not strict steps the engine while tasks wait for something else, such as a slow environment. With
  `driven_in_thread`, another thread steps the engine, so that the event loop never waits for a step: in `assay serve`.
- A `ServerClient` passes requests to the event loop of a `ServerEngine`, where a task per HTTP request resolves the
  futures. Requests that are submitted in the same iteration of the loop are passed together.

`run_sync` runs a coroutine in the thread of the caller. A `ClientThread` works in another thread, so that the engine
samples while the caller does something else: in asynchronous training.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar, cast

from assay.engine.base import (
    BaseEngine,
    CountReport,
    Engine,
    EngineInfo,
    EngineLoad,
    Event,
    Finished,
    Request,
    RequestError,
    SampleCounter,
    TokenChunk,
    gc_paused,
)
from assay.engine.completions import handles_of
from assay.engine.sequence import display_name
from assay.system.awaiting import LoopThread
from assay.types import Completion, UserError, describe_error

T = TypeVar("T")
ANOTHER_CONSUMER = "another consumer's event: share an engine through one EngineClient"
CLEAN_UP_S = 10.0  # time limit of the tasks that are cancelled when `run_sync` ends
ReceiveChunk = Callable[[TokenChunk], None]


@dataclass(eq=False)
class Submitted:
    """A request, the futures of its samples, and the numbers of their tokens as far as the engine streams them."""

    request: Request
    futures: list[asyncio.Future[Completion]]
    receive: ReceiveChunk | None
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [0] * len(self.futures)

    @property
    def finished(self) -> bool:
        return self.futures[-1].done() and all(future.done() for future in self.futures)

    def add_chunk(self, chunk: TokenChunk) -> None:
        self.tokens[chunk.sample] += len(chunk.token_ids)
        if self.receive is not None:
            self.receive(chunk)


class EngineClient(ABC):
    """Submits requests to an engine. See the description of this module."""

    leads = True  # whether this rank submits requests; otherwise another rank of its tensor-parallel group does
    strict = False  # see the description of this module

    def __init__(self, after_step: Callable[[], None] = lambda: None) -> None:
        """`after_step`: called whenever there may be new tokens or completions."""
        self.after_step = after_step
        self.on_completion: Callable[[Completion], object] = lambda _: None  # called with each completion
        self._submitted: dict[int, Submitted] = {}  # unfinished requests, by id

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @abstractmethod
    def submit(self, request: Request, receive: ReceiveChunk | None = None) -> list[asyncio.Future[Completion]]:
        """Add a request; one future per sample. Cancelling a future aborts its sample.

        A request that fails raises a `RequestError`. `receive`: gets new tokens, if the request streams.
        """

    @abstractmethod
    def close(self) -> None:
        """Abort all requests and release all kept sequences."""

    def sampled_tokens(self, futures: Iterable[asyncio.Future[Completion]]) -> list[int]:
        """Numbers of tokens of unfinished samples so far, without samples of which no token is known."""
        wanted = set(futures)
        pairs = (
            pair
            for submitted in self._submitted.values()
            for pair in zip(submitted.futures, submitted.tokens, strict=True)
        )
        return [tokens for future, tokens in pairs if tokens and future in wanted and not future.done()]

    def release(self, handles: Iterable[int | None]) -> None:
        """Free kept sequences that will not be continued."""
        return

    def disown(self) -> None:
        """Leave the kept sequences to the caller, who releases them."""
        return

    @contextmanager
    def showing(self, counter: SampleCounter) -> Iterator[None]:
        """Show the counts after each step, until the block ends."""
        before, self.after_step = self.after_step, counter.show
        try:
            yield
        finally:
            self.after_step = before

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that may submit requests, and awaits their completions with `wait`."""
        return asyncio.ensure_future(work)

    async def wait(self, future: asyncio.Future[Completion]) -> Completion:
        """Await a completion, in a task that `spawn` has started."""
        return await future

    def hold(self) -> None:
        """Keep a strict client from stepping its engine, until `unhold` is called as often."""
        return

    def unhold(self) -> None:
        return

    async def drive(self) -> None:
        """Step the engine whenever there is work, until this is cancelled. Servers work by themselves."""
        await asyncio.get_running_loop().create_future()


class SampleFuture(asyncio.Future[Completion]):
    """Calls `on_cancel` soon after it is cancelled. A callback of each future would also be called for completions."""

    on_cancel: Callable[[], None]

    def cancel(self, msg: Any = None) -> bool:
        if not self.done():
            self.get_loop().call_soon(self.on_cancel)
        return super().cancel(msg)


class LocalClient(EngineClient):
    """The only consumer of an engine in this process, which it steps."""

    def __init__(
        self, engine: Engine, strict: bool = True, polls: bool = False, after_step: Callable[[], None] = lambda: None
    ) -> None:
        """`polls`: take one iteration of the engine at a time, since other threads may submit or cancel requests."""
        super().__init__(after_step)
        self.engine, self.strict, self.polls = engine, strict, polls
        self._kept: set[int] = set()  # handles of kept sequences
        self._cancelled: set[int] = set()  # ids of requests that were cancelled since the last step
        self._awaited: set[asyncio.Future[Completion]] = set()  # by tasks that `spawn` has started
        self._busy = 0  # such tasks that do not wait for the engine
        self._wake: Callable[[], object] = lambda: None  # the driver

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def submit(self, request: Request, receive: ReceiveChunk | None = None) -> list[asyncio.Future[Completion]]:
        loop, request_id = asyncio.get_running_loop(), self.engine.add(request)
        on_cancel = partial(self._abort_cancelled, request_id)
        futures: list[asyncio.Future[Completion]] = []
        for _ in range(max(request.params.n, 1)):
            futures.append(future := SampleFuture(loop=loop))
            future.on_cancel = partial(on_cancel, len(futures) - 1)
        self._submitted[request_id] = Submitted(request, list(futures), receive)
        self._wake_driver()
        return futures

    def release(self, handles: Iterable[int | None]) -> None:
        if kept := self._kept.intersection(handles):
            self._kept -= kept
            self.engine.release(sorted(kept))

    def disown(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        if self._submitted:
            self.engine.abort(list(self._submitted))
        self.release(list(self._kept))
        for submitted in self._submitted.values():
            for future in submitted.futures:
                future.cancel()
        self._submitted.clear()

    # -- tasks that a strict driver waits for

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        self.hold()
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.unhold())
        return task

    async def wait(self, future: asyncio.Future[Completion]) -> Completion:
        if future.done():
            return future.result()
        self._awaited.add(future)
        self.unhold()
        try:
            return await future
        finally:
            if future in self._awaited:  # the task is cancelled
                self._awaited.discard(future)
                self.hold()

    def hold(self) -> None:
        self._busy += 1

    def unhold(self) -> None:
        self._busy -= 1
        self._wake_driver()

    # -- the driver

    @property
    def _waits_for_tasks(self) -> bool:
        return self.strict and self._busy > 0

    def _wake_driver(self) -> None:
        if not self._waits_for_tasks:
            self._wake()

    async def drive(self) -> None:
        changed = asyncio.Event()
        self._wake = changed.set
        while True:
            while not self._submitted or self._waits_for_tasks:
                changed.clear()
                await changed.wait()
            wait = not self.polls and not self._busy
            try:
                events = self.engine.step(wait)
                assert events or not wait, "the engine has no work left, but some requests are unfinished"
                if self.deliver(events):
                    raise RuntimeError(ANOTHER_CONSUMER)
            except Exception as error:
                self._fail_all(error)
            events = []  # a waiting driver must not keep completions alive
            self.after_step()
            if not self._waits_for_tasks:
                await asyncio.sleep(0)

    @contextmanager
    def driven_in_thread(self) -> Iterator[None]:
        """Until the block ends, a thread steps the engine; the event loop gets all events of a step at once.

        Requests that are submitted in the same iteration of the event loop reach an idle engine together.
        """
        assert not self.strict
        loop, work, ended = asyncio.get_running_loop(), threading.Event(), False

        def serve() -> None:
            while not ended:
                work.wait()
                work.clear()
                self._step_until_idle(loop)

        thread = threading.Thread(target=serve, name="engine", daemon=True)
        thread.start()
        self._wake = lambda: loop.call_soon(work.set)
        try:
            yield
        finally:
            self.close()  # the thread may be waiting for events of its requests
            ended = True
            work.set()
            thread.join()

    def _step_until_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while events := self.engine.step():
                loop.call_soon_threadsafe(self.deliver, events)
        except BaseException as error:  # of any kind: no task may wait forever
            failure = error if isinstance(error, Exception) else RuntimeError(describe_error(error))
            loop.call_soon_threadsafe(self._fail_all, failure)

    def deliver(self, events: Sequence[Event]) -> bool:
        """Hand over events of the engine. Returns whether some belong to requests that this client has not submitted.

        A thread that steps the engine may also take events of requests that are being cancelled.
        """
        foreign = False
        finished: list[Finished] = []
        for event in events:
            submitted = self._submitted.get(event.request_id)
            if submitted is None:
                foreign = foreign or event.request_id not in self._cancelled
                if handles := handles_of([event]):
                    self.engine.release(handles)
            elif isinstance(event, TokenChunk):  # first: there are many
                submitted.add_chunk(event)
            elif isinstance(event, Finished):
                finished.append(event)
            else:
                self._fail(event.request_id, RequestError({event.request_id: event.error}))
        self._cancelled.clear()
        for event in sorted(finished, key=attrgetter("request_id", "sample")):
            self._finish(event)
        return foreign

    def _finish(self, event: Finished) -> None:
        submitted, handle = self._submitted.get(event.request_id), event.completion.handle
        future = submitted.futures[event.sample] if submitted is not None else None
        if handle is not None:
            self._kept.add(handle)
        if submitted is None or future is None or future.done():
            self.release([handle])
            return
        if submitted.request.continues is not None:
            self._kept.discard(submitted.request.continues)
        self._settle(future)
        future.set_result(event.completion)
        self.on_completion(event.completion)
        if submitted.finished:
            del self._submitted[event.request_id]

    def _fail(self, request_id: int, error: Exception) -> None:
        submitted = self._submitted.pop(request_id)
        self.release([submitted.request.continues])
        for future in submitted.futures:
            if not future.done():
                self._settle(future)
                future.set_exception(error)
                future.exception()  # it may have no consumer: then it is not reported
        completions = (
            settled.result() for settled in submitted.futures if not settled.cancelled() and not settled.exception()
        )
        self.release([completion.handle for completion in completions])

    def _fail_all(self, error: Exception) -> None:
        ids = list(self._submitted)
        for request_id in ids:
            self._fail(request_id, error)
        if ids:
            self.engine.abort(ids)
            self._wake()

    def _settle(self, future: asyncio.Future[Completion]) -> None:
        """A task that awaits this future is going to continue."""
        if future in self._awaited:
            self._awaited.discard(future)
            self._busy += 1

    def _abort_cancelled(self, request_id: int, sample: int) -> None:
        submitted = self._submitted.get(request_id)
        whole = submitted is not None and submitted.finished
        self._cancelled.add(request_id)
        # Without `submitted`, the last other sample has finished meanwhile, and only this one may be running.
        self.engine.abort([request_id if whole else (request_id, sample)])
        if submitted is not None and whole:
            del self._submitted[request_id]
            self.release([submitted.request.continues])
        self._wake()  # a thread may have missed the command during its last step


class SentRequest(Submitted):
    """A request that a `ServerClient` has sent. The event loop of the engine calls its methods."""

    def __init__(
        self, client: ServerClient, request_id: int, request: Request, receive: ReceiveChunk | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()  # of the client
        futures: list[asyncio.Future[Completion]] = [self.loop.create_future() for _ in range(max(request.params.n, 1))]
        super().__init__(request, futures, receive)
        self.client, self.id = client, request_id
        self.tasks: dict[int, asyncio.Task[None]] = {}  # of the engine's event loop, by sample

    @property
    def unfinished(self) -> list[int]:
        return [sample for sample, future in enumerate(self.futures) if not future.done()]

    def start(self, samples: Iterable[int], work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start a task that serves these samples. If it fails, the request fails with its error."""
        task = asyncio.ensure_future(self._serve(work))
        self.tasks |= dict.fromkeys(samples, task)
        return task

    def put(self, chunk: TokenChunk) -> None:
        """Pass new tokens of a sample to the client."""
        self._call(self._put, chunk)

    def finish(self, sample: int, completion: Completion, streamed: bool = False) -> None:
        """Pass a completion to the client. `streamed`: its tokens were put before."""
        if self.request.stream and not streamed:
            self.put(TokenChunk(self.id, sample, list(completion.token_ids), list(completion.engine_logprobs)))
        self._call(self._finish, sample, completion)

    def fail(self, error: Exception) -> None:
        self._call(self._fail, error)

    def cancel_unneeded(self) -> None:
        """Cancel the HTTP requests of which no sample is needed any more, which closes their connections."""
        needed = {self.tasks[sample] for sample in self.unfinished if sample in self.tasks}
        for task in set(self.tasks.values()) - needed:
            task.cancel()

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    async def _serve(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except UserError as error:
            self.fail(RequestError({self.id: f"{display_name(self.request, self.id)}: {error}"}))
        except Exception as error:  # a bug
            self.fail(error)

    def _call(self, work: Callable[..., None], *arguments: Any) -> None:
        self.client.call(self.loop, partial(work, *arguments))

    # -- in the event loop of the client

    def _put(self, chunk: TokenChunk) -> None:
        if not self.futures[chunk.sample].done():
            self._notify(partial(self.add_chunk, chunk))

    def _finish(self, sample: int, completion: Completion) -> None:
        if not self.futures[sample].done():
            self._notify()
        if not self.futures[sample].done():
            self.futures[sample].set_result(completion)

    def _notify(self, work: Callable[[], None] = lambda: None) -> None:
        """Call functions of the client's user. If one fails, the request fails with its error."""
        try:
            work()
            self.client.after_step()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for sample in self.unfinished:
            self.futures[sample].set_exception(error)


class ServerEngine(BaseEngine):
    """An engine on servers. Its event loop, in a thread of its own, sends the requests."""

    loop: LoopThread
    leads = True  # see `EngineClient`
    sent: set[SentRequest]  # unfinished requests of all clients

    @abstractmethod
    def serve(self, requests: Sequence[SentRequest]) -> None:
        """Start tasks that serve these requests. Called in the thread of the event loop."""

    def from_leader(self, work: Callable[[], T]) -> T:
        """The result of `work`, which the rank of a group that `leads` calls for all."""
        return work()

    def end_requests(self) -> None:
        """Let all requests fail, since the engine is being closed."""
        for request in list(self.sent):
            request.fail(UserError("the engine was closed"))
            self.loop.post(request.cancel)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=sum(len(request.unfinished) for request in list(self.sent)), waiting=0)


class ServerClient(EngineClient):
    """Sends requests to the servers of an engine, which may have other clients."""

    def __init__(self, engine: ServerEngine, after_step: Callable[[], None] = lambda: None) -> None:
        super().__init__(after_step)
        self.engine = engine
        self.leads = engine.leads
        self._ids = count()
        self._unsent: list[SentRequest] = []
        self._calls: list[Callable[[], None]] = []  # from other threads
        self._lock = threading.Lock()  # guards the list

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def submit(self, request: Request, receive: ReceiveChunk | None = None) -> list[asyncio.Future[Completion]]:
        sent = SentRequest(self, next(self._ids), request, receive)
        self._submitted[sent.id] = sent
        self.engine.sent.add(sent)
        for future in sent.futures:
            future.add_done_callback(partial(self._on_end, sent))
        if not self._unsent:
            sent.loop.call_soon(self._send)
        self._unsent.append(sent)
        return list(sent.futures)

    def close(self) -> None:
        for sent in [request for request in list(self.engine.sent) if request.client is self]:
            for future in sent.futures:
                future.cancel()
            self._forget(sent)
            self.engine.loop.post(sent.cancel_unneeded)

    def call(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        """Call a function in the event loop of the client, together with others that are passed until then."""
        with self._lock:
            self._calls.append(work)
            is_first = len(self._calls) == 1
        if is_first:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._make_calls)

    def _make_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for work in calls:
            work()

    def _send(self) -> None:
        unsent, self._unsent = [sent for sent in self._unsent if not sent.finished], []
        if not self.engine.loop.running:
            self.engine.end_requests()
        self.engine.loop.post(partial(self._serve, unsent))

    def _serve(self, requests: Sequence[SentRequest]) -> None:
        """In the event loop of the engine."""
        try:
            self.engine.serve(requests)
        except Exception as error:  # a bug: nobody may wait for ever
            for sent in requests:
                sent.fail(error)

    def _on_end(self, sent: SentRequest, future: asyncio.Future[Completion]) -> None:
        if future.cancelled() or future.exception() is not None:
            self.engine.loop.post(sent.cancel_unneeded)
        else:
            self.on_completion(future.result())
        if sent.finished:
            self._forget(sent)

    def _forget(self, sent: SentRequest) -> None:
        self._submitted.pop(sent.id, None)
        self.engine.sent.discard(sent)


def connect(
    engine: BaseEngine, strict: bool = True, polls: bool = False, after_step: Callable[[], None] = lambda: None
) -> EngineClient:
    """A client of any engine. `strict` and `polls` are for engines in this process."""
    if isinstance(engine, ServerEngine):
        return ServerClient(engine, after_step)
    return LocalClient(cast(Engine, engine), strict, polls, after_step)


def run_sync(work: Coroutine[Any, Any, T], *clients: EngineClient) -> T:
    """The result of a coroutine that uses these clients, whose engines this call steps. Closes the clients.

    Works in a thread that runs an event loop, too, e.g. in a notebook: then another thread does the work.
    """
    if not in_event_loop():
        return _run_here(work, clients)
    thread = LoopThread()
    try:
        return thread.call(_driven(work, clients))
    finally:
        thread.stop()


def in_event_loop() -> bool:
    """Whether this thread runs an event loop."""
    with suppress(RuntimeError):
        return bool(asyncio.get_running_loop())
    return False


async def _driven(work: Coroutine[Any, Any, T], clients: Sequence[EngineClient]) -> T:
    """Run drivers and work; an error of a driver ends the work."""
    drivers = [asyncio.ensure_future(client.drive()) for client in clients]
    task = asyncio.ensure_future(work)
    try:
        with gc_paused():
            await asyncio.wait([task, *drivers], return_when=asyncio.FIRST_COMPLETED)
        for driver in drivers:
            if driver.done():
                driver.result()
        return task.result()
    finally:
        await cancelled([task, *drivers])
        for client in clients:
            client.close()


def _run_here(work: Coroutine[Any, Any, T], clients: Sequence[EngineClient]) -> T:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_driven(work, clients))
    finally:
        # After Ctrl-C, tasks remain. It may have hit the loop itself, so that some never end; others may raise it, too.
        for client in clients:
            client.close()
        for _ in asyncio.all_tasks(loop):
            with suppress(KeyboardInterrupt):
                loop.run_until_complete(cancelled(asyncio.all_tasks(loop)))
                break
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=CLEAN_UP_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, so that it is not reported


class ClientThread:
    """A client in its own thread, or in the thread of servers. Not strict: results depend on the clock."""

    def __init__(self, engine: BaseEngine) -> None:
        self.client = connect(engine, strict=False, polls=True)
        self.loop = engine.loop if isinstance(engine, ServerEngine) else LoopThread()
        self._driver = None if isinstance(engine, ServerEngine) else self.loop.call(self._start())

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.client.drive())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that uses the client."""
        return self.loop.call(work)

    def close(self) -> None:
        """Drop all requests and end the thread. The engine is not closed."""
        if self.loop.running:
            self.loop.call(self._close_client())
            if self._driver is not None:
                self.loop.stop()

    async def _close_client(self) -> None:
        await cancelled([self._driver] if self._driver is not None else [])
        self.client.close()


def generate(
    engine: BaseEngine, requests: Sequence[Request], report: CountReport | None = None
) -> list[list[Completion]]:
    """Serve requests and return the `params.n` completions of each, in order.

    `report`: receives the number of finished completions and of sampled tokens from time to time.

    If a request fails, all others are served first; then a `RequestError` is raised, and kept sequences are released.
    The caller must be the only consumer of the engine's events.
    """
    counter = SampleCounter(report)
    client = connect(engine)

    async def serve() -> list[list[Completion]]:
        client.on_completion = counter.add
        submitted = [client.submit(request) for request in requests]
        results, errors = list[list[Completion]](), dict[int, str]()
        for index, futures in enumerate(submitted):
            try:
                results.append([await future for future in futures])  # `gather` would need a callback for each
            except RequestError as error:
                errors[index] = str(error)
        counter.show()
        if errors:
            raise RequestError(errors)
        client.disown()
        return results

    def sample() -> list[list[Completion]]:
        with client.showing(counter), counter.watching(engine):
            return run_sync(serve(), client)

    return engine.from_leader(sample) if isinstance(engine, ServerEngine) else sample()
