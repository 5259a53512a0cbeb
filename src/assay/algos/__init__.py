"""Algorithms: filters, credit rules and loss terms that declare what they need, combined by recipes."""

from assay.algos.algorithm import Algorithm
from assay.algos.batch import LossBatch, Sums, metrics
from assay.algos.component import LengthLimits, LossTerm, Needs, RunFacts, Scorers, TermOutput, TokenInput
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
