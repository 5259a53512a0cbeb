"""Heartbeats between ranks: a rank that is stopped, or whose host is gone, is named instead of waited for in silence.

Each rank publishes a counter in the store that all processes share, and watches the counter of the rank before it. So
whatever set of ranks falls silent, at least one of the others notices. The threads need the interpreter lock only for
moments: a rank that computes, judges or evaluates for hours keeps beating. One that is orphaned by its launcher ends.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

INTERVAL_S = 1.0
WARN_S = 30.0  # of silence, before it is reported
TIMEOUT_S = 300.0  # of silence, before it ends the run
ORPHAN_S = 300.0  # for a rank without a launcher to save and end by itself
NOTICE_S = 300.0  # that a rank waits for one that is alive before it says so; then twice as long, and so on
LOST = "assay/lost"  # in the store: why the run was ended
EXIT_CODE = 2


@dataclass
class Peer:
    """One source of signs of life, and for how long there has been none."""

    name: str
    news: object = None
    silence: float = 0.0
    warned: bool = False

    def look(self, news: object, elapsed: float) -> str:
        """Compare with the last look; returns what to report, if anything."""
        if news != self.news:
            text = f"{self.name} responds again after {self.silence:.0f} s" if self.warned else ""
            self.news, self.silence, self.warned = news, 0.0, False
            return text
        self.silence += elapsed
        if self.warned or self.silence < WARN_S:
            return ""
        self.warned = True
        return f"{self.name} has not responded for {self.silence:.0f} s; waiting"


class Heartbeat:
    """Two daemon threads: one talks to the store, and may hang with it; the other only reads the clock."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: silence after which this process ends; 0: never."""
        # A connection of its own: on the shared one, the main thread may be waiting.
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.timeout_s = rank, timeout_s
        self.watched = (rank - 1) % world
        self._exchanges = 0  # begun by this rank so far
        self._waiting_since: float | None = None
        self._notice_s = NOTICE_S
        self._rounds, self._heard, self._lost = 0, b"", False
        self._store = Peer("the rendezvous store, which the launcher or rank 0 holds,")
        self._other = Peer(f"rank {self.watched}")
        self._stopped = threading.Event()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        store.set(f"assay/host/{rank}", socket.gethostname())
        for work in (self._talk, self._watch):
            threading.Thread(target=work, name="assay-heartbeat", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around an exchange of all ranks, in which this one may wait for others."""
        self._exchanges += 1
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def stop(self) -> None:
        """Before the process ends as it should, on all ranks."""
        self._stopped.set()

    def _talk(self) -> None:
        """Publish this rank's counters, read those of the watched one."""
        with suppress(RuntimeError):  # the store is gone: the silence that follows is noticed
            while not self._stopped.wait(INTERVAL_S):
                self.store.set(f"assay/beat/{self.rank}", f"{self._rounds} {self._exchanges}")
                if self.store.check([f"assay/beat/{self.watched}"]):  # else it has not begun
                    host = self.store.get(f"assay/host/{self.watched}").decode()
                    self._other.name = f"rank {self.watched} on {host}"
                    self._heard = self.store.get(f"assay/beat/{self.watched}")
                self._lost = self.store.check([LOST])
                self._rounds += 1

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(INTERVAL_S):
            now = time.monotonic()
            # A job that was suspended as a whole finds hours on the clock in which no rank could beat.
            elapsed, before = min(now - before, 2 * INTERVAL_S), now
            if self._launcher not in (None, os.getppid()):
                return self._end_as_orphan()
            if self._lost:
                os._exit(EXIT_CODE)  # the rank that noticed has reported it
            report = self._store.look(self._rounds, elapsed)
            if report and os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks notice: one per host reports it
                say(report)
            reachable = self._store.silence <= 2 * INTERVAL_S  # else nothing is known of the other
            if reachable and self._heard and (report := self._other.look(self._heard, elapsed)):
                say(report)
            for peer in (self._store, self._other):
                if 0 < self.timeout_s <= peer.silence:
                    self._end(peer)
            self._report_waiting(now)

    def _report_waiting(self, now: float) -> None:
        """Name a rank that is alive and keeps this one waiting for long: it may hang, or have a lot to do."""
        since, (_, _, theirs) = self._waiting_since, self._heard.partition(b" ")
        if since is None:
            self._notice_s = NOTICE_S
        elif now - since >= self._notice_s and theirs and int(theirs) < self._exchanges:
            self._notice_s *= 2
            say(f"rank {self.rank} has waited {now - since:.0f} s for {self._other.name}, which is alive and busy")

    def _end(self, peer: Peer) -> None:
        text = f"{peer.name} has not responded for {peer.silence:.0f} s: the run ends; assay train --resume goes on"
        first = threading.Thread(target=self._report_once, args=(text,), daemon=True)
        if peer is self._store:
            say(text)
        else:
            first.start()
            first.join(5)
        os._exit(EXIT_CODE)  # the main thread waits in an exchange that no exception reaches

    def _report_once(self, text: str) -> None:
        with suppress(RuntimeError):
            if self.store.compare_set(LOST, "", text).decode() != text:
                return
        say(text)

    def _end_as_orphan(self) -> None:
        """SIGTERM lets a run save; all ranks do so together."""
        say(f"the launcher of rank {self.rank} has ended: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopped.wait(ORPHAN_S):
            os._exit(128 + signal.SIGTERM)


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"\nassay: {text}\n".encode())
