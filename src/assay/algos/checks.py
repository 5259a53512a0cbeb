"""Settings of an algorithm that cannot be meant, named before a run begins."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from assay.algos.advantages import ADVANTAGES, POOLED, UNSCALED
from assay.algos.aggregate import AGGREGATES
from assay.algos.entropy import MARKS
from assay.algos.importance import CORRECTIONS, RATIOS
from assay.algos.kl import KL
from assay.algos.losses import LOSSES
from assay.algos.reward_kl import PER
from assay.types import UserError

if TYPE_CHECKING:
    from assay.algos.algorithm import Algorithm

AT_LEAST_0 = (
    *(
        "clip_low",
        "clip_high",
        "dual_clip",
        "kl_coef",
        "reward_kl_coef",
        "correction_low",
        "correction_high",
        "cov_fraction",
    ),
    *("cov_coef", "soft_overlong_weight", "soft_overlong_buffer", "entropy_delta", "pass_rate_low", "pass_rate_high"),
)
ANY = ("entropy_coef", "entropy_target", "cov_low", "cov_high")  # a negative bonus is unusual, but some want it
WHOLE = (
    *(("updates", 1), ("minibatch_size", 0), ("resample", 0), ("pass_rate_retry", 0)),
    *(("max_new_tokens", 0), ("max_length", 0)),
)


def pick(kind: str, name: str, names: Iterable[str]) -> None:
    """A UserError with the nearest valid name, unless `name` is one of them."""
    valid = list(names)
    if name in valid:
        return
    nearest = difflib.get_close_matches(str(name).lower(), valid, n=3)
    nearest.sort(key=lambda one: sorted(one) != sorted(str(name)))  # swapped letters are the likeliest slip
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise UserError(f"unknown {kind} {name!r}: {hint}There are {', '.join(valid)}.")


def check(algorithm: Algorithm) -> None:
    check_names(algorithm)
    check_numbers(algorithm)
    check_together(algorithm)


def check_names(algorithm: Algorithm) -> None:
    tables: dict[str, Iterable[str]] = {
        "advantage": ADVANTAGES,
        "policy_loss": LOSSES,
        "aggregate": AGGREGATES,
        "ratio": RATIOS,
        "kl": KL,
        "reward_kl_per": PER,
        "correction": CORRECTIONS,
        "cov": MARKS,
    }
    for kind, named in tables.items():
        choice = getattr(algorithm, kind)
        if choice is not None and not callable(choice):
            pick(kind, choice, named)


def check_numbers(algorithm: Algorithm) -> None:
    for name in (*AT_LEAST_0, *ANY):
        value = getattr(algorithm, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise UserError(f"{name} = {value!r} must be a number.")
        if value < 0 and name in AT_LEAST_0:
            raise UserError(f"{name} = {value} must not be negative.")
    for name, least in WHOLE:
        value = getattr(algorithm, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} = {value!r} must be a whole number of at least {least}.")
    if algorithm.soft_overlong_buffer > 1:
        raise UserError(
            f"soft_overlong_buffer = {algorithm.soft_overlong_buffer} must be a fraction of max_new_tokens, "
            "from 0 to 1."
        )
    if 0 < algorithm.dual_clip <= 1:
        raise UserError(f"dual_clip = {algorithm.dual_clip} must be above 1, e.g. 3, or 0 for none.")
    if isinstance(algorithm.discount, bool) or not 0 <= algorithm.discount <= 1:
        raise UserError(f"discount = {algorithm.discount!r} must be between 0 and 1.")
    if algorithm.cov_fraction > 1:
        raise UserError(f"cov_fraction = {algorithm.cov_fraction} must be a fraction of all tokens, from 0 to 1.")
    for name in ("correction", "pass_rate", "cov"):
        low, high = getattr(algorithm, f"{name}_low"), getattr(algorithm, f"{name}_high")
        if low > high:
            raise UserError(f"{name}_low = {low} must not be above {name}_high = {high}.")


def check_together(algorithm: Algorithm) -> None:
    if algorithm.kl_coef > 0 and algorithm.kl is None:
        raise UserError(
            f'kl_coef = {algorithm.kl_coef} needs an estimator: set kl = "k3" or "k2" '
            "(or reward_kl_coef instead, for a KL in the reward)."
        )
    by_token = [name for name, function in ADVANTAGES.items() if function in (*POOLED, *UNSCALED)]
    if algorithm.kl_by_token and not algorithm.critic and algorithm.advantage not in by_token:
        raise UserError(
            f'reward_kl_per = "token" needs an advantage that suits single tokens: take {", ".join(by_token)}, '
            'or reward_kl_per = "sequence".'
        )
    check_probabilities(algorithm)
    if algorithm.kl_by_token and (algorithm.step_credit or algorithm.discount != 1):
        raise UserError(
            'reward_kl_per = "token" gives credit by whole answers: leave out step_credit and discount, '
            'or take reward_kl_per = "sequence".'
        )
    if algorithm.critic and (algorithm.step_credit or algorithm.discount != 1 or algorithm.greedy_baseline):
        raise UserError("a critic gives credit by itself: leave out step_credit, discount and greedy_baseline.")
    if algorithm.resample > 0 and not algorithm.drop_zero_variance:
        raise UserError(
            f"resample = {algorithm.resample} refills dropped groups: set resample = 0, or drop_zero_variance = true."
        )


def check_probabilities(algorithm: Algorithm) -> None:
    """beta_norm takes the mean reward of a group for the probability of success: refuse what is added to rewards."""
    if algorithm.advantage != "beta_norm" or algorithm.critic:
        return
    punished = algorithm.soft_overlong_buffer > 0 and algorithm.soft_overlong_weight > 0
    for added, instead in (
        (algorithm.kl_in_reward, "reward_kl_coef = 0, or kl_coef instead of it"),
        (punished, "soft_overlong_buffer = 0, or mask_overlong = true instead of it"),
        (algorithm.greedy_baseline, "greedy_baseline = false"),
    ):
        if added:
            raise UserError(f'advantage="beta_norm" takes rewards for probabilities: set {instead}.')
