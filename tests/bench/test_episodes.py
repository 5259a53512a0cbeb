"""Benchmark of episodes at their own pace and in rounds: counts, times, and equal trajectories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from assay.bench import engine
from assay.bench.engine import Chatter, EpisodeOptions, Episodes, measure_episodes

SMALL = Episodes(episodes=12, samples=3, step_tokens=40, max_batch=8)
OPTIONS = EpisodeOptions(device="cpu", dtype="float32", repeat=2)


def test_a_row_for_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = iter([9.0, 8.0, 3.0, 2.0, 5.0, 1.0])  # rounds and own pace alternate
    times = iter([time for at in range(6) for time in (100.0 * at, 100.0 * at + next(spans))])
    monkeypatch.setattr(engine, "now", lambda device: next(times))
    rounds, own = measure_episodes(SMALL, OPTIONS)
    assert (rounds["seconds"], rounds["runs"], rounds["first_run_s"]) == (4.0, [3.0, 5.0], 9.0)
    assert (own["seconds"], own["runs"], own["first_run_s"]) == (1.5, [2.0, 1.0], 8.0)
    assert own["same_as_in_rounds"] == 12 and "same_as_in_rounds" not in rounds
    assert own["decode_steps"] < rounds["decode_steps"] and own["rows_a_step"] > rounds["rows_a_step"]
    for name in ("actions", "action_tokens_median", "action_tokens_max", "decoded_tokens"):
        assert own[name] == rounds[name]
    expected = sum(1 + prompt.fields["episode_seed"] % 8 for prompt in Chatter().prompts("train")[:4]) * 3
    assert own["actions"] == expected and 1 <= own["action_tokens_median"] <= own["action_tokens_max"] <= 40
    assert (own["system"], own["device"], own["dtype"], own["episodes"]) == ("assay", "cpu", "float32", 12)
    assert rounds["id"].endswith("-rounds") and own["id"].endswith("-own-pace")
    words = "--episodes 12 --samples 3 --step-tokens 40 --max-batch 8 --device cpu --dtype float32 --repeat 2"
    assert own["command"] == rounds["command"] == f"assay bench episodes {words}"


def test_different_trajectories_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    play, runs = engine.play, []

    def changed(*args):
        runs.append(1)
        rollouts = play(*args)
        if len(runs) % 2 == 0:  # at their own pace
            rollouts[5].turns[0].completion.token_ids[0] += 1
        return rollouts

    monkeypatch.setattr(engine, "play", changed)
    _, own = measure_episodes(SMALL, replace(OPTIONS, repeat=1))
    assert own["same_as_in_rounds"] == 11
