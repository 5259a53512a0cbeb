"""Loss terms, built-in and from outside: policy losses, sequence ratios, covariance control, settings, mistakes."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.algos import Algorithm, LossTerm, TermOutput, TokenInput, terms
from assay.algos.component import LossBatch, metrics
from assay.algos.recipes import RECIPES, make_algorithm
from assay.config import AlgoConfig, NonNegative, Section
from assay.types import UserError


def test_replay_needs_an_importance_ratio_or_a_correction() -> None:
    def replays(recipe: str, **changes: Any) -> bool:
        try:
            make_algorithm(recipe, **{"critic": False, **changes}).check_replay()
        except UserError:
            return False
        return True

    found = {recipe for recipe in RECIPES if replays(recipe)}
    assert found == {"grpo", "ppo", "dr_grpo", "dapo", "reinforce_pp", "cispo", "bnpo"}
    assert not replays("grpo", recompute_logprobs=True)  # its ratio is relative to the current policy
    for recipe in RECIPES:  # the correction is the ratio to the policy that sampled
        assert replays(recipe, correction="token_truncate")
    # A user-defined loss receives the log-probabilities of the policy that sampled.
    assert replays("simple", policy_loss=lambda *given: (given[0], {}))
    with pytest.raises(UserError, match="cannot be combined with replay"):
        make_algorithm("ppo").check_replay()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda losses: losses, "losses and statistics"),
        (lambda losses: (losses, None), "losses and statistics"),
        (lambda losses: (losses, {"weight": losses.mean()}), "statistic 'weight'"),
        (lambda losses: (losses, {"weight": 0.5}), "statistic 'weight'"),
        (lambda losses: (losses.numpy(), {}), "returned ndarray: return a tensor"),
        (lambda losses: (losses.mean(), {}), r"shape \(\) for 3 tokens"),
        (lambda losses: losses[7], "the loss function failed: IndexError"),
    ],
)
def test_output_of_a_user_defined_loss_is_checked(given: Callable[[Tensor], object], message: str) -> None:
    """A mean instead of a statistic per token would be averaged twice."""
    three = torch.ones(3)
    algorithm = make_algorithm("simple", policy_loss=lambda *_: given(three))
    with pytest.raises(UserError, match=message):
        algorithm.loss(LossBatch(three, three, three, three))


def test_a_loss_without_gradient_is_reported() -> None:
    three = torch.ones(3)
    algorithm = make_algorithm("simple", policy_loss=lambda logprobs, *_: (-logprobs.detach(), {}))
    with pytest.raises(UserError, match="no gradient"):
        algorithm.loss(LossBatch(three.clone().requires_grad_(), three, three, three))
    algorithm.loss(LossBatch(three, three, three, three))  # metrics only, as under torch.no_grad()


def test_out_of_memory_in_a_user_defined_loss_is_passed_on() -> None:
    """The trainer repeats the update with smaller micro-batches."""

    def loss(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    three = torch.ones(3)
    with pytest.raises(torch.OutOfMemoryError):
        make_algorithm("simple", policy_loss=loss).loss(LossBatch(three, three, three, three))


def test_ppo_ratio_equals_the_token_importance_correction_within_the_clip_range() -> None:
    """Ratios start from the engine's log-probabilities: within the clip range, that is an importance weight."""
    torch.manual_seed(0)
    logprobs = torch.randn(40, dtype=torch.float64).sub(2).requires_grad_()
    engine = logprobs.detach() + 0.05 * torch.randn(40, dtype=torch.float64)  # well within 0.8 and 1.2
    advantages, weights = torch.randn(40, dtype=torch.float64), torch.full((40,), 1 / 40, dtype=torch.float64)
    ratio_loss = make_algorithm("grpo").loss(LossBatch(logprobs, engine, advantages, weights))
    corrected = make_algorithm("simple", correction="token_truncate").loss(
        LossBatch(logprobs, logprobs.detach(), advantages, weights, engine_logprobs=engine)
    )
    plain = make_algorithm("simple").loss(LossBatch(logprobs, engine, advantages, weights))
    found, expected, without = (torch.autograd.grad(out.total, logprobs)[0] for out in (ratio_loss, corrected, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, without, rtol=1e-3)


def test_dual_clip_applies_to_ppo_clip_and_is_logged() -> None:
    logprobs, nothing = torch.tensor([2.0, 2.0, 0.1]), torch.zeros(3)
    advantages, weights = torch.tensor([-1.0, 1.0, -1.0]), torch.ones(3)
    found = metrics(make_algorithm("grpo", dual_clip=3.0).loss(LossBatch(logprobs, nothing, advantages, weights)).sums)
    assert found["loss/policy"] == pytest.approx(3.0 - 1.2 + math.exp(0.1))
    assert found["policy/dual_clip_fraction"] == pytest.approx(1 / 3)
    assert "policy/dual_clip_fraction" not in metrics(
        make_algorithm("grpo").loss(LossBatch(logprobs, nothing, advantages, weights)).sums
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_adds_the_estimate_times_its_coefficient(estimator: str) -> None:
    logprobs, reference = [-1.0, -0.5, -3.0], [-1.5, -0.25, -1.0]
    differences = [a - b for a, b in zip(logprobs, reference, strict=True)]
    formulas = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
    expected = sum(map(formulas[estimator], differences)) / 3
    one = torch.ones(3, dtype=torch.float64)
    policy = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    batch = LossBatch(policy, policy.detach(), 0 * one, one / 3, ref_logprobs=torch.tensor(reference).double())
    algorithm = make_algorithm("simple", kl=estimator, kl_coef=0.3)
    out = algorithm.loss(batch)
    assert float(out.total.detach()) == pytest.approx(0.3 * expected, abs=1e-12)
    assert metrics(out.sums)["policy/kl"] == pytest.approx(expected, abs=1e-12)
    assert algorithm.needs.ref_logprobs_in_loss and algorithm.needs.every_rollout


def test_reference_kl_is_absent_without_a_coefficient() -> None:
    one = torch.ones(2)
    assert "loss/kl" not in make_algorithm("grpo").loss(LossBatch(-one, -one, one, one / 2)).sums.losses
    assert not make_algorithm("grpo").needs.reference and not make_algorithm("grpo").needs.every_rollout


def test_adaptive_entropy_coefficient_grows_below_the_target_and_is_not_applied_above() -> None:
    def bonus(coef: float) -> terms.EntropyBonus:
        return terms.EntropyBonus(terms.EntropyConfig(entropy_coef=coef, entropy_target=0.2, entropy_delta=0.005), None)

    def after(term: terms.EntropyBonus, entropy: float) -> tuple[float, float]:
        term.end_step(1, [], {"policy/entropy": entropy})
        return round(term.adapted, 6), round(term.applied, 6)

    term = bonus(0.0)
    seen = [after(term, entropy) for entropy in (0.5, 0.19, 0.2, 0.1, 0.3, 0.15)]
    assert seen == [(0, 0), (0.005, 0.005), (0.01, 0.01), (0.015, 0.015), (0.01, 0), (0.015, 0.015)]
    assert after(bonus(0.999), 0.0) == (1.0, 1.0)
    assert bonus(0.3).applied == 0.3  # nothing measured yet


def test_adaptive_entropy_coefficient_follows_the_target_and_is_restored_by_load_state_dict() -> None:
    algo = make_algorithm("grpo", entropy_target=0.2, entropy_coef=0.01, entropy_delta=0.005)
    found = []
    for step, entropy in enumerate((0.1, 0.1, 0.3, 0.1), 1):
        found.append(algo.end_step(step, [], {"policy/entropy": entropy})["policy/entropy_coef"])
        again = make_algorithm("grpo", entropy_target=0.2, entropy_coef=0.01, entropy_delta=0.005)
        again.load_state_dict(algo.state_dict())
        assert again.needs == algo.needs == pickle.loads(pickle.dumps(algo)).needs  # also in a separate process
        algo = again
    assert found == [0.01, 0.015, 0.02, 0.0]  # above the target the bonus is not applied
    assert algo.needs.entropy_gradient and not make_algorithm("grpo", entropy_target=0.2).needs.entropy_gradient
    assert make_algorithm("grpo", entropy_target=0.2).needs.every_rollout  # the controller follows their entropy
    assert make_algorithm("grpo").state_dict() == {} and make_algorithm("grpo").end_step(1, [], {}) == {}


def column(values: list[float], grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def ppo_value_and_slope(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Loss and d loss / d logprob, case by case: outside the range on the rewarding side, the gradient is gone."""
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


@settings(max_examples=30)
@given(
    tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8),  # (log-ratio, advantage)
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
)
def test_ppo_clip_value_gradient_and_statistics(tokens: list[tuple[float, float]], low: float, high: float) -> None:
    # the kink itself has no unique gradient
    tokens = [t for t in tokens if min(abs(math.exp(t[0]) - 1 + low), abs(math.exp(t[0]) - 1 - high)) > 1e-9]
    behaviour = column([-1.0] * len(tokens))
    logprobs = column([log_ratio - 1.0 for log_ratio, _ in tokens], grad=True)
    losses, stats = terms.ppo_clip(logprobs, behaviour, column([a for _, a in tokens]), low, high)
    losses.sum().backward()
    expected = [ppo_value_and_slope(math.exp(log_ratio), a, low, high) for log_ratio, a in tokens]
    assert losses.tolist() == pytest.approx([value for value, _ in expected], abs=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-12)
    clipped = [slope == 0.0 and a != 0 for (_, slope), (_, a) in zip(expected, tokens, strict=True)]
    assert stats["clip_fraction"].tolist() == clipped
    assert stats["clip_low_fraction"].tolist() == [c and a < 0 for c, (_, a) in zip(clipped, tokens, strict=True)]
    assert stats["clip_high_fraction"].tolist() == [c and a > 0 for c, (_, a) in zip(clipped, tokens, strict=True)]


@settings(max_examples=30)
@given(
    tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8),  # (log-ratio, advantage)
    limit=st.floats(1.1, 15),
)
def test_dual_clip_limits_the_ratio_of_negative_advantages(tokens: list[tuple[float, float]], limit: float) -> None:
    """max(min(q A, clip(q) A), limit A) where A < 0, and the gradient of whichever branch that is."""
    kinks = (0.8, 1.28, limit)
    tokens = [t for t in tokens if min(abs(math.exp(t[0]) - kink) for kink in kinks) > 1e-9]
    logprobs = column([log_ratio for log_ratio, _ in tokens], grad=True)
    advantages = column([a for _, a in tokens])
    losses, limited = terms.dual_clip(
        terms.ppo_clip(logprobs, column([0.0] * len(tokens)), advantages, 0.2, 0.28)[0], advantages, limit
    )
    losses.sum().backward()
    expected = []
    for log_ratio, a in tokens:
        if a < 0 and math.exp(log_ratio) > limit:
            expected.append((-limit * a, 0.0))
        else:
            expected.append(ppo_value_and_slope(math.exp(log_ratio), a, 0.2, 0.28))
    assert losses.tolist() == pytest.approx([value for value, _ in expected], abs=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-12)
    assert limited.tolist() == [a < 0 and math.exp(log_ratio) > limit for log_ratio, a in tokens]


@settings(max_examples=30)
@given(tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8), high=st.floats(0, 5))
def test_cispo_weights_by_the_clipped_ratio_and_keeps_all_gradients(
    tokens: list[tuple[float, float]], high: float
) -> None:
    logprobs = column([log_ratio - 1.0 for log_ratio, _ in tokens], grad=True)
    losses, stats = terms.cispo(logprobs, column([-1.0] * len(tokens)), column([a for _, a in tokens]), 0.5, high)
    losses.sum().backward()
    weights = [min(max(math.exp(log_ratio), 0.5), 1 + high) for log_ratio, _ in tokens]
    expected = [-w * a * (log_ratio - 1) for w, (log_ratio, a) in zip(weights, tokens, strict=True)]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    slopes = [-w * a for w, (_, a) in zip(weights, tokens, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-12)
    outside = [not 0.5 <= math.exp(log_ratio) <= 1 + high for log_ratio, _ in tokens]
    assert sum(stats["clip_fraction"].tolist()) == pytest.approx(sum(outside), abs=1)  # rounding at the very bounds


def test_on_policy_ppo_has_the_gradient_of_reinforce() -> None:
    advantages = column([0.7, -1.3, 0.0, 2.0])
    slopes = []
    for loss in (terms.reinforce, terms.ppo_clip, terms.cispo):
        logprobs = column([-0.1, -2.0, -3.0, -0.5], grad=True)
        loss(logprobs, logprobs.detach().clone(), advantages, 0.2, 0.2)[0].sum().backward()
        slopes.append(logprobs.grad)
    torch.testing.assert_close(slopes[0], -advantages)
    torch.testing.assert_close(slopes[0], slopes[1])
    torch.testing.assert_close(slopes[0], slopes[2])


def test_infinite_clip_bounds_give_the_unclipped_ratio() -> None:
    log_ratios, advantages = column([2.0, -2.0, 1.0]), column([1.0, -1.0, -1.0])
    losses, stats = terms.ppo_clip(log_ratios, column([0.0] * 3), advantages, math.inf, math.inf)
    torch.testing.assert_close(losses, -log_ratios.exp() * advantages)
    assert not stats["clip_fraction"].any()


@pytest.mark.parametrize("name", list(terms.LOSSES))
def test_extreme_log_ratios_stay_finite_in_float32(name: str) -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    losses, _ = terms.LOSSES[name](logprobs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, -1.0]), 0.2, 0.2)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all()


LENGTHS = [3, 1, 0, 5, 2]


def random_tokens(seed: int = 0, spread: float = 0.3) -> tuple[Tensor, Tensor, list[float]]:
    generator = torch.Generator().manual_seed(seed)
    behaviour = -2 + torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    logprobs = behaviour + spread * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).tolist()
    return logprobs.requires_grad_(), behaviour, advantages


def gspo_by_sequences(logprobs: Tensor, behaviour: Tensor, advantages: list[float], low: float, high: float) -> Tensor:
    """The paper's objective: each sequence has one ratio, which is differentiated as it stands."""
    terms, start = [], 0
    for length, advantage in zip(LENGTHS, advantages, strict=True):
        if length:
            at = slice(start, start + length)
            ratio = torch.exp((logprobs[at] - behaviour[at]).sum() / length)
            held = ratio.clamp(1 - low, 1 + high)
            terms.append(-torch.minimum(ratio * advantage, held * advantage))
        start += length
    return torch.stack(terms).mean()


@pytest.mark.parametrize("seed", [1, 3])
def test_gspo_equals_ppo_with_sequence_ratios(seed: int) -> None:
    logprobs, behaviour, advantages = random_tokens(seed)
    expected = gspo_by_sequences(logprobs, behaviour, advantages, 0.05, 0.1)
    (expected_slope,) = torch.autograd.grad(expected, logprobs)
    counts = torch.tensor(LENGTHS)
    weights = (1 / (4 * counts.clamp(min=1))).double().repeat_interleave(counts)
    each = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(counts)
    losses, stats = terms.ppo_clip(terms.sequence_logprobs(logprobs, behaviour, LENGTHS), behaviour, each, 0.05, 0.1)
    total = (weights * losses).sum()
    (slope,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(slope, expected_slope)
    clipped = stats["clip_fraction"]
    assert all(part.all() or not part.any() for part in clipped.split(LENGTHS))  # a sequence is clipped as one
    assert 0 < clipped.sum() < len(clipped)


def test_sequence_reductions_of_an_empty_batch() -> None:
    nothing = torch.zeros(0)
    assert terms.over_sequences(nothing, [], torch.mean).tolist() == []
    assert terms.over_sequences(nothing, [0, 0], torch.sum).tolist() == []
    with pytest.raises(AssertionError, match="whole"):
        terms.over_sequences(torch.ones(3), [2], torch.sum)


def tokens(count: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = random.Random(seed)
    values = [(-abs(draw.gauss(0, 2)), draw.gauss(0, 1)) for _ in range(count)]
    return torch.tensor([v[0] for v in values]).double(), torch.tensor([v[1] for v in values]).double()


def by_hand(logprobs: torch.Tensor, advantages: torch.Tensor) -> list[float]:
    one, other = logprobs.tolist(), advantages.tolist()
    mean, mean_advantage = sum(one) / len(one), sum(other) / len(other)
    return [(x - mean) * (a - mean_advantage) for x, a in zip(one, other, strict=True)]


def selected(
    cov: str, logprobs: torch.Tensor, advantages: torch.Tensor, fraction: float, low: float = 0.0, high: float = 1.0
) -> list[int]:
    """Positions of the selected tokens, which are divided into two sequences."""
    cfg = terms.CovarianceConfig(cov=cov, cov_fraction=fraction, cov_low=low, cov_high=high)
    halves = zip(logprobs.tensor_split(2), advantages.tensor_split(2), strict=True)
    rows = [SimpleNamespace(sampled_logprobs=x.tolist(), token_advantages=a.tolist()) for x, a in halves]
    marks = [mark for row in terms.CovarianceControl(cfg).select(rows) for mark in row]
    assert len(marks) == len(logprobs) and set(marks) <= {0.0, 1.0}
    return [position for position, mark in enumerate(marks) if mark]


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.03, 0.5, 1.0])
def test_kl_cov_selects_the_largest_covariances(fraction: float) -> None:
    logprobs, advantages = tokens()
    values = by_hand(logprobs, advantages)
    count = max(int(fraction * 200), 1)
    largest = sorted(range(200), key=lambda i: -values[i])[:count]
    assert selected("kl_cov", logprobs, advantages, fraction) == sorted(largest)


def test_clip_cov_samples_within_the_bounds() -> None:
    logprobs, advantages = tokens()
    values = by_hand(logprobs, advantages)
    within = {i for i, value in enumerate(values) if 0.5 <= value <= 2.0}
    chosen = selected("clip_cov", logprobs, advantages, 0.05, 0.5, 2.0)
    assert set(chosen) < within and len(chosen) == 10
    assert chosen != sorted(within)[:10]  # drawn, not the first ones
    assert selected("clip_cov", logprobs, advantages, 0.05, 0.5, 2.0) == chosen  # and the same when a run is resumed
    assert set(selected("clip_cov", logprobs, advantages, 1.0, 0.5, 2.0)) == within
    assert not selected("clip_cov", logprobs, advantages, 0.5, 1e6, 1e7)


@pytest.mark.parametrize("cov", ["kl_cov", "clip_cov"])
def test_covariance_selection_of_no_tokens_is_empty(cov: str) -> None:
    assert selected(cov, torch.zeros(0), torch.zeros(0), 0.1) == []


class DriftConfig(Section):
    coef: NonNegative = 0.5
    """weight of the term"""


class Drift(LossTerm[DriftConfig]):
    """Squared log-probability, of tokens that an input selects."""

    name, section = "drift", DriftConfig

    @property
    def coef(self) -> float:
        return self.settings.coef

    @property
    def inputs(self) -> list[TokenInput]:
        return [TokenInput("drifting", from_rows=lambda rows: [[1.0] * len(row.token_advantages) for row in rows])]

    def per_token(self, batch: LossBatch) -> TermOutput:
        values = batch.logprobs.square() * batch.inputs["drifting"]
        return TermOutput(values, {"drift/square": values}, {"drift/max": values})


class NotATerm: ...


def load(path: str) -> Any:
    """Objects of this module, by their name after the colon."""
    return globals()[path.partition(":")[2]]


def make(*terms: str, **args: dict[str, Any]) -> Algorithm:
    return make_algorithm("simple", terms=[f"here:{name}" for name in terms], term_args=args, load=load)


def loss_batch(**inputs: Tensor) -> LossBatch:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    ones = torch.ones(3)
    return LossBatch(logprobs, logprobs.detach(), ones, ones / 3, inputs=inputs)


def test_loss_term_by_path_is_added_with_its_settings_and_inputs() -> None:
    algo = make("Drift", Drift={"coef": 0.25})
    assert [term.name for term in algo.terms] == ["policy", "entropy", "drift"]
    assert [one.name for one in algo.inputs] == ["drifting"]
    out = algo.loss(loss_batch(drifting=torch.tensor([1.0, 0.0, 1.0])))
    found = metrics(out.sums)
    assert found["loss/drift"] == pytest.approx(0.25 * (1 + 9) / 3)
    assert found["loss/total"] == pytest.approx(found["loss/policy"] + found["loss/drift"])
    assert (found["drift/square"], found["drift/max"]) == (pytest.approx(10 / 3), 9.0)
    assert metrics(make("Drift").loss(loss_batch(drifting=torch.ones(3))).sums)["loss/drift"] == pytest.approx(7 / 3)


def test_pickled_algorithm_imports_loss_terms_by_path() -> None:
    algo = make("Drift", Drift={"coef": 0.25})
    again = pickle.loads(pickle.dumps(algo))
    assert again.settings == algo.settings and again.terms[-1].coef == 0.25


def test_loss_term_with_coefficient_zero_is_logged_without_gradient() -> None:
    batch = loss_batch(drifting=torch.ones(3))
    out = make("Drift", Drift={"coef": 0.0}).loss(batch)
    assert torch.autograd.grad(out.total, batch.logprobs)[0].tolist() == pytest.approx([-1 / 3] * 3)
    assert metrics(out.sums)["drift/square"] == pytest.approx(14 / 3) and metrics(out.sums)["loss/drift"] == 0


@pytest.mark.parametrize(
    ("terms", "args", "message"),
    [
        (["Drift"], {"Drift": {"coef": -1.0}}, "'algo.term_args.Drift.coef': Input should be greater than or equal"),
        (["Drift"], {"Drift": {"coeff": 1.0}}, "key 'coeff' in algo.term_args.Drift: did you mean 'coef'?"),
        ([], {"Drift": {"coef": 1.0}}, "algo.term_args.Drift: there is no such class in algo.terms"),
        (["NotATerm"], {}, "here:NotATerm is not a subclass of assay.algos.LossTerm"),
        (["Drift", "Drift"], {}, "distinct names: 'drift'"),
    ],
)
def test_invalid_loss_terms_are_reported(terms: list[str], args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        make(*terms, **args)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda values: values, "returned Tensor: return a TermOutput"),
        (lambda values: TermOutput(values.mean()), "shape () for 3 tokens"),
        (lambda values: TermOutput(values, {"x": values.mean()}), "statistic 'x'"),
    ],
)
def test_output_shapes_of_loss_terms_are_checked(given: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drift, "per_token", lambda self, batch: given(batch.logprobs))
    with pytest.raises(UserError) as error:
        make("Drift").loss(loss_batch())
    assert message in str(error.value)


def test_path_without_a_loader_is_rejected() -> None:
    with pytest.raises(UserError, match="cannot be loaded by path"):
        make_algorithm("grpo", policy_loss="mine.py:loss")


def test_each_built_in_term_is_registered_once_and_reads_settings_of_the_algorithm() -> None:
    built_in = {cls for cls in vars(terms).values() if isinstance(cls, type) and issubclass(cls, LossTerm)}
    assert {*terms.TERMS} == built_in - {LossTerm} and len({cls.name for cls in terms.TERMS}) == len(terms.TERMS)
    assert all(issubclass(AlgoConfig, cls.section) for cls in terms.TERMS)
