"""From groups of rollouts to changed weights: packing, update, optimizers, parallelism, critic, reference, replay."""
