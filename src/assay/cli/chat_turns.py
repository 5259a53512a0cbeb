"""Several models write at once: they take turns, a token each, so that nobody waits for the others to finish."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from assay.cli.chat_model import AnswerInterrupted

Result = TypeVar("Result")
LOOK_S = 0.05  # between looks of the waiting thread, which is the one that Ctrl-C reaches


class Floor:
    """Who may work: always one member alone, so that no two threads share a device or its random parts."""

    def __init__(self, members: int) -> None:
        self._order = deque(range(members))
        self._changed = threading.Condition()
        self._stopped = False

    def wait(self, member: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == member)

    def pass_on(self, member: int) -> None:
        with self._changed:
            self._order.rotate(-1)
            self._changed.notify_all()
        self.wait(member)
        if self._stopped:
            raise AnswerInterrupted

    def leave(self, member: int) -> None:
        with self._changed:
            self._order.remove(member)
            self._changed.notify_all()

    def stop(self) -> None:
        self._stopped = True  # everybody notices at the next turn, still one after the other


class Worker(threading.Thread, Generic[Result]):
    """Does one job and keeps what came of it."""

    def __init__(self, job: Callable[[Callable[[], None]], Result], floor: Floor, member: int) -> None:
        super().__init__(name=f"assay-chat-{member}", daemon=True)
        self._job, self._floor, self._member = job, floor, member
        self.result: list[Result] = []
        self.error: BaseException | None = None
        # Not join(): before Python 3.13 a Ctrl-C that reaches it marks a thread as ended that still runs.
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._floor.wait(self._member)
            self.result.append(self._job(lambda: self._floor.pass_on(self._member)))
        except BaseException as error:  # raised again where the workers are waited for
            self.error = error
        finally:
            self._floor.leave(self._member)
            self.done.set()


def take_turns(jobs: Sequence[Callable[[Callable[[], None]], Result]]) -> list[Result]:
    """The results of all jobs. Each is given a function to call whenever it may be another's turn.

    After Ctrl-C that function raises AnswerInterrupted, in every job; what they make of it is still their result.
    """
    floor = Floor(len(jobs))
    workers = [Worker(job, floor, member) for member, job in enumerate(jobs)]
    for worker in workers:
        worker.start()
    while not all(worker.done.is_set() for worker in workers):
        try:
            for worker in workers:
                worker.done.wait(LOOK_S)
        except KeyboardInterrupt:
            floor.stop()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return [worker.result[0] for worker in workers]
