"""Prompts or environments x engine x judge -> groups of rollouts, for training and evaluation."""

from assay.rollout.collect import Collector, sampling_params, with_stops
from assay.rollout.episodes import Limits, request_seed

__all__ = ["Collector", "Limits", "request_seed", "sampling_params", "with_stops"]
