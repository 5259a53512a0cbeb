"""Algorithms: filters, credit rules and loss terms that declare what they need, combined by recipes."""

from assay.algos.algorithm import Algorithm
from assay.algos.component import (
    LengthLimits,
    LossBatch,
    LossTerm,
    Needs,
    RunFacts,
    Scorers,
    Sums,
    TermOutput,
    TokenInput,
    metrics,
)
from assay.algos.recipes import RECIPES, complete_settings, make_algorithm

__all__ = [
    "RECIPES",
    "Algorithm",
    "LengthLimits",
    "LossBatch",
    "LossTerm",
    "Needs",
    "RunFacts",
    "Scorers",
    "Sums",
    "TermOutput",
    "TokenInput",
    "complete_settings",
    "make_algorithm",
    "metrics",
]
