"""Training: the loop, the run and its components, packing, the update, weight sync, checkpoints, warm starts."""
