"""Prompts x engine x judge -> groups of rollouts. Training, evaluation and chat all come through here."""

from assay.rollout.collect import Collector, request_seed

__all__ = ["Collector", "request_seed"]
