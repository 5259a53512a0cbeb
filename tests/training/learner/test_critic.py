"""The critic: values equal to a plain forward pass, advantages by GAE, and its updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_parts import credit, critic
from safetensors.torch import load_file, save_file
from small_run import SmallRuns
from torch import Tensor
from train_parts import cramped, gradients_of, make_adamw, make_groups, tiny_decoder, weights_of

from assay.algos import Scorers, make_algorithm
from assay.algos.advantages import token_rewards
from assay.algos.credit import gae, log_ratios
from assay.config import TrainConfig
from assay.mesh import Mesh
from assay.runs.rollouts import read_rollouts, write_rollouts
from assay.training.learner.critic import Critic, make_critic
from assay.training.learner.pack import Row, rows_of
from assay.training.learner.update import Updater
from assay.types import Rollout, UserError


@torch.no_grad()
def plain_values(own: Critic, row: Row) -> list[float]:
    hidden = own.model.trunk.hidden(torch.tensor(row.ids), [len(row.ids)])
    every = hidden @ own.model.head.weight[0] + own.model.head.bias
    return [float(every[position - 1]) for position, trained in enumerate(row.trained) if trained]


def test_values_and_advantages_are_those_of_a_plain_pass() -> None:
    own = critic(30, normalise=False, gamma=0.9, gae_lambda=0.95)
    groups = make_groups(tiny_decoder())
    rollouts = [r for group in groups for r in group.rollouts]
    rollouts[3].masked = True
    credit(own, groups)
    for rollout in rollouts:
        if rollout.masked:
            assert rollout.token_advantages is None
            continue
        expected = gae(plain_values(own, Row.of(rollout)), token_rewards(rollout), 0.9, 0.95)
        assert rollout.token_advantages == pytest.approx(expected, abs=1e-10)
        assert rollout.advantage == pytest.approx(sum(expected) / len(expected))
    returns = [value for rollout in rollouts for value in rollout.inputs.get("returns", ())]
    assert sum(bool(rollout.inputs) for rollout in rollouts) == len(rollouts) - 1 and max(returns) > min(returns)


def test_a_truncated_episode_is_bootstrapped_with_the_value_of_the_next_state(tmp_path: Path) -> None:
    """Against a plain forward pass over the tokens of the episode and of the next state.

    The episodes are read from a file, as in a resumed asynchronous run.
    """
    groups = make_groups(tiny_decoder())
    rollouts = [r for group in groups for r in group.rollouts]
    cut = {3: [7, 8, 9], 5: [], 6: [1] * 60}  # []: truncated within an answer; 60 tokens exceed the context
    for index, next_ids in cut.items():
        rollouts[index].cut_off, rollouts[index].bootstrap_ids = True, next_ids
    write_rollouts(tmp_path, 0, groups)
    groups = read_rollouts(tmp_path, 0)
    rollouts = [r for group in groups for r in group.rollouts]
    for bootstrap in (True, False):
        own = critic(30, bootstrap=bootstrap, normalise=False, gamma=0.9, gae_lambda=0.8)
        credit(own, groups)
        for index, rollout in enumerate(rollouts):
            after = 0.0
            if bootstrap and index in (3, 5):
                ids = torch.tensor(rollout.token_ids + cut[index])
                with torch.no_grad():
                    last = own.model.trunk.hidden(ids, [len(ids)])[-1]
                    after = float(last @ own.model.head.weight[0] + own.model.head.bias)
                assert abs(after) > 0.01
            values = plain_values(own, Row.of(rollout))
            expected = gae(values, token_rewards(rollout), 0.9, 0.8, after)
            assert rollout.token_advantages == pytest.approx(expected, abs=1e-10)
            assert rollout.inputs["values"] == pytest.approx(values)
            assert len(rollout.inputs["returns"]) == rollout.trained


def test_reward_kl_per_token_enters_the_returns_of_the_critic() -> None:
    own = critic(normalise=False, gae_lambda=0.5)
    algo = make_algorithm("rloo", reward_kl_coef=0.3, reward_kl_per="token")
    groups = make_groups(tiny_decoder())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    reference = [[-0.1 * (position % 7) for position in range(rollout.length)] for rollout in rollouts]
    algo.credit(groups, Scorers(lambda _: reference))
    credit(own, groups, log_ratios(groups, reference), 0.3)
    for rollout, ref in zip(rollouts, reference, strict=True):
        written = [p for turn in rollout.turns for p in turn.completion.engine_logprobs]
        rewards = [-0.3 * (p - r) for p, r in zip(written, ref, strict=True)]
        rewards[-1] += rollout.verdict.reward
        expected = gae(plain_values(own, Row.of(rollout)), rewards, 1.0, 0.5)
        assert rollout.token_advantages == pytest.approx(expected, abs=1e-10)


def test_advantages_are_whitened_over_tokens() -> None:
    groups = make_groups(tiny_decoder())
    credit(critic(), groups)
    every = torch.tensor([v for g in groups for r in g.rollouts for v in r.token_advantages or ()])
    assert float(every.mean()) == pytest.approx(0, abs=1e-6) and float(every.std()) == pytest.approx(1, abs=1e-6)


def test_whitened_advantages_are_exactly_zero_where_all_are_equal() -> None:
    """As in the first step of a run, when all values are 0, if all answers get the same reward."""
    own, groups = critic(gae_lambda=1.0), make_groups(tiny_decoder())
    torch.nn.init.zeros_(own.model.head.weight)
    torch.nn.init.zeros_(own.model.head.bias)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.reward = 1 / 3
    credit(own, groups)
    assert not any(value for g in groups for r in g.rollouts for value in r.token_advantages or ())


def test_updates_do_not_depend_on_micro_batches_and_continue_from_a_checkpoint(tmp_path: Path) -> None:
    groups = make_groups(tiny_decoder())
    found = []
    for budget in (10**6, 25):
        own = critic(budget)
        credit(own, groups)
        losses = [own.learn(groups)["critic/loss"] for _ in range(2)]
        found.append((losses, torch.cat([p.detach().flatten() for p in own.model.parameters()])))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12) and (found[0][1] - found[1][1]).abs().max() < 1e-10
    own.save(tmp_path)
    again = critic(25)
    again.load(tmp_path)
    for one in (own, again):
        credit(one, groups)
        one.learn(groups)
    pairs = zip(own.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("changed", [{"head.weight": torch.zeros(1, 1)}, {"head.bias": None}])
def test_a_critic_that_does_not_fit_the_model_is_refused(tmp_path: Path, changed: dict[str, Tensor | None]) -> None:
    """One value would be copied to all weights of the head."""
    own = critic()
    own.save(tmp_path)
    tensors = {**load_file(tmp_path / "critic.safetensors"), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "critic.safetensors")
    with pytest.raises(UserError, match="does not fit"):
        own.load(tmp_path)


def test_out_of_memory_halves_the_critics_token_budget() -> None:
    groups = make_groups(tiny_decoder())
    found = []
    for room in (10**9, 60):
        own = critic(4096)
        own.model.trunk = cramped(room, seed=3)
        own.__post_init__()
        credit(own, groups)
        if room == 60:
            assert own.token_budget <= 60
            own.token_budget = 4096  # the update has to reduce it as well
        loss = own.learn(groups)["critic/loss"]
        found.append((loss, torch.cat([p.detach().flatten() for p in own.model.parameters()])))
    assert own.token_budget <= 60
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12) and (found[0][1] - found[1][1]).abs().max() < 1e-10


def test_a_shared_trunk_gets_the_gradients_of_both_losses() -> None:
    """Gradients of policy and head against a plain pass over single answers, with some values clipped."""
    policy, algo = tiny_decoder(), make_algorithm("ppo", updates=1)
    own = critic(policy=policy, clip=0.1, coef=0.7)
    updater = Updater(policy, make_adamw(policy, 1e-2), critic=own, token_budget=30)
    groups = make_groups(policy)
    groups[1].rollouts[0].masked = True
    algo.credit(groups, Scorers(values=own.values))
    with torch.no_grad():  # as in a second update, the head differs from the one that computed the values
        own.model.head.weight.add_(0.03)
    sums = updater._accumulate(rows_of(groups, algo), algo)
    found = both_gradients(own)
    updater.optimizer.zero_grad(set_to_none=True)
    own.step(usable=False)
    assert all(weight.grad is None for weight in own.model.parameters())
    losses = plain_losses(own, [r for group in groups for r in group.rollouts if not r.masked])
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert (found - both_gradients(own)).abs().max() < 1e-10
    losses["loss/total"] = losses["loss/policy"] + losses["loss/value"]
    for key, value in losses.items():
        assert float(sums.losses[key]) == pytest.approx(float(value.detach()), abs=1e-12)


def both_gradients(own: Critic) -> Tensor:
    return torch.cat([gradients_of(own.model.trunk), *(p.grad.flatten() for p in own.model.head.parameters())])  # type: ignore[union-attr]


def plain_losses(own: Critic, rollouts: list[Rollout]) -> dict[str, Tensor]:
    """PPO's two losses, token by token: clip ranges of 0.2 and 0.1, and 0.7 as the weight of values."""
    policy, tokens = own.model.trunk, sum(r.length for r in rollouts)
    gains, errors, clipped = [], [], 0
    for rollout in rollouts:
        ids, told = rollout.token_ids, rollout.inputs
        hidden = policy.hidden(torch.tensor(ids), [len(ids)])
        logprobs = torch.log_softmax(policy.unembed(hidden), -1)
        positions = [position for position, mask in enumerate(rollout.loss_mask) if mask]
        numbers = zip(positions, rollout.token_advantages or (), told["values"], told["returns"], strict=True)
        for position, advantage, given, wanted in numbers:
            ratio = (logprobs[position - 1, ids[position]] - rollout.engine_logprobs[position]).exp()
            gains.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            value = hidden[position - 1] @ own.model.head.weight[0] + own.model.head.bias[0]
            held = value.clamp(given - 0.1, given + 0.1)
            errors.append(torch.maximum((value - wanted) ** 2, (held - wanted) ** 2))
            clipped += bool((held - wanted) ** 2 > (value - wanted) ** 2)
    assert 0 < clipped < tokens
    return {"loss/policy": -sum(gains) / tokens, "loss/value": 0.7 * sum(errors) / 2 / tokens}  # type: ignore[dict-item]


def test_a_shared_trunk_is_updated_by_the_policys_optimizer_only() -> None:
    policy, algo = tiny_decoder(), make_algorithm("ppo")
    own = critic(policy=policy)
    updater = Updater(policy, make_adamw(policy, 1e-2), critic=own)
    groups = make_groups(policy)
    credit(own, groups)
    before = weights_of(policy), own.model.head.weight.detach().clone()
    found = updater.update(groups, algo, 0.0)
    assert found["loss/value"] > 0 and weights_of(policy).equal(before[0])  # its rate is 0
    assert not own.model.head.weight.equal(before[1]) and own.learn(groups) == {}
    assert set(own.model.own_parameters()) == {"head.weight", "head.bias"}
    updater.update(groups, algo, 1e-2)
    assert not weights_of(policy).equal(before[0])


def test_activation_checkpointing_applies_to_a_separate_trunk() -> None:
    for recompute in (False, True):
        cfg = TrainConfig.model_validate({"train": {"activation_checkpointing": recompute}})
        made = make_critic(cfg, make_algorithm("ppo"), tiny_decoder(), Mesh(), torch.float64)
        assert made is not None and made.model.trunk.recompute is recompute


def test_an_update_with_a_non_finite_gradient_is_skipped() -> None:
    own, groups = critic(clip=0.0), make_groups(tiny_decoder())
    credit(own, groups)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.inputs["returns"] = [float("inf")] * rollout.trained
    before = weights_of(own.model.trunk), own.model.head.weight.detach().clone()
    with pytest.warns(UserWarning, match="4 of its updates were skipped"):
        found = own.learn(groups)
    assert found["critic/skipped"] == 4.0 and not own.optimizer.state
    assert weights_of(own.model.trunk).equal(before[0]) and own.model.head.weight.equal(before[1])
    credit(own, groups)
    assert own.learn(groups)["critic/skipped"] == 0.0 and not own.model.head.weight.equal(before[1])


def test_a_ppo_run_logs_and_trains_the_critic(small: SmallRuns) -> None:
    words = ("--algo.recipe", "ppo", "--critic.trunk", "shared", "--critic.lr", 1e-3, "--train.steps", 4)
    assert small.train(*words, "--train.prompts", 6, "--train.samples", 1) == 0
    rows = [row for row in small.metrics() if row.get("loss/value", 0) > 0]
    assert len(rows) == 4 and rows[0]["critic/value_mean"] == 0.0 != rows[1]["critic/value_mean"]
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    (one, *_) = read_rollouts(small.runs / "small", 2)
    assert all(len(set(r.token_advantages or ())) > 1 for r in one.rollouts if r.length > 1)


@pytest.mark.slow
def test_ppo_learns_with_one_answer_per_prompt(small: SmallRuns) -> None:
    (small.folder / "reward.py").write_text(
        "def reward(completion, answer):\n"
        "    words = completion.split() or ['']\n"
        "    return {'reward': sum(map(str.isdigit, words)) / len(words), 'parsed': completion}\n"
    )
    words = ("--algo.recipe", "ppo", "--critic.lr", 3e-3, "--optim.lr", 2e-3)
    assert small.train(*words, "--train.steps", 14, "--train.prompts", 16, "--train.samples", 1) == 0
    rewards = [row["reward/mean"] for row in small.metrics() if "reward/mean" in row]
    assert sum(rewards[:3]) / 3 < 0.7 and sum(rewards[-3:]) / 3 > 0.8
