"""Processes on the nodes of a Slurm job: servers on engine nodes, and the ranks of a training run."""
