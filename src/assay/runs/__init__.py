"""The run directory: metrics, rollouts, checkpoints, summary, and what reads them."""

from assay.runs.directory import Run
from assay.runs.rollouts import read_rollouts, write_rollouts

__all__ = ["Run", "read_rollouts", "write_rollouts"]
