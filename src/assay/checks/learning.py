"""Rules for runs that cannot learn: the judge fails, no answer is better than another one, or no weight changes.

A rule has a symptom, which must hold in consecutive steps up to the last one, and an explanation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from assay.checks.causes import Diagnosis, Severity, percent, setting
from assay.checks.history import LONG, MIN_ANSWERS, MIN_STEPS, Row, RunHistory, Window
from assay.runs.console import finite
from assay.types import Status

NEARLY_ALL = 0.9  # of the answers have the same problem: it is the cause, and not one of several
FAILING = 0.5  # fraction of failed verdicts that leaves too little to learn from
OFTEN_FAILING = 0.05  # fraction of failed verdicts that changes results: wrong rewards for more than an odd answer
LOW_ENTROPY = 0.05  # nats per token: at 20 tokens, two answers to a prompt are equal more often than not
COLLAPSED = 0.1  # of the entropy of the first steps is left


# Symptoms


def failed_verdicts(row: Row) -> float:
    return sum(finite(row, f"status/{status}") or 0.0 for status in (Status.ERROR, Status.TIMEOUT))


def judge_fails(row: Row) -> bool:
    return failed_verdicts(row) >= FAILING


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


def explain_failing_judge(window: Window, severity: Severity = "error") -> Diagnosis:
    errors, timeouts = (window.mean(f"status/{status}") for status in (Status.ERROR, Status.TIMEOUT))
    who = "the environment or its judge" if window.has_env else "the judge"
    return Diagnosis(
        "judge_fails",
        f"{who} failed on {percent(errors)} and timed out on {percent(timeouts)} of the answers {window.span}",
        f"fix the cause given as 'detail' in the rollout files, or raise {window.now('reward.timeout_s')}",
        severity,
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
    )


def explain_truncation(window: Window) -> Diagnosis:
    longest, limit = window.mean("length/max"), setting(window.config, "sampling.max_new_tokens") or 0
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
        judge = "reward.function" if setting(window.config, "reward.function") else "reward.extract, reward.strict"
        what = "no answer got a reward above 0" if reward <= 0 else f"every answer got the reward {reward:g}"
        return Diagnosis(
            "never_rewarded" if reward <= 0 else "equal_rewards",
            f"{what} {window.span} (most frequent status: {status}, {percent(share)})",
            f"check in the rollout files that correct answers are accepted ({judge}); if they are, the problems are "
            "too hard: use easier ones (task.args), a better model (model.source) or a warm start (sft.steps)",
        )
    entropy, start = window.mean("sampling/entropy"), window.start("sampling/entropy")
    what = f"all answers to the same prompt got the same reward {window.span}"
    if not 0 < entropy < LOW_ENTROPY:
        remedy = f"raise {window.now('train.samples')}, or use problems that the model solves sometimes (task.args)"
        return Diagnosis("equal_in_groups", what, remedy)
    what += f", because they are nearly identical (entropy {entropy:.3f} nats per token)"
    if entropy < COLLAPSED * start:
        what += f"; it was {start:.2f} in the first steps"
        remedy = f"lower {window.now('optim.lr')}, or set algo.entropy_coef or algo.kl_coef above 0"
        return Diagnosis("entropy_collapse", what, remedy)
    return Diagnosis("equal_in_groups", what, f"raise {window.now('sampling.temperature')}")


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


def cannot_learn(run: RunHistory) -> Diagnosis | None:
    """The first of the rules above that applies."""
    for symptom, explain in RULES:
        if (window := run.window(symptom)) and (cause := explain(window)):
            return cause
    return None


def judge_often_fails(run: RunHistory) -> Diagnosis | None:
    """Fewer failures than those of `judge_fails`, but enough to train on wrong rewards."""
    window = Window(run.steps[-LONG:], run.first, run.config)
    enough = len(window.rows) >= LONG or (len(window.rows) >= MIN_STEPS and window.answers >= MIN_ANSWERS)
    if not enough or sum(map(failed_verdicts, window.rows)) / len(window.rows) < OFTEN_FAILING:
        return None
    return explain_failing_judge(window, "warning")
