"""`assay slurm`: a training run as a batch job that saves before its time limit and resumes by itself."""

from assay.integrations.slurm.command import HELP, SETTINGS, add_arguments, run

__all__ = ["HELP", "SETTINGS", "add_arguments", "run"]
