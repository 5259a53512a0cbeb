"""The update: independent of micro-batches, equal to plain implementations, and robust to failures."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from learner_parts import CHANGES, LIMIT, algorithm, updater
from torch import Tensor
from train_parts import SPEC, cramped, full_logprobs, gradients_of, make_adamw, make_groups, tiny_decoder, weights_of

from assay.algos import Algorithm, Scorers, make_algorithm
from assay.config import AlgoConfig, OptimConfig
from assay.models.decoder import Decoder
from assay.models.device import deterministic
from assay.models.logprobs import LOGITS_AT_ONCE
from assay.training.learner.optim import make_optimizer
from assay.training.learner.pack import rows_of, with_step_inputs
from assay.training.learner.update import Updater, mini_batches
from assay.types import Group, Prompt, UserError


def credited(algo: Algorithm, seed: int = 0) -> list[Group]:
    groups, _ = algo.keep(make_groups(tiny_decoder(), seed=seed))
    algo.credit(groups, Scorers(partial(updater(algo).ref_logprobs, algo=algo)))
    return groups


def outcome(updater: Updater, groups: Sequence[Group], algo: Algorithm) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and the weights after one step."""
    rows = with_step_inputs(rows_of(groups, algo), algo)
    sums = updater._accumulate(rows, algo)
    gradient = gradients_of(updater.policy)
    updater.step(rows, algo, 1e-2)
    return float(sums.losses["loss/total"]), gradient, weights_of(updater.policy)


@pytest.mark.parametrize("name", CHANGES)
def test_micro_batches_and_order_do_not_change_loss_gradient_and_weights(name: str) -> None:
    algo = algorithm(name)
    groups = credited(algo)
    loss, gradient, weights = outcome(updater(algo, token_budget=10**6), groups, algo)
    assert abs(loss) > 1e-6 and gradient.norm() > 1e-4
    found = outcome(updater(algo, token_budget=33), groups, algo)
    assert abs(found[0] - loss) < 1e-12
    assert (found[1] - gradient).abs().max() < 1e-12
    assert (found[2] - weights).abs().max() < 1e-12
    shuffled = [replace_rollouts(group, seed) for seed, group in enumerate(groups)]
    random.Random(3).shuffle(shuffled)
    found = outcome(updater(algo, token_budget=40), shuffled, algo)
    assert abs(found[0] - loss) < 1e-12
    assert (found[2] - weights).abs().max() < 1e-12


def test_progress_counts_the_tokens_of_micro_batches() -> None:
    algo = algorithm("grpo")
    trained, counts = updater(algo, token_budget=33), []
    trained.progress = lambda what, done, total, unit="", tokens=0: counts.append((what, done, total, unit))
    trained.update(credited(algo), algo, 1e-3)
    done, totals = [count[1] for count in counts], {count[2] for count in counts}
    assert {(what, unit) for what, _, _, unit in counts} == {("training", "tokens")}
    assert len(done) > 2 and done == sorted(done) and done[0] == 0 and totals == {done[-1]}


def test_metrics_do_not_depend_on_micro_batches() -> None:
    algo = algorithm("grpo with everything")
    groups = credited(algo)
    whole, parts = (updater(algo, token_budget=budget).update(groups, algo, 1e-3) for budget in (10**6, 15))
    assert whole == pytest.approx(parts, abs=1e-12)
    assert 0 < whole["policy/clip_fraction"] < 1  # or the test would not see the clipped branch


def replace_rollouts(group: Group, seed: int) -> Group:
    rollouts = list(group.rollouts)
    random.Random(seed).shuffle(rollouts)
    return replace(group, rollouts=rollouts)


def plain_loss(every: list[Tensor], groups: Sequence[Group], ref: list[Tensor] | None, algo: Algorithm) -> Tensor:
    """GRPO as in its paper: the mean over answers of the mean over tokens. `every`: log-probabilities [T, V]."""
    answers: list[Tensor] = []
    index = 0
    for group in groups:
        rewards = torch.tensor([r.reward for r in group.rollouts], dtype=torch.float64)
        spread = ((rewards - rewards.mean()) ** 2).sum().div(len(rewards) - 1).sqrt()
        for rollout, advantage in zip(group.rollouts, (rewards - rewards.mean()) / (spread + 1e-4), strict=True):
            terms = []
            for position, trained in enumerate(rollout.loss_mask):
                if not trained:
                    continue
                token, row = rollout.token_ids[position], every[index][position - 1]
                ratio = torch.exp(row[token] - rollout.engine_logprobs[position])
                term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if ref is not None:
                    gap = ref[index][position - 1][token] - row[token]
                    term = term - algo.settings.kl_coef * (gap.exp() - gap - 1)
                terms.append(term + algo.settings.entropy_coef * -(row.exp() * row).sum())
            answers.append(-torch.stack(terms).mean())
            index += 1
    return torch.stack(answers).mean()


def each_alone(model: Decoder, groups: Sequence[Group]) -> list[Tensor]:
    sequences = [torch.tensor(r.token_ids) for group in groups for r in group.rollouts]
    return [torch.log_softmax(model.unembed(model.hidden(ids, [len(ids)])), -1) for ids in sequences]


def test_a_sequence_level_loss_sees_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large logits are computed for a few tokens at a time, which must not split a sequence's ratio."""
    algo = make_algorithm("gspo", clip_low=0.05, clip_high=0.05, recompute_logprobs=False, updates=1)
    groups = credited(algo)
    whole = updater(algo)._accumulate(rows_of(groups, algo), algo)
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 3 * SPEC.vocab_size)
    sliced = updater(algo)
    sums = sliced._accumulate(rows_of(groups, algo), algo)
    assert float(sums.losses["loss/total"]) == pytest.approx(float(whole.losses["loss/total"]), abs=1e-12)
    grpo = make_algorithm("grpo")
    sliced._accumulate(rows_of(groups, grpo), grpo)  # a token-level loss is sliced


def test_ratios_use_the_trainers_logprobs_before_its_first_update() -> None:
    """With a learning rate of 0 all ratios are 1, whatever log-probabilities the engine reported."""
    algo = make_algorithm("grpo", correction="token_truncate", correction_high=1.1, updates=2)
    groups = credited(algo)
    trained = updater(algo, token_budget=30)
    rows = trained.with_scores(rows_of(groups, algo), algo, "trainer")
    rollouts = [r for group in groups for r in group.rollouts if r.advantage]
    for row, rollout in zip(rows, rollouts, strict=True):
        every = full_logprobs(trained.policy, rollout.token_ids)
        positions = [position for position, mask in enumerate(rollout.loss_mask) if mask]
        expected = [float(every[position - 1, rollout.token_ids[position]]) for position in positions]
        assert row.inputs["trainer_logprobs"] == pytest.approx(expected, abs=1e-12)
    found = trained.update(groups, algo, 0.0)
    assert found["policy/ratio_max"] == pytest.approx(1.0, abs=1e-12) and found["policy/clip_fraction"] == 0
    assert found["mismatch/logprob_abs_diff"] > 0.1 and 0 < found["mismatch/held_fraction"] < 1
    once = updater(algo).update(groups, algo.replace(updates=1), 0.0)  # needs no recomputed values
    assert once["policy/ratio_max"] == 1.0
    assert once["mismatch/weight"] == pytest.approx(found["mismatch/weight"], abs=1e-12)


GRPO = make_algorithm("grpo")


@pytest.mark.parametrize("name", ["reinforce", "dr_grpo", "dapo"])
def test_skipping_answers_with_advantage_0_does_not_change_the_gradient(name: str) -> None:
    """Against a brute-force sum over all tokens of all answers, with the weights of the whole batch."""
    algo = algorithm(name)
    groups = make_groups(tiny_decoder(), groups=5)
    algo.credit(groups)
    for rollout in groups[1].rollouts + groups[3].rollouts[:2]:
        rollout.advantage = 0.0
    rollouts = [r for group in groups for r in group.rollouts]
    rows = rows_of(groups, algo)
    assert 0 < len(rows) < len(rollouts)
    trained = updater(algo)
    trained._accumulate(rows, algo)
    model = tiny_decoder()
    weights = algo.token_weights(torch.tensor([r.length for r in rollouts]))
    total = torch.zeros((), dtype=torch.float64)
    for rollout, every, weight in zip(rollouts, each_alone(model, groups), weights, strict=True):
        for position in [position for position, bit in enumerate(rollout.loss_mask) if bit]:
            logprob = every[position - 1, rollout.token_ids[position]]
            if algo.settings.policy_loss == "reinforce":
                total = total - weight * rollout.advantage * logprob
                continue
            ratio = (logprob - rollout.engine_logprobs[position]).exp()
            clipped = ratio.clamp(1 - algo.settings.clip_low, 1 + algo.settings.clip_high)
            total = total - weight * torch.minimum(ratio * rollout.advantage, clipped * rollout.advantage)
    total.backward()
    assert (gradients_of(trained.policy) - gradients_of(model)).abs().max() < 1e-12


@pytest.mark.parametrize("changes", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_answers_with_advantage_0_are_kept_for_kl_and_entropy_terms(changes: dict[str, float]) -> None:
    algo = make_algorithm("grpo", **changes)
    groups = make_groups(tiny_decoder())
    algo.credit(groups)
    for group in groups:
        for rollout in group.rollouts:
            rollout.advantage = 0.0
    trained = updater(algo)
    before = weights_of(trained.policy)
    found = trained.update(groups, algo, 1e-2)
    assert found["optim/grad_norm"] > 0 and not found["optim/skipped"]
    assert not torch.equal(before, weights_of(trained.policy))


def test_a_custom_loss_gets_answers_with_advantage_0_too() -> None:
    def entropic(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float):
        return -(advantages + 0.5) * logprobs, {}

    algo = Algorithm(AlgoConfig(advantage="group_mean", policy_loss=entropic, aggregate="token"))
    groups = make_groups(tiny_decoder())
    for group in groups:
        for rollout in group.rollouts:
            rollout.advantage = 0.0
    assert len(rows_of(groups, algo)) == sum(len(group.rollouts) for group in groups)


def test_mini_batches_cover_every_group_exactly_once() -> None:
    """Brute force over batch and mini-batch sizes: order kept, none too large, sizes within one of each other."""
    for count in range(1, 26):
        groups = [Group(Prompt(str(number), ()), []) for number in range(count)]
        for size in range(1, count + 3):
            parts = mini_batches(groups, make_algorithm("grpo", minibatch_size=size).update_count(count))
            assert [group for part in parts for group in part] == groups
            sizes = [len(part) for part in parts]
            assert max(sizes) <= size and max(sizes) - min(sizes) <= 1 and len(parts) == math.ceil(count / size)
        for updates in range(1, count + 3):
            parts = mini_batches(groups, make_algorithm("grpo", updates=updates).update_count(count))
            assert [group for part in parts for group in part] == groups
            assert len(parts) == min(updates, count) and all(parts)


class Recorder(torch.optim.SGD):
    """Stores the gradient of every step and does not change the weights."""

    def __init__(self, policy: Decoder) -> None:
        super().__init__([{"params": list(policy.parameters()), "ratio": 1.0}], lr=0.0)
        self.policy, self.gradients = policy, list[Tensor]()

    def step(self, closure: Any = None) -> None:
        self.gradients.append(gradients_of(self.policy))


def test_each_mini_batch_has_the_gradient_of_a_plain_loss_over_its_groups() -> None:
    algo = make_algorithm("grpo", minibatch_size=2, kl_coef=0.3, entropy_coef=0.02)
    groups = make_groups(tiny_decoder(), groups=5)  # mini-batches of 1, 2 and 2 groups
    algo.credit(groups)
    trained = updater(algo, max_grad_norm=0.0)
    assert isinstance(trained.policy, Decoder)
    trained.optimizer = recorder = Recorder(trained.policy)
    trained.update(groups, algo, 1e-2, passes=2)
    assert len(recorder.gradients) == 6
    assert trained.reference is not None
    for found, part in zip(recorder.gradients, [groups[:1], groups[1:3], groups[3:]] * 2, strict=True):
        model = tiny_decoder()
        ref = [full_logprobs(trained.reference, r.token_ids) for group in part for r in group.rollouts]
        plain_loss(each_alone(model, part), part, ref, algo).backward()
        assert (found - gradients_of(model)).abs().max() < 1e-10


def test_a_batch_without_advantages_changes_neither_weights_nor_optimizer_state() -> None:
    algo = make_algorithm("grpo", updates=2)
    trained = updater(algo)
    before = weights_of(trained.policy)
    groups = make_groups(tiny_decoder())
    for batch in ([], groups):  # no groups, as all were dropped; or groups without advantages
        assert trained.update(batch, algo, 1e-2)["optim/skipped"] == 1.0
    assert torch.equal(before, weights_of(trained.policy)) and not trained.optimizer.state


@pytest.mark.parametrize(
    ("recipe", "reward", "optimizer"),
    [("grpo", 0.7, "adamw"), ("dr_grpo", 1 / 3, "muon"), ("reinforce_pp", 1 / 3, "adamw")],
)
def test_equal_rewards_make_no_step_in_spite_of_momentum(recipe: str, reward: float, optimizer: Any) -> None:
    """Without an entropy target such answers are skipped; with one they are computed, and have a gradient of 0."""
    for target in (None, 0.1):
        algo = make_algorithm(recipe, max_new_tokens=LIMIT, entropy_target=target)
        trained = updater(algo)
        cfg = OptimConfig(name=optimizer, lr=1e-2, matrix_lr=1e-2, weight_decay=0.1)
        trained.optimizer = make_optimizer(trained.policy, cfg)
        groups = credited(algo)
        assert trained.update(groups, algo, 1e-2)["optim/skipped"] == 0  # creates momentum
        before, moments = weights_of(trained.policy), copy.deepcopy(trained.optimizer.state_dict())
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.verdict.reward = reward
        algo.credit(groups)
        found = trained.update(groups, algo, 1e-2)
        assert found["optim/skipped"] == 1.0 and found["optim/non_finite"] == 0
        assert ("policy/entropy" in found) == (target is not None)
        assert torch.equal(before, weights_of(trained.policy))
        assert str(moments) == str(trained.optimizer.state_dict())


@pytest.mark.parametrize("token_budget", [4096, 1])
def test_advantages_that_cancel_make_no_step(token_budget: int) -> None:
    """Equal answers whose advantages add up to 0: only rounding errors remain, which depend on the micro-batches."""
    algo = make_algorithm("reinforce", max_new_tokens=LIMIT)
    policy = tiny_decoder().double()
    trained = Updater(policy, make_adamw(policy, 1e-2), token_budget=token_budget, dtype=torch.float64)
    (group, *_) = credited(algo)
    shares = (0.7, -0.6, -0.1)
    rollouts = [replace(group.rollouts[0], sample=index, advantage=share) for index, share in enumerate(shares)]
    before = weights_of(policy)
    found = trained.update([replace(group, rollouts=rollouts)], algo, 1e-2)
    assert found["optim/skipped"] == 1 and found["optim/grad_norm"] < 1e-12
    assert torch.equal(before, weights_of(policy)) and not trained.optimizer.state


def with_room(room: int, error: type[RuntimeError], token_budget: int) -> Updater:
    policy = cramped(room, error)
    return Updater(policy, make_adamw(policy, 1e-2), token_budget=token_budget)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_halves_the_token_budget_and_keeps_the_result(error: type[RuntimeError]) -> None:
    algo = GRPO
    groups = credited(algo)
    rows = rows_of(groups, algo)
    longest, total = max(len(row.ids) for row in rows), sum(len(row.ids) for row in rows)
    small = with_room(longest + 5, error, token_budget=4096)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sums, norm, skipped = small.step(rows, algo, 1e-2)
    said = [str(w.message) for w in caught]
    assert said and all("out of memory" in text and "token_budget" in text for text in said)
    assert f"= {max(total // 2, longest)}" in said[0]
    assert small.token_budget <= longest + 5 and not skipped
    large = with_room(10**9, error, token_budget=4096)
    expected, expected_norm, _ = large.step(rows, algo, 1e-2)
    assert norm == pytest.approx(expected_norm, abs=1e-12)
    assert float(sums.tokens) == float(expected.tokens)  # nothing before the failure is counted twice
    assert float(sums.losses["loss/total"]) == pytest.approx(float(expected.losses["loss/total"]), abs=1e-12)
    assert (weights_of(small.policy) - weights_of(large.policy)).abs().max() < 1e-12


def test_out_of_memory_ends_a_deterministic_run() -> None:
    rows = rows_of(credited(GRPO), GRPO)
    longest, total = max(len(row.ids) for row in rows), sum(len(row.ids) for row in rows)
    small = with_room(longest + 5, torch.OutOfMemoryError, token_budget=4096)
    before = weights_of(small.policy)
    wanted = rf"lower train.token_budget, now 4096, e.g. to {max(total // 2, longest)},"
    with deterministic(True, "cpu"), pytest.raises(UserError, match=wanted):
        small.step(rows, GRPO, 1e-2)
    assert small.token_budget == 4096 and before.equal(weights_of(small.policy))


def test_out_of_memory_in_scores_halves_the_token_budget() -> None:
    algo = GRPO
    rows = rows_of(credited(algo), algo)
    small = with_room(max(len(row.ids) for row in rows) + 5, torch.OutOfMemoryError, token_budget=4096)
    with pytest.warns(UserWarning, match="out of memory: continuing"):
        found = small.scores(rows, algo, "trainer")
    expected = with_room(10**9, RuntimeError, token_budget=4096).scores(rows, algo, "trainer")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_a_single_sequence_that_does_not_fit_is_an_error() -> None:
    algo = GRPO
    rows = rows_of(credited(algo), algo)
    longest = max(len(row.ids) for row in rows)
    small = with_room(longest - 1, torch.OutOfMemoryError, token_budget=4096)
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(UserError, match="single sequence"):
        small.step(rows, algo, 1e-2)


def test_other_runtime_errors_are_raised() -> None:
    algo = GRPO
    rows = rows_of(credited(algo), algo)
    broken = updater(algo)
    broken.policy.hidden = lambda *_: (_ for _ in ()).throw(RuntimeError("shapes do not fit"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        broken.step(rows, algo, 1e-2)
    assert broken.token_budget == Updater(broken.policy, broken.optimizer).token_budget


def test_a_gradient_that_is_not_finite_is_skipped_with_a_warning() -> None:
    algo = algorithm("reinforce")
    groups = credited(algo)
    trained = updater(algo)
    trained.update(groups, algo, 1e-2)
    before = weights_of(trained.policy)
    moments = [state["exp_avg"].clone() for state in trained.optimizer.state.values()]
    groups[0].rollouts[0].advantage = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        assert trained.update(groups, algo, 1e-2)["optim/skipped"] == 1.0
    assert torch.equal(before, weights_of(trained.policy))
    for was, state in zip(moments, trained.optimizer.state.values(), strict=True):
        assert torch.equal(was, state["exp_avg"])
    groups[0].rollouts[0].advantage = 1.0
    assert trained.update(groups, algo, 1e-2)["optim/skipped"] == 0.0  # the next update works
    assert weights_of(trained.policy).isfinite().all() and not torch.equal(before, weights_of(trained.policy))


def test_bfloat16_computes_in_half_precision_but_keeps_full_weights() -> None:
    algo = GRPO
    policy = tiny_decoder(dtype=torch.float32)
    trained = Updater(policy, make_adamw(policy, 1e-2), dtype=torch.bfloat16)
    groups = credited(algo)
    found = trained.update(groups, algo, 1e-2)
    exact = updater(algo).update(groups, algo, 1e-2)
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    assert found["loss/total"] != exact["loss/total"]
    assert found["loss/total"] == pytest.approx(exact["loss/total"], abs=0.05)


@pytest.mark.gpu
def test_an_offloaded_reference_gives_the_same_update() -> None:
    algo = algorithm("grpo with everything")
    found = []
    for offload in (False, True):
        policy, reference = tiny_decoder().float().cuda(), tiny_decoder(seed=9).float().requires_grad_(False)
        reference.to("cpu" if offload else "cuda")
        one = Updater(policy, make_adamw(policy, 1e-2), reference=reference, offload_reference=offload)
        found.append(one.update(credited(algo), algo, 1e-2))
        assert reference.device.type == ("cpu" if offload else "cuda")
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0]["loss/kl"] > 0
