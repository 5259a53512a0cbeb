"""Verdicts and pass@k, in words."""

from __future__ import annotations

from collections.abc import Sequence

from assay.cli.chat_model import Reply
from assay.evals.stats import pass_at_k
from assay.types import Verdict

SHORT = 60  # characters of an answer or a gold answer that a verdict quotes


def verdict_line(verdict: Verdict, gold: str) -> str:
    """ok: parsed 18, gold 18, reward 1"""
    parsed = "nothing parsed" if verdict.parsed is None else f"parsed {brief(verdict.parsed)}"
    facts = [parsed, *([f"gold {brief(gold)}"] if gold else []), f"reward {verdict.reward:.4g}"]
    return f"{verdict.status}: {', '.join(facts)}" + (f" ({verdict.detail})" if verdict.detail else "")


def summary_line(replies: Sequence[Reply]) -> str:
    """Share of right answers, and the unbiased pass@k for every k."""
    verdicts = [reply.verdict for reply in replies if reply.verdict is not None]
    n, correct = len(verdicts), sum(verdict.correct for verdict in verdicts)
    if n < 2:
        return ""
    curve = ", ".join(f"pass@{k} {pass_at_k(n, correct, k):.3f}" for k in range(1, n + 1))
    reward = sum(verdict.reward for verdict in verdicts) / n
    return f"{correct} of {n} correct ({100 * correct / n:.1f} %), mean reward {reward:.4g}; {curve}"


def brief(text: str) -> str:
    line = " ".join(text.split()) or '""'
    return line if len(line) <= SHORT else line[: SHORT - 3] + "..."
