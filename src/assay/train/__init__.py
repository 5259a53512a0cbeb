"""Training: the loop and its stages, packing, the update, weight sync, checkpoints, warm starts."""
