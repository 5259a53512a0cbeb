"""Environments: text in, text out, one step or many; and tools that a policy can use while it writes."""

from assay.envs.base import Env, Observation, Step, TaskEnv
from assay.envs.registry import ENVS, make_env

__all__ = ["ENVS", "Env", "Observation", "Step", "TaskEnv", "make_env"]
