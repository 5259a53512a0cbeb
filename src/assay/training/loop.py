"""The training loop, on one screen. Each call is a method of one component of the run."""

from __future__ import annotations

import time
from typing import Any

from assay.training.run import TrainingRun


def train(run: TrainingRun) -> dict[str, Any]:
    """Evaluate, train until the run is complete, evaluate again. Returns the summary that was written."""
    run.begin()
    while not run.done():
        started = time.perf_counter()
        sampled = run.sample()  # groups of rollouts, judged and filtered
        metrics = run.learner.credit(sampled.groups)  # rewards -> advantages
        batch, replayed = run.replay.mix(sampled.groups, run.state.step)
        metrics |= replayed | {"time/sample": time.perf_counter() - started}
        metrics |= run.learner.update(batch, run.state)  # increments the step
        metrics |= run.sync()  # weights -> engine
        run.record(sampled, batch, metrics)  # log; evaluate and save a checkpoint when due
    return run.finish()
