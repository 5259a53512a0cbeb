"""The typed settings of a run. The string below a field is its help; `assay train --help` prints them all."""

from assay.config.algorithm import AlgoConfig
from assay.config.sections import *  # noqa: F403
from assay.config.settings import Count, NonNegative, Positive, Section
