"""Steps environments: together between two steps of the engine, or in threads beside it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar

from assay.envs.base import Env, Step, failed_step
from assay.envs.deadline import reported_after, within

LEAST_SECONDS = 1.0  # shortest time limit of a step, even if the limit of an episode is shorter
REPORT_S = 60.0  # a step without a limit is reported after this time
SIDE_BY_SIDE = 8  # concurrent steps of a slow environment with a time limit


class HasEnv(Protocol):
    env: Env


E = TypeVar("E", bound=HasEnv)


class Stepper(Generic[E]):
    """Takes actions and returns steps. Without threads, all pending actions are stepped together, in order, by `done`.

    With threads and an environment that declares itself slow, each action is stepped separately, and a long step does
    not delay others; the order then depends on the clock. With a time limit, a step that takes longer is given up and
    ends its episode with an error. Without one, it is reported and waited for.
    """

    def __init__(self, env: Env, threads: int, seconds: float = 0.0) -> None:
        self.env = env
        self.seconds = max(seconds, LEAST_SECONDS) if seconds else 0.0
        self.pool = ThreadPoolExecutor(threads, "assay-env") if threads and env.slow else None
        self.pending: list[tuple[E, str]] = []
        self.running: list[tuple[E, Future[Sequence[Step]]]] = []

    @property
    def busy(self) -> bool:
        return bool(self.pending or self.running)

    def add(self, episode: E, action: str) -> None:
        if self.pool is None:
            self.pending.append((episode, action))
        else:
            self.running.append((episode, self.pool.submit(self._steps, [episode.env], [action])))

    def done(self, wait_for_one: bool) -> list[tuple[E, Step]]:
        """Completed steps in the order of their actions; `wait_for_one`: if there is none yet, wait for one."""
        if not self.busy:
            return []
        if self.pool is None:
            pending, self.pending = self.pending, []
            steps = self._steps([episode.env for episode, _ in pending], [action for _, action in pending])
            return [(episode, step) for (episode, _), step in zip(pending, steps, strict=True)]
        if wait_for_one:
            wait([future for _, future in self.running], return_when=FIRST_COMPLETED)
        running, self.running, completed = self.running, [], []
        for episode, future in running:
            if future.done():
                completed.append((episode, future.result()[0]))
            else:
                self.running.append((episode, future))
        return completed

    def _steps(self, envs: Sequence[Env], actions: Sequence[str]) -> list[Step]:
        if not self.seconds:
            what = "a step" if len(envs) == 1 else f"a step of {len(envs)} episodes"
            text = (
                f"{self.env.name}: {what} has been running for {REPORT_S:g} s; env.max_seconds gives up on such steps"
            )
            with reported_after(REPORT_S, text):
                return self.env.step_all(envs, actions)
        if self.env.slow and len(envs) > 1:
            with ThreadPoolExecutor(SIDE_BY_SIDE, "assay-env") as pool:
                return list(pool.map(self._limited, envs, actions))
        return [self._limited(env, action) for env, action in zip(envs, actions, strict=True)]

    def _limited(self, env: Env, action: str) -> Step:
        try:
            return within(self.seconds, lambda: self.env.step_all([env], [action])[0])
        except TimeoutError as error:
            return failed_step(error)

    def close(self) -> None:
        """Cancel pending steps. Those that are running end by themselves, and their results are ignored."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
