"""Causes: their order, and the consequences that are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from assay.checks.causes import CAUSES, CONSEQUENCES, NO_GAIN, Diagnosis, as_facts, now, ranked
from assay.config import TrainConfig
from assay.config.settings import keys


def cause(name: str, severity: str = "") -> Diagnosis:
    return Diagnosis(name, "evidence", "remedy", severity or CAUSES[name][0])  # type: ignore[arg-type]


def order(*names: str) -> list[str]:
    return [one.name for one in ranked(map(cause, names))]


def test_errors_come_first_then_warnings_then_notes_in_the_order_of_importance() -> None:
    assert order("unused_setting", "slow", "leakage", "memory_full", "tiny_updates") == [
        *("tiny_updates", "leakage", "memory_full", "slow", "unused_setting")
    ]


def test_consequences_of_a_reported_cause_are_left_out() -> None:
    assert order("always_clipped", "mismatch") == ["mismatch"]
    assert order("entropy_collapse", "learning_rate_high", "kl_blow_up") == ["learning_rate_high"]
    assert order("never_rewarded", "judge_fails") == ["judge_fails"]
    assert order("always_clipped", "memory_full") == ["always_clipped", "memory_full"]  # independent of each other
    for name in NO_GAIN:  # a run that cannot learn gains nothing
        assert order(name, "masked") == ["masked"] and order(name, "slow") == (
            [name, "slow"] if name == "few_useful_groups" else ["slow", name]
        )


def test_a_cause_is_reported_once() -> None:
    found = ranked([cause("judge_fails"), cause("judge_fails", "warning")])
    assert [one.severity for one in found] == ["error"]


def test_no_cause_hides_itself_and_all_names_exist() -> None:
    for name, hidden in CONSEQUENCES.items():
        assert name in CAUSES and name not in hidden and set(hidden) <= CAUSES.keys()
        assert not any(name in CONSEQUENCES.get(other, ()) for other in hidden), name  # two causes hide each other
    with pytest.raises(AssertionError):
        Diagnosis("too_easy", "", "", "error")


def test_facts_are_json() -> None:
    facts = as_facts([Diagnosis("no_answer", "what", "do", "error", ("one", "two"))])
    assert json.loads(json.dumps(facts)) == facts and facts["diagnosis"][0]["examples"] == ["one", "two"]
    assert as_facts([]) == {}


def test_settings_are_named_with_their_present_values() -> None:
    config = {"optim": {"lr": 1e-6, "warmup": 0}, "seed": 3}
    assert now(config, "optim.lr") == "optim.lr (now 1e-06)" and now(config, "optim.warmup") == "optim.warmup (now 0)"
    assert now(config, "seed") == "seed (now 3)" and now(config, "algo.kl_coef") == "algo.kl_coef"


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "doctor.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \| (.+) \| (.+) \|$", PAGE.partition("## Causes")[2], re.MULTILINE)


def test_the_documented_causes_are_those_of_the_program_in_the_same_order() -> None:
    assert [(name, tuple(severities.split(", "))) for name, severities, _, _ in ROWS] == list(CAUSES.items())


def test_the_documented_settings_exist() -> None:
    known = {key for key, _ in keys(TrainConfig)}
    named = {key for row in ROWS for key in re.findall(r"`([a-z]+\.[a-z_]+)`", row[3])}
    assert len(named) > 20 and named <= known | {"threads", "device"}


def test_the_documented_thresholds_are_those_of_the_program() -> None:
    from assay.checks import causes, diagnosis, steps
    from assay.checks.settings import REASONABLE

    texts = {name: evidence for name, _, evidence, _ in ROWS}
    for name, *limits in (
        ("judge_fails", steps.FAILING, steps.OFTEN_FAILING),
        ("truncated", steps.NEARLY_ALL, steps.CUT_OFF),
        ("stale_weights", steps.MATCHED, steps.MISMATCH),
        ("mismatch", steps.MISMATCH),
        ("always_clipped", steps.CLIPPED, steps.CLIPPED_SEQUENCES),
        ("few_useful_groups", steps.USELESS),
        ("entropy_collapse", steps.LOW_ENTROPY),
        ("memory_full", diagnosis.FULL),
        ("starving", diagnosis.STARVING, causes.LONG),
        ("not_significant", diagnosis.SIGNIFICANT),
        ("no_change", diagnosis.MIN_PROBLEMS),
        ("kl_blow_up", steps.SHORT),
    ):
        assert all(re.search(rf"(?<![\d.]){limit:g}(?!\d)", texts[name]) for limit in limits), name
    assert f"need {causes.MIN_STEPS} steps and {causes.MIN_ANSWERS} answers" in PAGE
    assert f"in the last {causes.LONG} steps" in PAGE and f"since the first {causes.FIRST} steps" in PAGE
    for low, high in REASONABLE.values():
        assert re.search(rf"{written(low)} to {written(high)}", PAGE)


def written(value: float) -> str:
    """1e-4 for 0.0001."""
    return re.sub(r"e-0?", "e-", f"{value:.0e}")
