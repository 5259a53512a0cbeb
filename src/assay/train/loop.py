"""The loop, on one screen. What each line does is one call away, in `stages`."""

from __future__ import annotations

import time
from typing import Any

from assay.train.adapt import adapted, learn
from assay.train.stages import Parts, begin, close, count_faults, describe, done, finish, learning_rate, sample
from assay.train.stages import keep_rollouts as keep
from assay.train.sync import sync_weights


def train(parts: Parts) -> dict[str, Any]:
    """Warm start, before, the loop, after. Returns the summary that it wrote."""
    cfg, state = parts.cfg, parts.state
    if not parts.resumed:
        begin(parts)
    if state.unmeasured is not None:  # the evaluation of its last step was left when the run was stopped
        close(parts, state.unmeasured, time.perf_counter())
    parts.console.start(parts.total_steps, parts.run.name, state.step)
    while not done(parts):
        started = time.perf_counter()
        groups, dropped = sample(parts)
        parts.algo.credit(groups)
        sampled = time.perf_counter()
        metrics = parts.updater.update(groups, adapted(parts.algo, state), learning_rate(parts), cfg.train.passes)
        trained = time.perf_counter()
        state.step += 1
        sync_weights(parts.updater.policy, parts.collector.engine, version=state.step)
        synced = time.perf_counter()
        metrics |= describe(groups, dropped) | learn(parts.algo, state, [*groups, *dropped], metrics)
        metrics |= {"time/sample": sampled - started, "time/train": trained - sampled, "time/sync": synced - trained}
        metrics |= {f"time/{part}": seconds for part, seconds in parts.collector.seconds.items()}
        keep(parts, [*groups, *dropped])
        count_faults(parts, groups)
        close(parts, metrics, started)
    parts.console.stop()
    return finish(parts)
