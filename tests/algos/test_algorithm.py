"""The whole algorithm: recipes, filters, credit, and a loss that does not depend on how a batch is split."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from algos_parts import CORRECTIONS, make_group
from torch import Tensor

from assay.algos import LengthLimits
from assay.algos.algorithm import Algorithm, OverlongFilter, PassRateFilter
from assay.algos.component import AGGREGATES, LossBatch, Sums, metrics
from assay.algos.recipes import RECIPES, make_algorithm
from assay.config.algorithm import OverlongConfig, PassRateConfig
from assay.types import Group, Rollout, Status, UserError, Verdict

VOCAB, WIDTH = 7, 5


def all_rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


class Batch:
    """Random sequences for a linear softmax policy in float64, small enough to check by brute force."""

    def __init__(self, seed: int, lengths: tuple[int, ...] = (3, 1, 6, 0, 4, 2, 5, 0, 1)) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.lengths = lengths
        self.theta = normal(WIDTH, VOCAB)
        self.features = [normal(length, WIDTH) for length in lengths]
        self.tokens = [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
        self.behaviour = [-1.9 + 0.5 * normal(length) for length in lengths]
        self.reference = [-1.9 + 0.5 * normal(length) for length in lengths]
        self.engine = [b + 0.01 * normal(length) for b, length in zip(self.behaviour, lengths, strict=True)]
        self.advantages = normal(len(lengths))
        self.marked = [normal(length) > 0.5 for length in lengths]

    def loss_batch(self, theta: Tensor, members: list[int], weights: Tensor) -> LossBatch:
        def cat(parts: list[Tensor]) -> Tensor:
            return torch.cat([parts[i] for i in members]) if members else theta.new_zeros(0)

        repeats = torch.tensor([self.lengths[i] for i in members], dtype=torch.long)
        features = cat(self.features).reshape(-1, WIDTH)
        logprobs = (features @ theta).log_softmax(-1)
        tokens = cat(self.tokens).long()
        index = torch.tensor(members, dtype=torch.long)
        return LossBatch(
            logprobs=logprobs.gather(1, tokens[:, None])[:, 0],
            behaviour_logprobs=cat(self.behaviour),
            advantages=self.advantages[index].repeat_interleave(repeats),
            weights=weights[index].repeat_interleave(repeats),
            entropy=-(logprobs.exp() * logprobs).sum(-1),
            ref_logprobs=cat(self.reference),
            engine_logprobs=cat(self.engine),
            lengths=repeats.tolist(),
            inputs={"cov_mask": cat(self.marked).double()},
        )

    def run(self, algorithm: Algorithm, splits: list[list[int]]) -> tuple[float, Tensor, Sums]:
        """Accumulated loss, gradient and sums over micro-batches."""
        weights = algorithm.token_weights(torch.tensor(self.lengths))
        theta = self.theta.clone().requires_grad_()
        outs = []
        for members in splits:
            out = algorithm.loss(self.loss_batch(theta, members, weights))
            out.total.backward()
            outs.append(out)
        assert theta.grad is not None
        return (
            sum(float(out.total.detach()) for out in outs),
            theta.grad,
            sum((out.sums for out in outs[1:]), outs[0].sums),
        )


def random_splits(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    order = list(range(count))
    rng.shuffle(order)
    cuts = sorted(rng.sample(range(count + 1), rng.randint(1, count)))
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, count])]


def with_everything_on(recipe: str) -> Algorithm:
    return make_algorithm(recipe, kl="k3", kl_coef=0.3, entropy_coef=0.1, max_new_tokens=10)


MORE: dict[str, dict[str, Any]] = {
    **{name: {"correction": name, "correction_low": 0.97, "correction_high": 1.02} for name in CORRECTIONS},
    "kl_cov": {"cov": "kl_cov"},
    "clip_cov": {"cov": "clip_cov"},
    "cispo of sequences": {"policy_loss": "cispo", "ratio": "sequence"},
}


@pytest.mark.parametrize("recipe", [*RECIPES, *MORE])
@pytest.mark.parametrize("seed", range(2))
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(recipe: str, seed: int) -> None:
    batch = Batch(seed)
    algorithm = with_everything_on(recipe if recipe in RECIPES else "grpo").replace(**MORE.get(recipe, {}))
    whole, whole_gradient, whole_sums = batch.run(algorithm, [list(range(len(batch.lengths)))])
    for split_seed in range(4):
        splits = random_splits(len(batch.lengths), 100 * seed + split_seed)
        total, gradient, sums = batch.run(algorithm, splits)
        assert total == pytest.approx(whole, abs=1e-12)
        torch.testing.assert_close(gradient, whole_gradient, atol=1e-12, rtol=0)
        assert metrics(sums) == pytest.approx(metrics(whole_sums), abs=1e-12)


def grpo_terms(batch: Batch, i: int) -> list[tuple[float, float, float]]:
    """(log-probability, ratio, GRPO's loss) of each token of a sequence, in scalar Python."""
    terms = []
    for t in range(batch.lengths[i]):
        logits = (batch.features[i][t] @ batch.theta).tolist()
        logprob = logits[int(batch.tokens[i][t])] - math.log(sum(math.exp(x) for x in logits))
        ratio, advantage = math.exp(logprob - float(batch.behaviour[i][t])), float(batch.advantages[i])
        terms.append((logprob, ratio, -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)))
    return terms


def mean_over_sequences(losses: list[list[float]]) -> float:
    means = [sum(one) / len(one) for one in losses if one]
    return sum(means) / len(means)


def test_grpo_loss_equals_a_scalar_reference_implementation() -> None:
    """The paper's objective in scalar Python: mean over sequences of mean over tokens, clip and k3 term inside."""
    batch, losses, clipped = Batch(3), [], 0
    total, _, sums = batch.run(make_algorithm("grpo", kl_coef=0.04), [list(range(len(batch.lengths)))])
    for i, advantage in enumerate(batch.advantages.tolist()):
        terms = grpo_terms(batch, i)
        clipped += sum(loss > -ratio * advantage for _, ratio, loss in terms)
        log_ratios = [float(ref) - logprob for ref, (logprob, _, _) in zip(batch.reference[i], terms, strict=True)]
        kl = [math.exp(log_ratio) - log_ratio - 1 for log_ratio in log_ratios]
        losses.append([loss + 0.04 * k for k, (_, _, loss) in zip(kl, terms, strict=True)])
    assert total == pytest.approx(mean_over_sequences(losses), abs=1e-12)
    assert clipped > 0
    assert metrics(sums)["policy/clip_fraction"] == pytest.approx(clipped / sum(batch.lengths))


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_importance_corrections_equal_a_scalar_reference_implementation(mode: str) -> None:
    batch, bounds = Batch(3), {"correction_low": 0.98, "correction_high": 1.01}
    total, _, sums = batch.run(make_algorithm("grpo", correction=mode, **bounds), [list(range(len(batch.lengths)))])
    losses, held = [], 0
    for i, length in enumerate(batch.lengths):
        weights = [math.exp(float(b - e)) for b, e in zip(batch.behaviour[i], batch.engine[i], strict=True)]
        if mode.startswith("sequence"):
            weights = [math.prod(weights)] * length
        held += sum(not 0.98 <= w <= 1.01 for w in weights)
        outside = (lambda w: 0.0) if mode.endswith("mask") else (lambda w: min(max(w, 0.98), 1.01))
        weights = [w if 0.98 <= w <= 1.01 else outside(w) for w in weights]
        losses.append([w * loss for w, (_, _, loss) in zip(weights, grpo_terms(batch, i), strict=True)])
    assert total == pytest.approx(mean_over_sequences(losses), abs=1e-12)
    assert 0 < held < sum(batch.lengths)
    assert metrics(sums)["mismatch/held_fraction"] == pytest.approx(held / sum(batch.lengths))


@pytest.mark.parametrize("cov", ["kl_cov", "clip_cov"])
def test_covariance_control_equals_a_scalar_reference_implementation(cov: str) -> None:
    batch = Batch(5)
    total, _, sums = batch.run(make_algorithm("grpo", cov=cov, cov_coef=0.7), [list(range(len(batch.lengths)))])
    losses = []
    for i in range(len(batch.lengths)):
        marks = zip(grpo_terms(batch, i), batch.marked[i].tolist(), strict=True)
        if cov == "kl_cov":
            losses.append([loss + 0.7 * marked * (ratio - 1 - math.log(ratio)) for (_, ratio, loss), marked in marks])
        else:
            losses.append([0.0 if marked else loss for (_, _, loss), marked in marks])
    assert total == pytest.approx(mean_over_sequences(losses), abs=1e-12)
    marked = sum(int(one.sum()) for one in batch.marked)
    assert marked and metrics(sums)["policy/marked_fraction"] == pytest.approx(marked / sum(batch.lengths))


def test_remax_subtracts_the_reward_of_the_greedy_answer() -> None:
    remax = make_algorithm("remax", max_new_tokens=10, soft_overlong_buffer=0.5)
    groups = [make_group("a", [(1, 3), (0, 3)]), make_group("b", [(0.25, 1)])]
    remax.set_baselines(groups, [make_group("a", [(1, 3)]), make_group("b", [(1, 10)])])  # the latter is punished
    remax.credit(groups)
    assert [r.advantage for r in all_rollouts(groups)] == pytest.approx([0, -1, 0.25])
    assert [r.reward for r in all_rollouts(groups)] == [1, 0, 0.25]  # what is logged is not changed
    remax.check_samples(1)


def test_metrics_equal_values_computed_by_hand() -> None:
    algorithm = make_algorithm("dapo", kl="k1", kl_coef=0.5, entropy_coef=0.25)
    behaviour, engine = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -1.2, -1.9])
    batch = LossBatch(
        logprobs=torch.tensor([-1.0, -0.5, -2.0], requires_grad=True),
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        weights=torch.full((3,), 1 / 3),
        entropy=torch.tensor([0.3, 0.6, 0.9]),
        ref_logprobs=torch.tensor([-1.5, -1.5, -1.5]),
        engine_logprobs=engine,
    )
    out = algorithm.loss(batch)
    found = metrics(out.sums)
    assert found["loss/policy"] == pytest.approx((-1 - 1.28 + 1) / 3)
    assert found["policy/kl"] == pytest.approx((0.5 + 1.0 - 0.5) / 3)
    assert found["loss/kl"] == pytest.approx(0.5 / 3)
    assert found["policy/entropy"] == pytest.approx(0.6)
    assert found["loss/entropy"] == pytest.approx(-0.15)
    assert found["loss/total"] == pytest.approx(float(out.total.detach()))
    assert found["loss/total"] == pytest.approx(found["loss/policy"] + found["loss/kl"] + found["loss/entropy"])
    assert found["policy/clip_fraction"] == found["policy/clip_high_fraction"] == pytest.approx(1 / 3)
    assert found["policy/clip_low_fraction"] == 0
    assert found["policy/logprob"] == pytest.approx(float(batch.logprobs.detach().mean()))
    assert found["policy/ratio_mean"] == pytest.approx((2 + math.exp(0.5)) / 3)
    assert found["policy/ratio_max"] == pytest.approx(math.exp(0.5))
    assert found["mismatch/logprob_abs_diff"] == pytest.approx(0.1)
    assert found["mismatch/logprob_abs_diff_max"] == pytest.approx(0.2)
    expected_kl = sum(math.exp(d) - 1 - d for d in (behaviour - engine).tolist()) / 3
    assert found["mismatch/kl"] == pytest.approx(expected_kl, rel=1e-5)
    two_updates = metrics(out.sums + out.sums, updates=2)
    assert two_updates == pytest.approx(found)
    assert not any(value.requires_grad for value in (*out.sums.losses.values(), *out.sums.per_token.values()))


def test_mismatch_compares_policy_and_behaviour_without_engine_logprobs() -> None:
    zeros = torch.zeros(2)
    batch = LossBatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -2.3]), zeros, zeros)
    found = metrics(make_algorithm("simple").loss(batch).sums)
    assert found["mismatch/logprob_abs_diff"] == pytest.approx(0.2)
    assert "policy/kl" not in found
    assert "policy/entropy" not in found
    assert "policy/clip_fraction" not in found


def test_empty_micro_batch_adds_nothing_and_has_all_keys() -> None:
    batch, algorithm = Batch(0), with_everything_on("grpo")
    whole = list(range(len(batch.lengths)))
    _, _, sums = batch.run(algorithm, [[], whole])
    assert metrics(sums) == pytest.approx(metrics(batch.run(algorithm, [whole])[2]), abs=1e-15)
    total, gradient, _ = batch.run(algorithm, [[]])
    assert total == 0
    assert not gradient.any()


def test_an_own_filter_decides_which_groups_are_trained_on() -> None:
    groups = [make_group("a", [(0, 5), (1, 5)]), make_group("b", [(1, 5)] * 2), make_group("c", [(0, 5)] * 2)]
    algorithm = make_algorithm("grpo", filter=lambda group: max(group.rewards) > 0)
    assert [group.rewards for group in algorithm.keep(groups)[0]] == [[0.0, 1.0], [1.0, 1.0]]
    both = make_algorithm("grpo", filter=lambda group: max(group.rewards) > 0, drop_zero_variance=True, resample=2)
    assert [group.rewards for group in both.keep(groups)[0]] == [[0.0, 1.0]]
    with pytest.raises(UserError, match="the filter failed"):
        make_algorithm("grpo", filter=lambda group: 1 / 0).keep(groups)


def test_dapo_drops_zero_variance_groups_and_penalises_length() -> None:
    dapo = make_algorithm("dapo", max_new_tokens=10)
    groups = [make_group("mixed", [(1, 9), (0, 5)]), make_group("solved", [(1, 10), (1, 2)])]
    kept, dropped = dapo.keep(groups)
    assert [g.prompt.id for g in kept] == ["mixed"]
    assert [r.reward for r in dropped[0].rollouts] == [0, 1]  # 10 of 10 tokens: -1; dropped ones log their reward
    dapo.credit(kept)
    assert [r.reward for r in kept[0].rollouts] == [0.5, 0]  # the buffer is 2 tokens: 9 lies half way
    scale = 0.25 / (0.5 / 2**0.5 + 1e-4)
    assert [r.advantage for r in kept[0].rollouts] == pytest.approx([scale, -scale])
    dapo.credit(kept)
    assert [r.reward for r in kept[0].rollouts] == [0.5, 0]  # shaping starts from the verdict, never adds up


def test_masked_rollouts_stay_in_the_baseline() -> None:
    algorithm = make_algorithm("simple", mask_overlong=True)
    groups = [make_group("a", [(1, 3), (0, 10)])]
    assert make_algorithm("simple").keep(groups) == (groups, []) and not groups[0].rollouts[1].masked
    kept, dropped = algorithm.keep(groups)
    algorithm.credit(kept)
    assert dropped == []
    assert [(r.masked, r.advantage) for r in kept[0].rollouts] == [(False, 0.5), (True, -0.5)]


def test_user_defined_advantage_and_loss_are_used() -> None:
    def doubled(rewards: list[Tensor]) -> list[Tensor]:
        return [2 * rewards_G for rewards_G in rewards]

    def squared(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float):
        return logprobs.square(), {"square": logprobs.square()}

    algorithm = make_algorithm("simple", advantage=doubled, policy_loss=squared)
    assert algorithm.needs.every_rollout  # the loss may not vanish where the advantage is 0
    groups = [make_group("a", [(3, 1)])]
    algorithm.check_samples(1)
    algorithm.credit(groups)
    assert groups[0].rollouts[0].advantage == 6
    one = torch.ones(1)
    assert metrics(algorithm.loss(LossBatch(-3 * one, one, one, one)).sums)["policy/square"] == 9


def test_group_recipes_reject_one_sample_per_prompt() -> None:
    for recipe in RECIPES:
        make_algorithm(recipe).check_samples(2)
        if recipe in ("reinforce", "reinforce_pp", "remax", "ppo"):
            make_algorithm(recipe).check_samples(1)
        else:
            with pytest.raises(UserError, match=r"raise train\.samples"):
                make_algorithm(recipe).check_samples(1)


def test_rewards_must_be_finite() -> None:
    with pytest.raises(UserError, match=r"reward of a \(sample 1\) is nan"):
        make_algorithm("simple").credit([make_group("a", [(1, 2), (math.nan, 2)])])


def test_recipes_that_need_the_length_limit_ask_for_it() -> None:
    with pytest.raises(UserError, match="max_new_tokens"):
        make_algorithm("dr_grpo").token_weights(torch.tensor([1, 2]))
    with pytest.raises(UserError, match="max_new_tokens"):
        make_algorithm("dapo").credit([make_group("a", [(1, 2), (0, 2)])])


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_entropy_bonus_is_weighted_like_the_policy_loss_in_every_aggregation(aggregate: str) -> None:
    """The ratio of both gradients at a token depends on neither the lengths nor the limit."""
    algo = make_algorithm("dr_grpo", aggregate=aggregate, entropy_coef=0.01, max_new_tokens=1000)
    lengths = torch.tensor([2, 5, 1])
    weights = algo.token_weights(lengths).repeat_interleave(lengths)
    logprobs, entropy = (torch.full((8,), value, dtype=torch.float64, requires_grad=True) for value in (-1.0, 0.7))
    out = algo.loss(LossBatch(logprobs, logprobs.detach(), torch.full_like(weights, 2.0), weights, entropy=entropy))
    of_policy, of_entropy = torch.autograd.grad(out.total, (logprobs, entropy))
    torch.testing.assert_close(of_entropy / of_policy, torch.full_like(weights, 0.01 / 2.0))


def with_failures(group: Group, *samples: int) -> Group:
    """The judge failed on these samples."""
    for sample in samples:
        group.rollouts[sample].verdict = Verdict(0.0, Status.ERROR, detail="boom")
    return group


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_answers_that_were_not_judged_do_not_change_the_advantages_of_the_others(recipe: str) -> None:
    samples = [[(1.0, 2), (0.5, 3), (0.0, 1)], [(0.25, 2), (1.0, 2), (0.0, 4)]]
    algorithm = make_algorithm(recipe, max_new_tokens=100, drop_zero_variance=False, resample=0)
    if algorithm.settings.critic or algorithm.needs.ref_logprobs_in_credit:
        pytest.skip("needs scorers")
    expected = [make_group(str(index), own) for index, own in enumerate(samples)]
    more = [[own[0], (0.0, 3), *own[1:], (0.0, 2)] for own in samples]
    groups = [with_failures(make_group(str(index), own), 1, 4) for index, own in enumerate(more)]
    for batch in (expected, groups):
        if algorithm.needs.greedy_rollouts:
            algorithm.set_baselines(batch, [make_group("greedy", [(0.5, 1)]) for _ in batch])
        algorithm.keep(batch)
        algorithm.credit(batch)
    judged = [rollout for group in groups for rollout in group.judged]
    assert [rollout.advantage for rollout in judged] == [rollout.advantage for rollout in all_rollouts(expected)]
    assert any(rollout.advantage for rollout in judged)
    failed = [group.rollouts[index] for group in groups for index in (1, 4)]
    assert all(rollout.masked and not rollout.learns for rollout in failed)
    assert not any(rollout.masked for rollout in judged)


def test_groups_with_less_than_two_judged_answers_have_no_advantages() -> None:
    one = with_failures(make_group("one", [(1.0, 2), (0.0, 2)]), 1)
    none = with_failures(make_group("none", [(0.0, 2), (0.0, 2)]), 0, 1)
    whole = make_group("whole", [(1.0, 2), (0.0, 2)])
    make_algorithm("dr_grpo").credit(groups := [one, none, whole])
    assert [[rollout.advantage for rollout in group.rollouts] for group in groups] == [[0, 0], [0, 0], [0.5, -0.5]]
    kept, dropped = make_algorithm("dapo", max_new_tokens=100).keep(groups)
    assert (kept, dropped) == ([whole], [one, none])
    make_algorithm("dr_grpo", step_credit=True).credit([one, whole])
    assert [r.token_advantages for r in all_rollouts([one, whole])] == [[0, 0], [0, 0], [0.5, 0.5], [-0.5, -0.5]]
    make_algorithm("reinforce").credit([one, none])  # compares the batch, in which only one answer was judged
    assert [rollout.advantage for rollout in all_rollouts([one, none])] == [0, 0, 0, 0]


def test_a_group_without_greedy_baseline_is_not_trained_on() -> None:
    groups = [make_group(name, [(1.0, 2), (0.0, 2)]) for name in ("known", "unknown")]
    greedy = [make_group("known", [(0.25, 2)]), with_failures(make_group("unknown", [(0.0, 2)]), 0)]
    algorithm = make_algorithm("remax")
    algorithm.set_baselines(groups, greedy)
    algorithm.credit(groups)
    assert [rollout.masked for rollout in all_rollouts(groups)] == [False, False, True, True]
    assert [rollout.advantage for rollout in groups[0].rollouts] == [0.75, -0.25]
    make_algorithm("remax", advantage="batch_mean").credit(groups)  # over differences to known baselines only
    assert [rollout.advantage for rollout in all_rollouts(groups)] == [0.5, -0.5, 0.0, 0.0]


def soft_overlong(group: Group, buffer: float = 0.2, weight: float = 1.0, max_length: int = 0) -> None:
    settings = OverlongConfig(soft_overlong_buffer=buffer, soft_overlong_weight=weight)
    OverlongFilter(settings).shape_rewards([group], LengthLimits(max_new_tokens=100, max_length=max_length))


@pytest.mark.parametrize(
    ("max_length", "cases"),
    [
        (0, {0: 0, 80: 0, 81: -0.05, 90: -0.5, 100: -1, 120: -1}),
        (42, {0: 0, 32: 0, 36: -0.5, 40: -1}),  # two context tokens leave 40: the buffer is the last 8 of these
        (102, {80: 0, 90: -0.5}),
    ],
)
def test_soft_overlong_is_piecewise_linear_up_to_the_smaller_limit(max_length: int, cases: dict[int, float]) -> None:
    for (length, penalty), weight in itertools.product(cases.items(), (1.0, 0.3)):
        group = make_group("a", [(1.0, length)])
        soft_overlong(group, weight=weight, max_length=max_length)
        assert group.rewards == [pytest.approx(1.0 + weight * penalty)]


def test_soft_overlong_subtracts_the_context_of_every_turn() -> None:
    group = make_group("a", [(1.0, 9)])
    group.rollouts[0].turns.append(make_group("b", [(0.0, 9)]).rollouts[0].turns[0])
    soft_overlong(group, buffer=0.5, max_length=24)  # 2 + 9 + 2 + 9 of 24
    assert group.rewards == [pytest.approx(1.0 - 8 / 10)]


def test_running_pass_rates_average_old_and_new_results() -> None:
    easy, hard = make_group("easy", [(1, 3), (1, 3)]), make_group("hard", [(1, 3), (0, 3)])
    known = {"easy": [0.5, 3.0]}
    prompts = PassRateFilter(PassRateConfig(pass_rate_low=0.6))
    prompts.load_state_dict({"rates": known})
    assert prompts.end_step(7, [easy, hard], {}) == {"prompts/known": 2.0, "prompts/within_reach": 0.5}
    state = prompts.state_dict()
    assert state == {"rates": {"easy": [0.75, 7.0], "hard": [0.5, 7.0]}} and known == {"easy": [0.5, 3.0]}
    prompts.end_step(9, [easy, easy], {})
    assert prompts.state_dict() == {"rates": {"easy": [0.9375, 9.0], "hard": [0.5, 7.0]}}
    assert state["rates"]["easy"] == [0.75, 7.0]  # a saved state does not change


@pytest.mark.parametrize(("retry", "accepted"), [(0, {"new", "good"}), (5, {"new", "good", "easy"})])
def test_new_prompts_medium_pass_rates_and_due_retries_are_accepted(retry: int, accepted: set[str]) -> None:
    rates = {"easy": [0.95, 3.0], "hard": [0.0, 6.0], "good": [0.2, 1.0]}
    prompts = PassRateFilter(PassRateConfig(pass_rate_low=0.1, pass_rate_high=0.9, pass_rate_retry=retry))
    prompts.load_state_dict({"rates": rates})
    assert {prompt for prompt in (*rates, "new") if prompts.accepts(prompt, step=8)} == accepted


def test_pass_rates_ignore_answers_that_were_not_judged() -> None:
    filter = PassRateFilter(PassRateConfig(pass_rate_low=0.1))
    group = make_group("a", [(1.0, 2), (0.0, 2)])
    for rollout, status in zip(group.rollouts, (Status.OK, Status.ERROR), strict=True):
        rollout.verdict = Verdict(0.0, status)
    unknown = make_group("b", [(0.0, 2)])
    unknown.rollouts[0].verdict = Verdict(0.0, Status.ERROR)
    filter.end_step(1, [group, unknown], {})
    assert filter.rates == {"a": [1.0, 1.0]}


def test_recipe_names_and_defining_settings() -> None:
    new = {"ppo", "reinforce_pp", "remax", "gspo", "cispo", "gpg", "bnpo"}
    assert set(RECIPES) == {"reinforce", "grpo", "dr_grpo", "dapo", "rloo", "simple"} | new
    made = {name: make_algorithm(name) for name in RECIPES}
    recipes = {name: algo.settings for name, algo in made.items()}
    defining = {n: (a.advantage, a.policy_loss, a.aggregate, a.clip_low, a.clip_high) for n, a in recipes.items()}
    assert defining["grpo"] == ("group_norm", "ppo_clip", "sequence", 0.2, 0.2)
    assert defining["dr_grpo"] == ("group_mean", "ppo_clip", "constant", 0.2, 0.2)
    assert defining["dapo"] == ("group_norm", "ppo_clip", "token", 0.2, 0.28)
    assert defining["simple"][:3] == ("group_mean", "reinforce", "token")
    assert defining["rloo"][:3] == ("leave_one_out", "reinforce", "constant")
    assert defining["reinforce"][:3] == ("batch_mean", "reinforce", "token")
    assert defining["reinforce_pp"] == ("token_norm", "ppo_clip", "token", 0.2, 0.2)
    assert defining["ppo"] == ("none", "ppo_clip", "token", 0.2, 0.2)
    assert defining["remax"][:3] == ("none", "reinforce", "constant")
    assert defining["gspo"] == ("group_norm", "ppo_clip", "sequence", 3e-4, 4e-4)
    assert defining["cispo"] == ("group_norm", "cispo", "token", 1.0, 4.0)
    assert defining["gpg"][:3] == ("group_mean_rescaled", "reinforce", "token")
    assert defining["bnpo"] == ("beta_norm", "ppo_clip", "constant", 0.2, 0.28)
    assert {name: recipe.dual_clip for name, recipe in recipes.items() if recipe.dual_clip} == {"bnpo": 10.0}
    assert all(recipe.correction is None for recipe in recipes.values())
    gspo = made["gspo"]
    assert gspo.settings.ratio == "sequence" and gspo.needs.whole_sequences and gspo.needs.trainer_logprobs
    assert [name for name, recipe in recipes.items() if recipe.greedy_baseline] == ["remax"]
    assert [name for name, recipe in recipes.items() if recipe.critic] == ["ppo"]
    assert recipes["dapo"].drop_zero_variance
    assert all(not algo.needs.reference for algo in made.values())
    assert [name for name, algo in made.items() if algo.needs.values] == ["ppo"]


def test_overrides_do_not_change_the_recipe() -> None:
    changed = make_algorithm("grpo", kl_coef=0.04, max_new_tokens=64)
    assert (changed.settings.kl, changed.settings.kl_coef, changed.limits.max_new_tokens) == ("k3", 0.04, 64)
    assert changed.needs.reference
    assert make_algorithm("grpo").settings.kl_coef == 0.0
    assert changed.replace(kl_coef=0.0).settings == make_algorithm("grpo").settings


@pytest.mark.parametrize(
    ("recipe", "overrides", "named"),
    [
        ("gpro", {}, "did you mean 'grpo'"),
        ("zzz", {}, "known: reinforce, grpo"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"advantage": "group_nrom"}, "did you mean 'group_norm'"),
        ("grpo", {"policy_loss": "ppo"}, "policy_loss 'ppo'"),
        ("grpo", {"aggregate": "tokens"}, "did you mean 'token'"),
        ("grpo", {"clip_high": float("nan")}, "'clip_high'"),
        ("grpo", {"dual_clip": 0.9}, "dual_clip = 0.9"),
        ("dapo", {"drop_zero_variance": False}, "set algo.resample = 0, or algo.drop_zero_variance = true"),
        ("grpo", {"correction_low": 3.0}, "correction_low = 3.0"),
        ("grpo", {"pass_rate_low": 0.9, "pass_rate_high": 0.5}, "pass_rate_low = 0.9"),
        ("grpo", {"entropy_target": "much"}, "'entropy_target'"),
        ("simple", {"kl_coef": 0.1}, "kl_coef = 0.1"),
        ("reinforce_pp", {"kl_coef": 0.1}, "reward_kl_coef"),
        ("reinforce_pp", {"advantage": "batch_norm", "reward_kl_coef": 0.1}, "batch_mean, token_norm, none"),
        ("reinforce_pp", {"reward_kl_coef": 0.01, "step_credit": True}, "algo.step_credit or algo.discount"),
        ("reinforce_pp", {"reward_kl_coef": 0.01, "discount": 0.9}, "algo.step_credit or algo.discount"),
        ("ppo", {"step_credit": True}, "algo.step_credit, algo.discount or algo.greedy_baseline"),
        ("remax", {"critic": True}, "algo.step_credit, algo.discount or algo.greedy_baseline"),
        ("bnpo", {"reward_kl_coef": 0.1}, "reward_kl_coef"),
        ("bnpo", {"soft_overlong_buffer": 0.2}, "soft_overlong_buffer = 0"),
        ("bnpo", {"greedy_baseline": True}, "greedy_baseline = false"),
    ],
)
def test_invalid_settings_are_reported(recipe: str, overrides: dict, named: str) -> None:
    with pytest.raises(UserError) as error:
        make_algorithm(recipe, **overrides)
    assert named in str(error.value) and "\n" not in str(error.value)
