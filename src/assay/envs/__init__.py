"""Environments: `reset` and `step` with text, and tools that a policy can use in its reply."""

from assay.envs.base import Env, Observation, Step, TaskEnv
from assay.envs.builtin import ENVS, make_env

__all__ = ["ENVS", "Env", "Observation", "Step", "TaskEnv", "make_env"]
