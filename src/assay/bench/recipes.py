"""Recipes compared: what finished runs came to, one row each, and whether recipes differ.

Two things make a difference doubtful: the questions that were asked, and the seeds. The paired test is over questions,
with the seeds' answers to a question averaged; the interval is over seeds. A difference is what both agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from assay.evals.report import Report
from assay.evals.stats import paired_test
from assay.runs.directory import read_metrics
from assay.runs.files import read_json
from assay.runs.rollouts import read_lines
from assay.types import UserError

# 97.5 % quantiles of Student's t for 2, 3, ... seeds; for more than eleven the last one, which is a little too wide.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
LEVEL = 0.05
HIGHER, LOWER, UNCLEAR = "higher", "lower", "not significant"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    recipe: str
    seed: int
    summary: dict[str, Any]
    after: Report
    curve: list[dict[str, float]]  # of the periodic evaluations: answers sampled, seconds of training, accuracy

    @classmethod
    def read(cls, path: Path, recipe: str, seed: int) -> Outcome:
        summary = read_json(path / "summary.json")
        if not summary["paired"]:
            raise UserError(f"{path} has lost its evaluation before training: delete the run, and it is made again")
        lines = read_lines(path, summary["steps"], "eval", f"after-{summary['split']}")
        return cls(recipe, seed, summary, Report.read(lines), read_curve(path))

    def row(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "recipe": self.recipe,
            "seed": self.seed,
            "before": summary["before"]["accuracy"],
            "after": summary["after"]["accuracy"],
            "ci95": summary["after"]["ci95"],
            "n": summary["after"]["n"],
            "p_value": summary["paired"]["p_value"],
            "wall_s": summary["wall_s"],
            "train_s": summary["train_s"],
            "steps": summary["steps"],
            "samples": summary["answers"],
            "tokens": summary["tokens"],
            "curve": self.curve,
        }


def read_curve(path: Path) -> list[dict[str, float]]:
    found, seconds = [], 0.0
    for row in read_metrics(path):
        seconds += row.get("time/step", 0.0) - (row.get("time/eval", 0.0) if "time/step" in row else 0.0)
        if "eval/accuracy" in row:
            point = {"samples": row["sampling/answers"], "train_s": seconds, "accuracy": row["eval/accuracy"]}
            found.append({key: round(value, 6) for key, value in point.items()})
    return found


def by_recipe(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.recipe, []).append(outcome)
    return found


def over_seeds(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean by Student's t; None of a single one."""
    if len(values) < 2:
        return None
    half = T_975[min(len(values) - 2, len(T_975) - 1)] * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def compare_recipes(outcomes: Sequence[Outcome], against: str) -> list[dict[str, Any]]:
    """Every recipe beside `against`: the difference, its interval over seeds, and the test over questions."""
    groups = by_recipe(outcomes)
    base = {outcome.seed: outcome for outcome in groups.get(against, ())}
    found: list[dict[str, Any]] = []
    for recipe, members in groups.items():
        pairs = [(base[other.seed], other) for other in members if other.seed in base]
        if recipe == against or not pairs:
            continue
        differences = [other.after.accuracy - one.after.accuracy for one, other in pairs]
        was, now = (question_means([pair[side] for pair in pairs]) for side in (0, 1))
        found.append(
            {
                "recipe": recipe,
                "against": against,
                "seeds": len(pairs),
                "difference": fmean(differences),
                "ci95_seeds": over_seeds(differences),
                "p_value": paired_test(was, now, seed=0).p_value,
            }
        )
    for row, p_value in zip(found, holm([row["p_value"] for row in found]), strict=True):
        row["p_holm"] = p_value
        row["verdict"] = verdict(row["difference"], row["ci95_seeds"], p_value)
    return found


def question_means(outcomes: Sequence[Outcome]) -> np.ndarray:
    """Share of right answers to each question, over all seeds."""
    ids = outcomes[0].after.ids
    if any(outcome.after.ids != ids for outcome in outcomes):
        raise UserError("these runs were not measured on the same questions: begin the comparison in a new folder")
    return np.mean([outcome.after.correct.mean(axis=1) for outcome in outcomes], axis=0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted for their number (Holm 1979): the chance to call any difference that is none stays below the level."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min((len(p_values) - place) * p_values[index], 1.0))
        adjusted[index] = largest
    return adjusted


def verdict(difference: float, interval: Interval | None, p_value: float) -> str:
    if p_value >= LEVEL or (interval is not None and interval[0] <= 0 <= interval[1]):
        return UNCLEAR
    return HIGHER if difference > 0 else LOWER


def markdown(outcomes: Sequence[Outcome], comparisons: Sequence[dict[str, Any]], against: str) -> str:
    """The table, and in words what it does not show."""
    compared = {row["recipe"]: row for row in comparisons}
    names = ("recipe", "seeds", "before", "after", "95 % interval", "answers", "steps", "training, s", "in all, s")
    lines = [f"| {' | '.join(names)} | beside {against} |", "|---" * (len(names) + 1) + "|"]
    lines += [table_row(recipe, members, compared.get(recipe)) for recipe, members in by_recipe(outcomes).items()]
    return "\n".join([*lines, "", *remarks(outcomes, comparisons, against)]) + "\n"


def table_row(recipe: str, members: Sequence[Outcome], compared: dict[str, Any] | None) -> str:
    summaries = [member.summary for member in members]
    after = [summary["after"]["accuracy"] for summary in summaries]
    low, high = over_seeds(after) or tuple(summaries[0]["after"]["ci95"])
    cells = [
        recipe,
        str(len(members)),
        percent(fmean(summary["before"]["accuracy"] for summary in summaries)),
        percent(fmean(after)),
        f"{percent(max(low, 0.0))} to {percent(min(high, 1.0))}",
        f"{fmean(summary['answers'] for summary in summaries):,.0f}",
        f"{fmean(summary['steps'] for summary in summaries):.0f}",
        f"{fmean(summary['train_s'] for summary in summaries):.0f}",
        f"{fmean(summary['wall_s'] for summary in summaries):.0f}",
        "" if compared is None else beside(compared),
    ]
    return f"| {' | '.join(cells)} |"


def beside(compared: dict[str, Any]) -> str:
    """+2.1 points (-0.5 to 4.7), p = 0.21: not significant"""
    interval = compared["ci95_seeds"]
    shown = f" ({100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})" if interval else ""
    return f"{100 * compared['difference']:+.1f} points{shown}, p = {compared['p_holm']:.2g}: {compared['verdict']}"


def remarks(outcomes: Sequence[Outcome], comparisons: Sequence[dict[str, Any]], against: str) -> list[str]:
    seeds = min(len(members) for members in by_recipe(outcomes).values())
    unclear = [row["recipe"] for row in comparisons if row["verdict"] == UNCLEAR]
    clear = [f"{row['recipe']} is {row['verdict']}" for row in comparisons if row["verdict"] != UNCLEAR]
    found = []
    if unclear:
        found.append(f"Not shown to differ from {against}: {', '.join(unclear)}.")
    if clear:
        found.append(f"Beside {against}: {', '.join(clear)}.")
    questions = f"{outcomes[0].summary['after']['n']:,} questions"
    test = f"p: paired test over {questions}, adjusted for {len(comparisons)} comparisons (Holm)."
    if seeds > 1:
        found.append(
            f"Intervals: over {seeds} seeds, by Student's t. {test} A difference is called one only where p is below "
            f"{LEVEL} and the interval over seeds leaves out 0."
        )
    else:
        found.append(f"{test} One seed each: another seed may turn any of these differences around.")
    return found


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"
