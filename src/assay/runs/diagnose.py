"""Why a run cannot learn: rules from logged metrics to causes, each with its evidence and the settings to change.

The rules read lines of metrics.jsonl, the settings and the summary, so they apply to a run in progress and to a run
folder. A rule has a symptom, which must hold in consecutive steps up to the last one, and an explanation.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from assay.runs.console import finite
from assay.runs.directory import Run
from assay.types import Status

Row = Mapping[str, Any]  # a line of metrics.jsonl
Severity = Literal["error", "warning", "note"]  # the run cannot learn; something harms it; worth knowing

MIN_STEPS, MIN_ANSWERS = 4, 64  # from the start of the run: evidence for a warning during the run
LONG = 20  # steps after which a symptom counts although it began later
FIRST, LAST = 4, 64  # steps that `remember` keeps
MIN_PROBLEMS = 20  # of an evaluation, for verdicts that all stay the same to count
NEARLY_ALL = 0.9
FAILING = 0.5  # fraction of failed verdicts
LOW_ENTROPY = 0.05  # nats per token
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Diagnosis:
    """A cause: its name, what was observed, what to change, and how bad it is."""

    name: str
    evidence: str
    remedy: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.evidence}: {self.remedy}"


@dataclass(frozen=True)
class Window:
    """The last steps of a run, in all of which a symptom holds, and what is needed to explain it."""

    rows: Sequence[Row]
    first: Sequence[Row]  # the first steps of the run
    config: Mapping[str, Any]

    @property
    def from_start(self) -> bool:
        return bool(self.rows) and self.rows[0]["step"] <= 1

    @property
    def answers(self) -> float:
        """Number of answers, if the window begins with the first step."""
        return finite(self.rows[-1], "sampling/answers") or 0.0

    @property
    def span(self) -> str:
        count = len(self.rows)
        if not self.from_start:
            return f"in the last {count} steps"
        return f"in all {count} steps" if count > 1 else "in step 1"

    def mean(self, name: str) -> float:
        return mean_of(self.rows, name)

    def now(self, key: str) -> str:
        """A setting and its value, as in "optim.lr (now 1e-06)"."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return key if value in (None, "") else f"{key} (now {value})"

    @property
    def has_env(self) -> bool:
        return self.now("env.name") != "env.name"

    @property
    def improved(self) -> bool:
        """Whether rewards are higher than in the first steps: then equal rewards are a sign of convergence."""
        return self.mean("reward/mean") > mean_of(self.first, "reward/mean") + 1e-6


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean of a metric; 0 where it is missing."""
    return sum(finite(row, name) or 0.0 for row in rows) / max(len(rows), 1)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def diagnose(
    rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None = None
) -> list[Diagnosis]:
    """Causes that keep the run from learning or harm it, most important first; empty if nothing is wrong.

    A cause that is only a consequence of another one in the list is left out.

    `rows`: lines of metrics.jsonl; of a long run, the first and the last steps are enough. `summary`: of a finished
    run, for which any number of steps is evidence. If its accuracy has increased significantly, the result is empty.
    """
    if summary is not None and has_gained(summary):
        return []
    steps = [row for row in rows if "reward/mean" in row]
    for symptom, explain in RULES:
        window = Window(trailing(steps, symptom), steps[:FIRST], config)
        if is_evidence(window, finished=summary is not None) and (cause := explain(window)):
            return [cause]
    cause = unchanged_accuracy(summary, config) if summary is not None else None
    return [cause] if cause else []


def diagnose_run(run: Run) -> list[Diagnosis]:
    """Diagnose a run folder, finished or not."""
    return diagnose(run.read_metrics(), tomllib.loads(run.config_toml), run.read_summary() or None)


def remember(rows: list[Row], row: Row) -> None:
    """Append a line of metrics, and drop lines that `diagnose` does not need."""
    if "reward/mean" in row:
        rows.append(row)
        del rows[FIRST:-LAST]


def as_facts(causes: Sequence[Diagnosis]) -> dict[str, list[dict[str, str]]]:
    """The entry of summary.json; none if there are no causes."""
    return {"diagnosis": [asdict(cause) for cause in causes]} if causes else {}


def trailing(steps: Sequence[Row], symptom: Callable[[Row], bool]) -> list[Row]:
    """The steps up to the last one in which the symptom holds without interruption."""
    found: list[Row] = []
    for row in reversed(steps):
        if not symptom(row):
            break
        found.append(row)
    return found[::-1]


def is_evidence(window: Window, finished: bool) -> bool:
    if not window.rows:
        return False
    enough = finished or (len(window.rows) >= MIN_STEPS and window.answers >= MIN_ANSWERS)
    return (window.from_start and enough) or len(window.rows) >= LONG


# Symptoms


def judge_fails(row: Row) -> bool:
    failed = [finite(row, f"status/{status}") or 0.0 for status in (Status.ERROR, Status.TIMEOUT)]
    return sum(failed) >= FAILING


def has_no_signal(row: Row) -> bool:
    """All answers got the same reward, or all answers to the same prompt did and have no advantage."""
    reward_range = finite(row, "reward/range")
    if reward_range == 0.0:
        return True
    without_advantage = finite(row, "advantage/zero")
    if without_advantage is None:  # a run of an earlier version
        without_advantage = 0.0 if finite(row, "optim/grad_norm") else 1.0
    return finite(row, "groups/zero_variance") == 1.0 == without_advantage


def leaves_weights_unchanged(row: Row) -> bool:
    """There is something to learn from, but no weight changed."""
    if has_no_signal(row):
        return False
    changed = finite(row, "weights/changed")
    return not finite(row, "optim/grad_norm") if changed is None else changed == 0.0


# Explanations


def explain_failing_judge(window: Window) -> Diagnosis:
    errors, timeouts = (window.mean(f"status/{status}") for status in (Status.ERROR, Status.TIMEOUT))
    who = "the environment or its judge" if window.has_env else "the judge"
    return Diagnosis(
        "judge_fails",
        f"{who} failed on {percent(errors)} and timed out on {percent(timeouts)} of the answers {window.span}",
        f"fix the cause given as 'detail' in the rollout files, or raise {window.now('reward.timeout_s')}",
    )


def explain_no_signal(window: Window) -> Diagnosis | None:
    """No answer is better than another one to the same prompt, so there is nothing to learn from."""
    if not window.from_start and window.improved:
        return None
    unreadable = window.mean("status/no_answer") + window.mean("status/unparsable")
    if window.mean("reward/correct") >= NEARLY_ALL:
        return explain_solved(window)
    if window.mean("length/truncated") >= NEARLY_ALL:
        return explain_truncation(window)
    if unreadable >= NEARLY_ALL:
        return Diagnosis(
            "no_answer",
            f"{percent(unreadable)} of the answers {window.span} have no final answer in the expected format (status "
            "no_answer or unparsable)",
            "ask for the format in the prompt (prompt.system, prompt.few_shot), accept another one "
            f"({window.now('reward.extract')}, reward.strict = false), or train it by a warm start (sft.steps)",
        )
    return explain_equal_rewards(window)


def explain_solved(window: Window) -> Diagnosis | None:
    if not window.from_start:
        return None
    return Diagnosis(
        "too_easy",
        f"{percent(window.mean('reward/correct'))} of the answers {window.span} were correct",
        "the model has nothing left to learn here; train on harder problems (task.name, task.path, task.args)",
        "warning",
    )


def explain_truncation(window: Window) -> Diagnosis:
    longest, limit = window.mean("length/max"), window.config.get("sampling", {}).get("max_new_tokens", 0)
    keys = [window.now("sampling.max_new_tokens")] if longest >= limit else [window.now("model.max_length")]
    keys += ["env.max_steps", "env.max_tokens"] if window.has_env else []
    return Diagnosis(
        "truncated",
        f"{percent(window.mean('length/truncated'))} of the answers {window.span} were cut off (at up to {longest:.0f} "
        "tokens), and no answer got a better reward than another one to the same prompt",
        f"raise {' or '.join(keys)}, ask for shorter answers in the prompt, or teach them by a warm start (sft.steps)",
    )


def explain_equal_rewards(window: Window) -> Diagnosis:
    statuses = Counter({status: window.mean(f"status/{status}") for status in Status})
    ((status, share),) = statuses.most_common(1)
    if window.mean("reward/range" if "reward/range" in window.rows[-1] else "reward/std") == 0:
        reward = window.mean("reward/mean")
        own = window.now("reward.function") != "reward.function"
        judge = "reward.function" if own else "reward.extract, reward.strict"
        return Diagnosis(
            "equal_rewards",
            f"every answer {window.span} got the reward {reward:g} (most frequent status: {status}, {percent(share)})",
            f"check in the rollout files that correct answers are accepted ({judge}); if they are, the problems are "
            "too hard: use easier ones (task.args), a better model (model.source) or a warm start (sft.steps)",
        )
    entropy = window.mean("sampling/entropy")
    identical = 0 < entropy < LOW_ENTROPY
    return Diagnosis(
        "equal_in_groups",
        f"all answers to the same prompt got the same reward {window.span}"
        + (f", because they are nearly identical (entropy {entropy:.3f} nats per token)" if identical else ""),
        f"raise {window.now('sampling.temperature')}"
        if identical
        else f"raise {window.now('train.samples')}, or use problems that the model solves sometimes (task.args)",
    )


def explain_unchanged_weights(window: Window) -> Diagnosis:
    """Answers differ in reward, but no update has changed the weights."""
    lr = window.now("optim.lr")
    if window.mean("turns/masked") == 1.0:
        return explain_masked(window)
    if window.mean("advantage/zero") == 1.0:
        return Diagnosis(
            "zero_advantages",
            f"all advantages were 0 {window.span}, although rewards differ",
            "check the advantage function (algo.advantage)",
        )
    if window.mean("optim/non_finite"):
        return Diagnosis(
            "not_finite",
            f"every update {window.span} was skipped, because the loss or the gradient was not finite",
            f"lower {lr}, set dtype = 'float32', and check your own rewards, advantages and losses",
        )
    if any("optim/grad_norm" in row for row in window.rows):
        if window.mean("optim/grad_norm"):
            return Diagnosis(
                "tiny_updates", f"the updates {window.span} were too small to change a weight", f"raise {lr}"
            )
        return Diagnosis(
            "zero_gradient",
            f"the gradient was 0 {window.span}, although rewards differ",
            "check that the loss (algo.policy_loss) depends on the log-probabilities, and that not all tokens are "
            "clipped (algo.clip_low, algo.clip_high)",
        )
    return explain_masked(window)


def explain_masked(window: Window) -> Diagnosis:
    """No answer is part of the loss."""
    if window.mean("turns/masked") == 1.0:
        what, remedy = "the environment masks every action", "do not set info['masked'] in all of its steps"
    elif window.mean("length/truncated") >= NEARLY_ALL:
        what = f"{percent(window.mean('length/truncated'))} were cut off, and algo.mask_overlong excludes these"
        remedy = f"raise {window.now('sampling.max_new_tokens')}, or set algo.mask_overlong = false"
    else:
        what, remedy = "filters exclude all of them", "check algo.mask_overlong and algo.drop_zero_variance"
    return Diagnosis("masked", f"no answer {window.span} was trained on: {what}", remedy)


RULES: list[tuple[Callable[[Row], bool], Callable[[Window], Diagnosis | None]]] = [
    (judge_fails, explain_failing_judge),
    (has_no_signal, explain_no_signal),
    (leaves_weights_unchanged, explain_unchanged_weights),
]


# The summary of a finished run


def has_gained(summary: Mapping[str, Any]) -> bool:
    """Whether the accuracy increased significantly."""
    before, after, paired = (summary.get(key) or {} for key in ("before", "after", "paired"))
    gain = after.get("accuracy", 0.0) - before.get("accuracy", 0.0)
    return gain > 0 and paired.get("p_value", 1.0) < SIGNIFICANT


def unchanged_accuracy(summary: Mapping[str, Any], config: Mapping[str, Any]) -> Diagnosis | None:
    """Not one problem was gained or lost, although there were updates."""
    before, after, paired = (summary.get(key) or {} for key in ("before", "after", "paired"))
    if not paired or paired["gained"] or paired["lost"] or after.get("accuracy") == 1.0:
        return None
    if after.get("n", 0) < MIN_PROBLEMS:
        return None
    window = Window([], [], config)
    steps = summary.get("steps")
    keys = ("optim.lr", "train.steps") if steps else ("sft.lr", "sft.steps")
    same_length = before.get("mean_length") == after.get("mean_length")
    return Diagnosis(
        "no_change",
        f"the verdict on all {after.get('n')} evaluated problems is the same as before the training"
        + (", and so is the length of the answers" if same_length else ""),
        f"raise {' or '.join(map(window.now, keys))}"
        + ("" if same_length or not steps else "; see whether reward/mean increases in curves.png"),
        "warning",
    )
