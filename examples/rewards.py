"""Reward functions for examples/rewards.toml: TRL's signature, so that a function sees all answers to a prompt."""


def shorter(completions: list[str], **columns) -> list[float]:
    """From 1 for the shortest answer to a prompt to 0 for the longest."""
    lengths = [len(completion) for completion in completions]
    span = max(lengths) - min(lengths)
    return [(max(lengths) - length) / span if span else 1.0 for length in lengths]


def distinct(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 divided by the number of equal answers. Columns of the problem, such as `answer`, are lists too."""
    return [1.0 / completions.count(completion) for completion in completions]
