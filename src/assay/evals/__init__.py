"""Evaluation of models on tasks: accuracy, pass@k, confidence intervals and paired tests."""
