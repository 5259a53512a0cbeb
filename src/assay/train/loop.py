"""The loop, on one screen. What each line does is one call away, in `stages` and `learn`."""

from __future__ import annotations

import time
from typing import Any

from assay.train.adapt import remember
from assay.train.garbage import seldom_collected
from assay.train.learn import credit, learn, recall
from assay.train.stages import Parts, begin, close, count_faults, describe, done, finish, sample
from assay.train.stages import keep_rollouts as keep


@seldom_collected()
def train(parts: Parts) -> dict[str, Any]:
    """Warm start, before, the loop, after. Returns the summary that it wrote."""
    state = parts.state
    if not parts.resumed:
        begin(parts)
    if state.unmeasured is not None:  # the evaluation of its last step was left when the run was stopped
        close(parts, state.unmeasured, time.perf_counter())
    parts.console.start(parts.total_steps, parts.run.name, state.step)
    while not done(parts):
        started = time.perf_counter()
        groups, dropped = sample(parts)
        metrics = credit(parts, groups)
        batch, replayed = recall(parts, groups)
        metrics |= replayed | {"time/sample": time.perf_counter() - started}
        metrics |= learn(parts, batch)
        metrics |= describe(groups, dropped, parts.algo) | remember(parts.algo, state, [*groups, *dropped], metrics)
        metrics |= {f"time/{part}": seconds for part, seconds in parts.collector.seconds.items()}
        keep(parts, [*groups, *dropped])
        count_faults(parts, batch)
        close(parts, metrics, started)
    parts.console.stop()
    return finish(parts)
