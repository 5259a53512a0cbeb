"""Algorithms as small pure functions: filters, credit and losses, bundled by recipes; the trainer asks for no name."""

from assay.algos.algorithm import Algorithm
from assay.algos.batch import LossBatch, LossOut
from assay.algos.recipes import RECIPES, make_algorithm
from assay.algos.sums import Sums, metrics

__all__ = ["RECIPES", "Algorithm", "LossBatch", "LossOut", "Sums", "make_algorithm", "metrics"]
