"""The causes by name, what each of them hides, and the order in which they are reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from assay.types import Problem

Severity = Literal["error", "warning", "note"]  # the run cannot learn; something harms it; worth knowing
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

# All causes, the most important first, with the severities that they can have.
CAUSES: dict[str, tuple[Severity, ...]] = {
    "refused": ("error",),
    "zero_loss": ("error",),
    "judge_fails": ("error", "warning"),
    "not_finite": ("error",),
    "stale_weights": ("error",),
    "masked": ("error",),
    "zero_advantages": ("error",),
    "zero_gradient": ("error",),
    "tiny_updates": ("error",),
    "truncated": ("error", "warning"),
    "no_answer": ("error",),
    "never_rewarded": ("error",),
    "equal_rewards": ("error",),
    "equal_in_groups": ("error",),
    "leakage": ("error", "warning"),
    "repeated_ids": ("warning",),
    "learning_rate_high": ("warning",),
    "learning_rate_low": ("warning",),
    "mismatch": ("warning",),
    "entropy_collapse": ("error", "warning"),
    "length_collapse": ("warning",),
    "length_explosion": ("warning",),
    "kl_blow_up": ("warning",),
    "always_clipped": ("warning",),
    "few_useful_groups": ("warning",),
    "too_easy": ("warning",),
    "fell_from_best": ("warning",),
    "memory_full": ("warning",),
    "slow": ("warning",),
    "starving": ("warning",),
    "no_change": ("warning",),
    "not_significant": ("note",),
    "small_batch": ("note",),
    "risky_setting": ("note",),
    "unused_setting": ("note",),
}
NO_GAIN = ("no_change", "not_significant", "few_useful_groups")  # follow from everything that keeps a run from learning
UNSTABLE = ("kl_blow_up", "always_clipped", "entropy_collapse", "length_collapse", "length_explosion")
NO_SIGNAL = ("truncated", "no_answer", "never_rewarded", "equal_rewards", "equal_in_groups", "too_easy")
# Consequences of a cause, which are left out if the cause is reported. Every error also hides those of `NO_GAIN`.
CONSEQUENCES: dict[str, tuple[str, ...]] = {
    "zero_loss": (*NO_SIGNAL, "zero_advantages", "zero_gradient", "masked"),
    "judge_fails": NO_SIGNAL,
    "stale_weights": ("mismatch", "learning_rate_high", *UNSTABLE),
    "learning_rate_high": (*UNSTABLE, *NO_SIGNAL, *NO_GAIN),
    "mismatch": ("always_clipped", *NO_GAIN),
    "entropy_collapse": NO_GAIN,
    "length_collapse": NO_GAIN,
    "length_explosion": ("truncated", *NO_GAIN),
    "kl_blow_up": ("always_clipped", *NO_GAIN),
    "always_clipped": NO_GAIN,
    "truncated": NO_GAIN,
    "too_easy": NO_GAIN,
}


@dataclass(frozen=True)
class Diagnosis:
    """A cause: its name, what was observed, what to change, how bad it is, and answers that show it."""

    name: str
    evidence: str
    remedy: str
    severity: Severity = None  # type: ignore[assignment]  # by default, the first one of `CAUSES`
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.severity is None:
            object.__setattr__(self, "severity", CAUSES[self.name][0])
        assert self.severity in CAUSES[self.name], f"{self.name}: {self.severity}"

    def __str__(self) -> str:
        return str(Problem(self.evidence, self.remedy))


def ranked(causes: Iterable[Diagnosis]) -> list[Diagnosis]:
    """The most important first, each name once, without consequences of others."""
    by_name: dict[str, Diagnosis] = {}
    for cause in causes:
        by_name.setdefault(cause.name, cause)
    hidden = {name for cause in by_name.values() for name in CONSEQUENCES.get(cause.name, ())}
    if any(cause.severity == "error" for cause in by_name.values()):
        hidden |= set(NO_GAIN)
    names = list(CAUSES)
    shown = [cause for cause in by_name.values() if cause.name not in hidden]
    return sorted(shown, key=lambda cause: (SEVERITIES.index(cause.severity), names.index(cause.name)))


def as_facts(causes: Sequence[Diagnosis]) -> dict[str, list[dict[str, Any]]]:
    """The entry of summary.json; none if there are no causes."""
    return {"diagnosis": [asdict(cause) | {"examples": [*cause.examples]} for cause in causes]} if causes else {}


def setting(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if it is not set."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def now(config: Mapping[str, Any], key: str) -> str:
    """A setting and its value, as in "optim.lr (now 1e-06)"."""
    value = setting(config, key)
    return key if value in (None, "") else f"{key} (now {value})"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
