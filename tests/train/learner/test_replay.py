"""The replay buffer by itself, in the update, and as a part of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from small_run import SmallRuns
from train_parts import full_logprobs, gradients_of, make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.runs.rollouts import read_rollouts
from assay.train.learner.optim import make_adamw
from assay.train.learner.pack import rows_of
from assay.train.learner.replay import ReplayBuffer, mixed, version_of
from assay.train.learner.update import Updater
from assay.types import Group, UserError


def group_of(version: int, number: int = 0, reward: float = 0.0) -> Group:
    (group,) = make_groups(tiny_decoder(), groups=1, samples=2, seed=1000 * version + number)
    for rollout in group.rollouts:
        rollout.reward, rollout.advantage = reward, reward - 0.5
        for turn in rollout.turns:
            turn.completion.version = version
    return group


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return [group_of(version, number) for version in range(4) for number in range(3)]


def test_the_buffer_keeps_the_latest_groups(groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=5)
    for version in range(4):
        buffer.add(groups[3 * version : 3 * version + 3])
        buffer.add([Group(groups[0].prompt, [])])
        assert list(buffer) == groups[: 3 * version + 3][-5:] and len(buffer) == min(3 * version + 3, 5)
    assert buffer.mean_age(4) == pytest.approx((2 + 2 + 1 + 1 + 1) / 5)
    with pytest.raises(UserError, match="must be 1 or more"):
        ReplayBuffer(capacity=0)


def test_samples_depend_on_seed_and_version_only(groups: list[Group]) -> None:
    def draw(version: int, seed: int, count: int = 5) -> list[int]:
        buffer = ReplayBuffer(capacity=12)
        buffer.add(groups)
        return [groups.index(group) for group in buffer.sample(count, version, seed)]

    assert draw(4, 0) == draw(4, 0)
    assert len({tuple(draw(version, seed)) for version in range(4, 8) for seed in range(4)}) == 16
    assert sorted(draw(4, 0, count=99)) == list(range(12))  # no more than there are, each once
    seen = Counter(index for version in range(4, 1004) for index in draw(version, 1, count=3))
    assert all(abs(seen[index] - 250) < 5 * 250**0.5 for index in range(12))  # 3 of 12, 1,000 times


def test_with_replacement_a_group_can_be_sampled_twice(groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=12, with_replacement=True)
    buffer.add(groups)
    drawn = buffer.sample(200, 4)
    assert len(drawn) == 200 and {id(group) for group in drawn} == {id(group) for group in groups}
    assert ReplayBuffer(capacity=3, with_replacement=True).sample(3, 1) == []


def test_groups_beyond_max_staleness_are_removed(groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=12, max_staleness=2)
    buffer.add(groups)
    assert {version_of(group) for group in buffer.sample(12, 4)} == {2, 3}
    assert len(buffer) == 6
    buffer.add(groups[:6])
    assert len(buffer) == 12  # there is room again
    mixed_versions = groups[0]
    mixed_versions.rollouts[0].turns[0].completion.version = 9
    assert version_of(mixed_versions) == 0
    mixed_versions.rollouts[0].turns[0].completion.version = 0


def test_a_saved_buffer_is_loaded_unchanged(tmp_path: Path, groups: list[Group]) -> None:
    buffer = ReplayBuffer(capacity=7, max_staleness=9, with_replacement=True)
    groups[-1].rollouts[0].token_advantages = [0.1] * groups[-1].rollouts[0].length
    buffer.add(groups)
    buffer.save(tmp_path / "deep" / "buffer")
    found = ReplayBuffer.load(tmp_path / "deep" / "buffer")
    assert found == buffer and found.groups.maxlen == 7
    assert found.sample(5, 9, seed=3) == buffer.sample(5, 9, seed=3)
    files = {file.suffix for file in (tmp_path / "deep").rglob("*") if file.is_file()}
    assert files == {".json", ".jsonl", ".npz"}
    empty = ReplayBuffer(capacity=2)
    empty.save(f"{tmp_path}/empty")
    assert ReplayBuffer.load(f"{tmp_path}/empty") == empty
    with pytest.raises(UserError, match="not a replay buffer"):
        ReplayBuffer.load(tmp_path)


def test_the_summary_lists_versions_and_means() -> None:
    buffer = ReplayBuffer(capacity=9)
    assert buffer.summary(3) == "0 of 9 groups, 0 rollouts"
    buffer.add([group_of(1, 0, 1.0), group_of(1, 1, 0.0), group_of(3, 0, 0.25)])
    first, one, three = buffer.summary(4).splitlines()
    assert first == "3 of 9 groups, 6 rollouts, mean age 2.3"
    assert one.startswith("version 1: 2 groups, mean reward 0.500, mean length ")
    assert three.startswith("version 3: 1 groups, mean reward 0.250, mean length ")


def test_fresh_and_replayed_groups_are_interleaved_evenly(groups: list[Group]) -> None:
    fresh, replayed = groups[:8], groups[8:]
    batch = mixed(fresh, replayed)
    assert sorted(map(id, batch)) == sorted(map(id, groups))
    for start in range(0, 12, 3):
        assert sum(group in replayed for group in batch[start : start + 3]) == 1
    assert mixed(fresh, []) == fresh


def test_importance_ratios_use_the_logprobs_of_the_older_policy() -> None:
    """The gradient of a mixed batch is that of ratio * advantage, written out; behaviour is what is stored."""
    old, policy = tiny_decoder(seed=1), tiny_decoder(seed=1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    algo = make_algorithm("dr_grpo", max_new_tokens=16, clip_low=float("inf"), clip_high=float("inf"))
    fresh, stale = (make_groups(m, groups=2, seed=s, off_policy=0.0) for m, s in ((policy, 0), (old, 1)))
    for groups in (fresh, stale):
        algo.credit(groups)
    updater = Updater(policy, make_adamw(policy, 1e-2))
    updater._accumulate(rows_of(mixed(fresh, stale), algo), algo)
    found = [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]
    updater.optimizer.zero_grad()
    ratios, total = [], torch.zeros((), dtype=torch.float64)
    every = [rollout for group in (*fresh, *stale) for rollout in group.rollouts]
    for rollout in every:
        ids, mask = rollout.token_ids, rollout.loss_mask
        behaviour = full_logprobs(policy if rollout in [r for g in fresh for r in g.rollouts] else old, ids)
        hidden = policy.hidden(torch.tensor(ids), [len(ids)])
        current = torch.log_softmax(policy.unembed(hidden), -1)
        for position in (index for index in range(len(ids)) if mask[index]):
            ratio = (current[position - 1, ids[position]] - behaviour[position - 1, ids[position]]).exp()
            total = total - ratio * rollout.advantage / (len(every) * 16)
            ratios.append(float(ratio.detach()))
    total.backward()
    expected = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    assert max(ratios) > 1.05 and min(ratios) < 0.95  # the policy has moved on
    assert all((one - other).abs().max() < 1e-10 for one, other in zip(found, expected, strict=True))


def test_a_run_logs_its_replay(tmp_path: Path, no_curves: None) -> None:
    small = SmallRuns(tmp_path)
    words = ("--train.steps", 5, "--save.every", 5, "--replay.groups", 2, "--replay.capacity", 7)
    assert small.train(*words, "--replay.max_staleness", 2, "--algo.updates", 2) == 0
    rows = [row for row in small.metrics() if "replay/size" in row]
    # 3 groups a step, and none of more than two steps ago: 0, 3, 6, then the last two steps
    assert [row["replay/size"] for row in rows] == [0, 3, 6, 6, 6]
    assert [row["replay/age"] for row in rows] == [0, 1, 1.5, 1.5, 1.5]
    assert [row["replay/share"] for row in rows] == pytest.approx([0, 0.4, 0.4, 0.4, 0.4])
    buffer = ReplayBuffer.load(small.checkpoint(5) / "replay")
    written = [group for step in (3, 4, 5) for group in read_rollouts(small.runs / "small", step)]
    assert list(buffer) == written[-7:]  # what was in the rollout files is what may come again


@pytest.mark.slow
def test_a_run_starts_with_the_buffer_of_another_run(
    tmp_path: Path, no_curves: None, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallRuns(tmp_path)
    words = ("--replay.groups", 2, "--replay.max_staleness", 2, "--save.every", 1)
    assert small.train(*words, "--name", "first") == 0
    saved = small.checkpoint(2, "first") / "replay"
    assert small.train(*words, "--train.steps", 3, "--replay.load", saved, "--name", "second") == 0
    rows = [row for row in small.metrics("second") if "replay/size" in row]
    assert [row["replay/size"] for row in rows] == [6, 9, 6]  # what came from elsewhere is two steps old, then too old
    assert [row["replay/age"] for row in rows] == pytest.approx([1, (6 * 2 + 3) / 9, 1.5])
    first, second = (list(ReplayBuffer.load(folder)) for folder in (saved, small.checkpoint(0, "second") / "replay"))
    assert {version_of(group) for group in second} == {-1}
    assert [[r.token_ids for r in g.rollouts] for g in first] == [[r.token_ids for r in g.rollouts] for g in second]
    capsys.readouterr()
    assert small.train(*words, "--replay.load", saved, "--model.tokenizer", "characters") == 2
    assert small.train(*words, "--replay.load", tmp_path) == 2
    said = capsys.readouterr().err.splitlines()
    assert "another tokenizer" in said[0] and "not a replay buffer" in said[1] and len(said) == 2


@pytest.mark.parametrize(
    ("recipe", "why"), [("reinforce", "'reinforce' has no importance ratio"), ("gspo", "recompute_logprobs discards")]
)
def test_losses_without_importance_ratios_refuse_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, why: str
) -> None:
    small = SmallRuns(tmp_path)
    assert small.train("--algo.recipe", recipe, "--replay.groups", 2) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1 and not small.runs.exists()


def test_importance_correction_applies_to_replayed_tokens() -> None:
    """REINFORCE with token weights: the gradient is that of min(ratio, high) * A * log pi, written out."""
    old, policy = tiny_decoder(seed=1), tiny_decoder(seed=2)
    algo = make_algorithm("simple", correction="token_truncate", correction_high=1.5)
    stale = make_groups(old, groups=2, off_policy=0.0)
    algo.credit(stale)
    updater = Updater(policy, make_adamw(policy, 1e-2))
    updater._accumulate(rows_of(stale, algo), algo)
    found = gradients_of(policy)
    updater.optimizer.zero_grad()
    rollouts = [rollout for group in stale for rollout in group.rollouts]
    total, weights = torch.zeros((), dtype=torch.float64), []
    for rollout in rollouts:
        ids = rollout.token_ids
        every = torch.log_softmax(policy.unembed(policy.hidden(torch.tensor(ids), [len(ids)])), -1)
        for position in (index for index, mask in enumerate(rollout.loss_mask) if mask):
            logprob = every[position - 1, ids[position]]
            weights.append(min(float((logprob.detach() - rollout.engine_logprobs[position]).exp()), 1.5))
            total = total - weights[-1] * rollout.advantage * logprob / sum(r.length for r in rollouts)
    total.backward()
    assert min(weights) < 0.7 and max(weights) == 1.5
    assert (found - gradients_of(policy)).abs().max() < 1e-10
