"""From sampled groups to a policy that has learnt from them: credit, replay, update, sync. The loop calls these."""

from __future__ import annotations

import time

from assay.algos.reward_kl import log_ratios
from assay.train.adapt import adapted
from assay.train.optim import rate
from assay.train.reference import move_reference
from assay.train.replay import mixed
from assay.train.stages import Parts, done, progress
from assay.train.sync import sync_weights
from assay.types import Group


def credit(parts: Parts, groups: list[Group]) -> dict[str, float]:
    """Rewards become advantages. Divergence may have a price, and a critic the last word."""
    algo, found = parts.algo, {}
    prices: list[list[float]] | None = None
    if algo.kl_in_reward:
        ref_logprobs = parts.updater.ref_logprobs(groups, algo)
        algo.credit(groups, ref_logprobs)
        ratios = log_ratios(groups, ref_logprobs)
        found["reward/kl"] = sum(map(sum, ratios)) / max(len(ratios), 1)
        prices = [[algo.reward_kl_coef * ratio for ratio in own] for own in ratios] if algo.kl_by_token else None
    else:
        algo.credit(groups)
    return found | parts.critic.credit(groups, prices) if parts.critic else found


def recall(parts: Parts, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
    """What to learn from: this step's groups and some of earlier steps. From the next step on they are one of these."""
    buffer, cfg, version = parts.replay, parts.cfg, parts.state.step
    if buffer is None:
        return groups, {}
    again = buffer.sample(cfg.replay.groups, version, cfg.seed)
    batch = mixed(groups, again)
    found = {
        "replay/size": float(len(buffer)),
        "replay/age": buffer.mean_age(version),
        "replay/share": len(again) / max(len(batch), 1),
    }
    buffer.add(groups)
    return batch, found


def learn(parts: Parts, batch: list[Group]) -> dict[str, float]:
    """A step: the update, a reference that may follow it, and the new weights for the engine."""
    started = time.perf_counter()
    algo = adapted(parts.algo, parts.state)
    parts.updater.expects_more = not done(parts, ahead=1)
    metrics = parts.updater.update(batch, algo, learning_rate(parts), parts.cfg.train.passes)
    if parts.critic:
        metrics |= parts.critic.learn()
    trained = time.perf_counter()
    parts.state.step += 1
    move_reference(parts.updater, parts.cfg.algo, parts.state.step)
    sync_weights(parts.updater.policy, parts.collector.engine, version=parts.state.step)
    return metrics | {"time/train": trained - started, "time/sync": time.perf_counter() - trained}


def learning_rate(parts: Parts) -> float:
    cfg = parts.cfg.optim
    fraction = rate(cfg.schedule, progress(parts), parts.total_steps, cfg.warmup, cfg.final)
    return cfg.lr * cfg.initial * fraction
