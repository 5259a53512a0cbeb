"""The critic: values as a plain forward pass has them, advantages by GAE, and a loss that it learns from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_run import SmallRuns
from train_parts import make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.algos.gae import gae
from assay.algos.returns import token_rewards
from assay.algos.reward_kl import log_ratios
from assay.config import CriticConfig
from assay.runs.rollouts import read_rollouts
from assay.train.critic import Critic, ValueModel
from assay.train.pack import Row


def critic(token_budget: int = 10**6, **changes: object) -> Critic:
    model = ValueModel(tiny_decoder(seed=3))
    with torch.no_grad():
        model.head.weight.copy_(torch.linspace(-1, 1, 16)[None])
        model.head.bias.fill_(0.3)
    return Critic(model, CriticConfig(use=True, lr=1e-2, **changes), token_budget)  # type: ignore[arg-type]


@torch.no_grad()
def plain_values(own: Critic, row: Row) -> list[float]:
    hidden = own.model.trunk.hidden(torch.tensor(row.ids), [len(row.ids)])
    every = hidden @ own.model.head.weight[0] + own.model.head.bias
    return [float(every[place - 1]) for place, trained in enumerate(row.trained) if trained]


@pytest.mark.parametrize("budget", [10**6, 30, 1])
def test_values_and_advantages_are_those_of_a_plain_pass(budget: int) -> None:
    own = critic(budget, normalise=False, gamma=0.9)
    groups = make_groups(tiny_decoder())
    rollouts = [r for group in groups for r in group.rollouts]
    rollouts[3].masked = True
    own.credit(groups)
    for rollout in rollouts:
        if rollout.masked:
            assert rollout.token_advantages is None
            continue
        expected = gae(plain_values(own, Row.of(rollout)), token_rewards(rollout), 0.9, 0.95)
        assert rollout.token_advantages == pytest.approx(expected, abs=1e-10)
        assert rollout.advantage == pytest.approx(sum(expected) / len(expected))
    returns = [v for lesson in own.lessons for v in lesson.returns]
    assert len(own.lessons) == len(rollouts) - 1 and max(returns) > min(returns)


def test_tokens_pay_one_by_one_for_their_divergence() -> None:
    own = critic(normalise=False, gae_lambda=0.5)
    algo = make_algorithm("rloo", reward_kl_coef=0.3, reward_kl_per="token")
    groups = make_groups(tiny_decoder())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    reference = [[-0.1 * (place % 7) for place in range(rollout.length)] for rollout in rollouts]
    algo.credit(groups, reference)
    prices = [[0.3 * ratio for ratio in ratios] for ratios in log_ratios(groups, reference)]
    own.credit(groups, prices)
    for rollout, ref in zip(rollouts, reference, strict=True):
        written = [p for turn in rollout.turns for p in turn.completion.engine_logprobs]
        rewards = [-0.3 * (p - r) for p, r in zip(written, ref, strict=True)]
        assert rollout.verdict is not None
        rewards[-1] += rollout.verdict.reward
        expected = gae(plain_values(own, Row.of(rollout)), rewards, 1.0, 0.5)
        assert rollout.token_advantages == pytest.approx(expected, abs=1e-10)


def test_advantages_are_whitened_over_tokens() -> None:
    groups = make_groups(tiny_decoder())
    critic().credit(groups)
    every = torch.tensor([v for g in groups for r in g.rollouts for v in r.token_advantages or ()])
    assert float(every.mean()) == pytest.approx(0, abs=1e-6) and float(every.std()) == pytest.approx(1, abs=1e-6)


def test_neither_the_split_changes_what_is_learnt_nor_a_stop_what_follows(tmp_path: Path) -> None:
    groups = make_groups(tiny_decoder())
    found = []
    for budget in (10**6, 25):
        own = critic(budget)
        own.credit(groups)
        losses = [own.learn()["critic/loss"] for _ in range(2)]
        found.append((losses, torch.cat([p.detach().flatten() for p in own.model.parameters()])))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12) and (found[0][1] - found[1][1]).abs().max() < 1e-10
    own.save(tmp_path)
    again = critic(25)
    again.load(tmp_path)
    for one in (own, again):
        one.credit(groups)
        one.learn()
    pairs = zip(own.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_it_learns_what_answers_are_worth() -> None:
    own = critic(gae_lambda=1.0, clip=0.0, passes=1)
    groups = make_groups(tiny_decoder(), seed=2)
    first = own.credit(groups)["critic/explained_variance"]
    for _ in range(150):
        own.credit(groups)
        own.learn()
    assert first < 0.5 < 0.9 < own.credit(groups)["critic/explained_variance"]


@pytest.fixture
def small(tmp_path: Path, no_curves: None) -> SmallRuns:
    return SmallRuns(tmp_path)


def test_a_run_with_a_critic(small: SmallRuns) -> None:
    assert small.train("--critic.use", "true", "--critic.lr", 1e-3, "--train.steps", 4, "--train.samples", 2) == 0
    rows = [row for row in small.metrics() if "critic/loss" in row]
    assert len(rows) == 4 and rows[0]["critic/value_mean"] == 0.0 != rows[1]["critic/value_mean"]
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    (one, *_) = read_rollouts(small.runs / "small", 2)
    assert all(len(set(r.token_advantages or ())) > 1 for r in one.rollouts if r.length > 1)


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "adapters": (("--lora.rank", 2), "lora.rank = 0"),
    "replay": (("--replay.groups", 2), "replay.groups = 0"),
    "another process": (("--train.process", "separate"), "separate"),
    "credit by steps": (("--algo.step_credit", "true"), "algo.step_credit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_it(small: SmallRuns, capsys: pytest.CaptureFixture[str], name: str) -> None:
    words, message = REFUSED[name]
    assert small.train("--critic.use", "true", *words) == 2
    said = capsys.readouterr().err
    assert message in said and "critic" in said and said.count("\n") == 1 and not small.runs.exists()
