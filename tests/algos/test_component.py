"""Loss terms from outside the package: settings, per-token inputs, and messages for mistakes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.algos import Algorithm, LossBatch, LossTerm, TermOutput, TokenInput, make_algorithm, metrics, terms
from assay.algos.terms import TERMS
from assay.config import AlgoConfig, NonNegative, Section
from assay.types import UserError


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
        (["Drift"], {"Drift": {"coeff": 1.0}}, "'algo.term_args.Drift.coeff': Extra inputs are not permitted"),
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
    assert {*TERMS} == built_in - {LossTerm} and len({cls.name for cls in TERMS}) == len(TERMS)
    assert all(issubclass(AlgoConfig, cls.section) for cls in TERMS)
