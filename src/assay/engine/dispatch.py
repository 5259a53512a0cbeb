"""Several consumers of one engine: one thread steps it and routes each event to the client that added the request."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from assay.engine.base import (
    Engine,
    EngineInfo,
    EngineLoad,
    Event,
    Failed,
    Finished,
    Request,
    TopLogprobs,
    WeightSource,
)
from assay.engine.outputs import handles_of
from assay.engine.sequence import unknown_handle
from assay.types import describe_error

Receive = Callable[[list[Event]], None]  # gets new events; must return quickly
POLL_S = 0.001  # `EngineClient.step(wait=False)` waits this long for an event, so that a polling client does not spin


class Closeable:
    """A context manager that calls `close` at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Failure:
    """An exception of the engine's `step`, for a client whose requests it has ended."""

    error: BaseException
    request_ids: set[int]


@dataclass(slots=True)
class Unfinished:
    """A request that a client has not received all events of."""

    samples: set[int]
    continues: int | None  # the handle that it continues; None once the engine has accepted the request


@dataclass(slots=True, eq=False)
class Inbox:
    """One client's requests, kept sequences and undelivered events. The dispatcher's lock guards it."""

    arrived: threading.Condition
    receive: Receive | None = None  # called with new events, which the client does not take by `step`
    events: deque[Event | Failure] = field(default_factory=deque)
    unfinished: dict[int, Unfinished] = field(default_factory=dict)  # by request id
    handles: set[int] = field(default_factory=set)
    closed: bool = False

    def put(self, event: Event) -> bool:
        """Append an event, unless its request or sample is finished or aborted."""
        request = self.unfinished.get(event.request_id)
        if request is None:
            return False
        if isinstance(event, Failed):
            del self.unfinished[event.request_id]
        elif event.sample not in request.samples:
            return False
        elif isinstance(event, Finished):
            self._finish(event, request)
        self.events.append(event)
        if self.receive is None:
            self.arrived.notify_all()
        return True

    def _finish(self, event: Finished, request: Unfinished) -> None:
        request.samples.remove(event.sample)
        if not request.samples:
            del self.unfinished[event.request_id]
        if request.continues is not None:
            self.handles.discard(request.continues)
            request.continues = None
        self.handles.update(handles_of([event]))

    def fail(self, error: BaseException) -> None:
        """End all unfinished requests with an exception of the engine."""
        if self.receive is None:
            self.events.append(Failure(error, set(self.unfinished)))
        else:
            line = f"the engine failed: {describe_error(error)}"
            self.events.extend(Failed(request_id, line) for request_id in self.unfinished)
        self.unfinished.clear()
        self.arrived.notify_all()

    def take(self) -> list[Event]:
        """Return undelivered events. An exception is raised after the events before it have been returned."""
        if self.events and isinstance(failure := self.events[0], Failure):
            self.events.popleft()
            raise failure.error
        taken: list[Event] = []
        while self.events and not isinstance(event := self.events[0], Failure):
            taken.append(event)
            self.events.popleft()
        return taken

    def drop(self, ids: Iterable[int | tuple[int, int]]) -> list[int]:
        """Drop requests or samples with their undelivered events; return handles that are no longer needed."""
        unneeded: list[int] = []
        dropped = {one if isinstance(one, tuple) else (one, None) for one in ids}
        for request_id, sample in dropped:
            if (request := self.unfinished.get(request_id)) is not None:
                request.samples = request.samples - {sample} if sample is not None else set()
                if not request.samples:
                    del self.unfinished[request_id]
                    if request.continues is not None:
                        unneeded.append(request.continues)
        events, self.events = self.events, deque()
        for event in events:
            if isinstance(event, Failure):
                event.request_ids = {one for one in event.request_ids if (one, None) not in dropped}
                if event.request_ids:
                    self.events.append(event)
            elif (event.request_id, None) in dropped or (event.request_id, getattr(event, "sample", None)) in dropped:
                unneeded += handles_of([event])
            else:
                self.events.append(event)
        self.handles.difference_update(unneeded)
        return unneeded


class Dispatcher(Closeable):
    """Owns an engine and steps it in a thread; no other code may call the engine's `step`.

    An exception raised by the engine's `step` is raised by `step` of every client with unfinished requests. These
    requests are dropped; later requests are served. No state of a request remains after its last event is delivered.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._owners: dict[int, Inbox] = {}  # of unfinished requests, by id
        self._abandoned: deque[Inbox] = deque()  # of clients that were garbage collected without being closed
        self._receivers: list[Inbox] = []  # of clients with a `receive` function
        self._rejected_ids = count(-1, -1)  # of requests that do not reach the engine
        self._step_once = self._closed = False
        self._thread = threading.Thread(target=self._serve, name="engine-dispatcher", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def connect(self, receive: Receive | None = None) -> EngineClient:
        """Return a new client: an object with the engine's interface, for one consumer.

        With `receive`, the engine's thread calls this function with the client's new events after each step, instead of
        `EngineClient.step`. An exception of the engine then arrives as a `Failed` event of each unfinished request.
        """
        inbox = Inbox(threading.Condition(self._lock), receive)
        with self._lock:
            self._check_open(inbox)
            if receive is not None:
                self._receivers.append(inbox)
        return EngineClient(self, inbox)

    def sleep(self) -> None:
        """Release memory that only generation needs; requires that no client has unfinished requests."""
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        """Drop all requests, stop the thread and close the engine. Clients cannot be used afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ids = list(self._owners)
            for inbox in set(self._owners.values()):
                inbox.unfinished.clear()
                inbox.arrived.notify_all()
            self._owners.clear()
            self._work.notify_all()
        self.engine.abort(ids)  # the thread may be waiting for their events
        self._thread.join()
        self.engine.close()

    # -- for clients

    def _add(self, inbox: Inbox, requests: Sequence[Request]) -> list[int]:
        # The lock is held until all ids are registered, because the first event may arrive immediately. An idle engine
        # starts with all of these requests.
        with self._lock:
            self._check_open(inbox)
            ids = [self._add_one(inbox, request) for request in requests]
            self._work.notify()
            return ids

    def _add_one(self, inbox: Inbox, request: Request) -> int:
        if request.continues is not None and request.continues not in inbox.handles:
            request_id = next(self._rejected_ids)
            inbox.events.append(Failed(request_id, str(unknown_handle(request, request_id))))
            inbox.arrived.notify_all()
            self._step_once = self._step_once or inbox.receive is not None  # the thread hands the event over
            return request_id
        request_id = self.engine.add(request)
        inbox.unfinished[request_id] = Unfinished(set(range(max(request.params.n, 1))), request.continues)
        self._owners[request_id] = inbox
        return request_id

    def _step(self, inbox: Inbox, wait: bool) -> list[Event]:
        with self._lock:
            arrived = True
            while True:
                self._check_open(inbox)
                if (events := inbox.take()) or not (inbox.unfinished and arrived):
                    return events
                arrived = inbox.arrived.wait(None if wait else POLL_S)

    def _abort(self, inbox: Inbox, ids: Iterable[int | tuple[int, int]]) -> None:
        ids = list(ids)
        with self._lock:
            own = {one: request_of(one) for one in ids if request_of(one) in inbox.unfinished}
            handles = inbox.drop(ids)
            for request_id in set(own.values()) - inbox.unfinished.keys():
                del self._owners[request_id]
        self._drop(list(own), handles)

    def _release(self, inbox: Inbox, handles: Iterable[int]) -> None:
        with self._lock:
            own = inbox.handles.intersection(handles)
            inbox.handles -= own
        self._drop([], own)

    def _disconnect(self, inbox: Inbox) -> None:
        with self._lock:
            ids, handles = list(inbox.unfinished), list(inbox.handles if not self._closed else ())
            for request_id in ids:
                self._owners.pop(request_id, None)
            inbox.closed = True
            if inbox in self._receivers:
                self._receivers.remove(inbox)
            inbox.unfinished.clear()
            inbox.handles.clear()
            inbox.events.clear()
            inbox.arrived.notify_all()
        self._drop(ids, handles)

    def _drop(self, ids: Sequence[int | tuple[int, int]], handles: Iterable[int]) -> None:
        """Abort and release in the engine, without the lock: a queued weight update may run first."""
        if ids:
            self.engine.abort(ids)
        if released := sorted(handles):
            self.engine.release(released)
        if ids or released:
            with self._lock:  # the current step may have missed the commands, and no other step may be due
                self._step_once = True
                self._work.notify()

    def _check_open(self, inbox: Inbox) -> None:
        if self._closed:
            raise RuntimeError("the dispatcher is closed")
        if inbox.closed:
            raise RuntimeError("this engine client is closed: connect a new one")

    # -- the engine's thread

    def _serve(self) -> None:
        while self._wait_for_work():
            try:
                events = self.engine.step()
            except BaseException as error:  # of any kind: clients must not wait forever
                self._fail(error)
            else:
                self._deliver(events)
                del events  # a waiting dispatcher must not keep completions alive
            self._hand_over()

    def _wait_for_work(self) -> bool:
        """Wait until a step is due; False if the dispatcher is closed."""
        while self._abandoned:
            self._disconnect(self._abandoned.popleft())
        with self._lock:
            while not (self._owners or self._step_once or self._closed):
                self._work.wait()
            self._step_once = False
            return not self._closed

    def _deliver(self, events: Sequence[Event]) -> None:
        unneeded: list[int] = []
        with self._lock:
            for event in events:
                inbox = self._owners.get(event.request_id)
                if inbox is not None and inbox.put(event):
                    if event.request_id not in inbox.unfinished:
                        del self._owners[event.request_id]
                else:
                    unneeded += handles_of([event])  # aborted while its last step was running
        if unneeded:
            self.engine.release(unneeded)

    def _hand_over(self) -> None:
        """Call `receive` of the clients that have one, without the lock, so that it may add and abort requests."""
        with self._lock:
            batches = [(inbox.receive, inbox.take()) for inbox in self._receivers if inbox.events]
        for receive, batch in batches:
            assert receive is not None
            receive(batch)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            ids = list(self._owners)
            for inbox in set(self._owners.values()):
                inbox.fail(error)
            self._owners.clear()
        self.engine.abort(ids)  # some may have been added after the engine dropped all its requests


class EngineClient(Closeable, Engine):
    """The engine interface for one consumer, which receives the events of its own requests only.

    `close`, the end of a `with` block and garbage collection drop the client's unfinished requests and kept sequences.
    Other clients are not affected. Weight updates and `reset_prefix_cache` affect all clients.
    """

    def __init__(self, dispatcher: Dispatcher, inbox: Inbox) -> None:
        self._dispatcher, self._inbox = dispatcher, inbox
        # A finalizer may run at any time, even while this thread holds the lock, so it only appends to a deque.
        self._finalizer = weakref.finalize(self, dispatcher._abandoned.append, inbox)
        self._finalizer.atexit = False

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        return self._dispatcher.info

    def add(self, request: Request) -> int:
        return self._dispatcher._add(self._inbox, [request])[0]

    def add_all(self, requests: Sequence[Request]) -> list[int]:
        """Add requests together: an idle engine serves them as if they had been added before its next step."""
        return self._dispatcher._add(self._inbox, requests)

    def step(self, wait: bool = True) -> list[Event]:
        """Return events of this client's requests. Without `wait`, return after `POLL_S` at the latest."""
        return self._dispatcher._step(self._inbox, wait)

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        """Other clients' ids are ignored. The handle that an aborted request continues is released."""
        self._dispatcher._abort(self._inbox, ids)

    def release(self, handles: Iterable[int]) -> None:
        """Other clients' handles are ignored."""
        self._dispatcher._release(self._inbox, handles)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return self._dispatcher.engine.score(sequences, temperature)

    def score_each(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        return self._dispatcher.engine.score_each(sequences)

    def top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float = 1.0
    ) -> list[TopLogprobs]:
        return self._dispatcher.engine.top_logprobs(sequences, starts, count, temperature)

    def update_weights(self, source: WeightSource, version: int) -> None:
        self._dispatcher.engine.update_weights(source, version)

    def fingerprint(self) -> str | None:
        return self._dispatcher.engine.fingerprint()

    def digests(self) -> dict[str, str] | None:
        return self._dispatcher.engine.digests()

    def reset_prefix_cache(self) -> None:
        self._dispatcher.engine.reset_prefix_cache()

    @property
    def load(self) -> EngineLoad:
        """Of the engine, with the requests of all clients."""
        return self._dispatcher.engine.load

    def server_metrics(self) -> dict[str, float]:
        return self._dispatcher.engine.server_metrics()

    def sleep(self) -> None:
        raise RuntimeError("one of several clients cannot put the engine to sleep: call Dispatcher.sleep")

    def wake(self) -> None:
        """The engine wakes when it has requests; see `Dispatcher.wake`."""

    def close(self) -> None:
        self._finalizer.detach()
        self._dispatcher._disconnect(self._inbox)


def request_of(one: int | tuple[int, int]) -> int:
    return one[0] if isinstance(one, tuple) else one
