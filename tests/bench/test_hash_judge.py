"""The judge of step benchmarks."""

from __future__ import annotations

from assay.bench.hash_judge import hash_reward, judge_by_hash
from assay.rewards import JudgePool


def test_hash_rewards_differ_and_are_the_same_in_judge_workers() -> None:
    texts = [str(number) for number in range(500)]
    assert len({hash_reward(text) for text in texts}) == 500 and all(0 <= hash_reward(text) < 1 for text in texts)
    assert 0.4 < sum(map(hash_reward, texts)) / 500 < 0.6
    with JudgePool(judge_by_hash, workers=1) as pool:
        assert [verdict.reward for verdict in pool.judge([(text, "", {}) for text in texts])] == list(
            map(hash_reward, texts)
        )
