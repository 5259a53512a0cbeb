"""How good a model is, with intervals: pass@k, paired tests, evaluation on tasks."""
