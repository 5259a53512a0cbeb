"""Prompts x engine x judge -> groups of rollouts. Training, evaluation and chat all come through here."""

from assay.rollout.collect import Collector, sampling_params, with_stops
from assay.rollout.episodes import Limits, request_seed

__all__ = ["Collector", "Limits", "request_seed", "sampling_params", "with_stops"]
