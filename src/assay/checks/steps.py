"""Rules on the metrics of training steps: runs that cannot learn, and runs that get worse.

A rule has a symptom, which must hold in consecutive steps up to the last one, and an explanation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median

from assay.checks.causes import (
    FIRST,
    LONG,
    MIN_ANSWERS,
    MIN_STEPS,
    Diagnosis,
    Row,
    RunHistory,
    Severity,
    Window,
    at_least,
    mean_of,
    percent,
    values,
)
from assay.runs.console import finite
from assay.runs.directory import setting
from assay.runs.metrics import non_finite_terms
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
    no_advantages = finite(row, "groups/zero_variance") == 1.0 == finite(row, "advantage/zero")
    return no_advantages or finite(row, "reward/range") == 0.0


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
        if not window.from_start:
            return None
        return Diagnosis(
            "too_easy",
            f"{percent(window.mean('reward/correct'))} of the answers {window.span} were correct",
            "the model has nothing left to learn here; train on harder problems (task.name, task.path, task.args)",
        )
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
    if window.mean("reward/range") == 0:
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


def truncated_evaluation(share: float, max_new_tokens: int) -> Diagnosis | None:
    """A cause if nearly all answers of an evaluation were cut off. `share`: of the answers."""
    if share < NEARLY_ALL:
        return None
    what = f"{percent(share)} of the answers were cut off (at up to {max_new_tokens} tokens)"
    remedy = (
        "raise sampling.max_new_tokens (eval.max_new_tokens in assay eval), or ask for shorter answers in the prompt"
    )
    return Diagnosis("truncated", what, remedy)


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
        if terms := non_finite_terms(window.rows[-1]):
            what = f"every update {window.span} was skipped, because {terms} was not finite"
            return Diagnosis("not_finite", what, "fix this term (algo.terms, algo.policy_loss)")
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
    """Fewer failures than `judge_fails` requires, but enough to train on wrong rewards."""
    window = Window(run.steps[-LONG:], run.first, run.config)
    enough = len(window.rows) >= LONG or (len(window.rows) >= MIN_STEPS and window.answers >= MIN_ANSWERS)
    if not enough or sum(map(failed_verdicts, window.rows)) / len(window.rows) < OFTEN_FAILING:
        return None
    return explain_failing_judge(window, "warning")


# Runs that get worse: a symptom in many steps, compared with the first steps of the run. Each rule is silent while the
# reward is higher than in the first steps: then the run learns, whatever else changes.

SHORT = 8  # steps after which a symptom counts that no healthy run has
MISMATCH = 0.02  # nats per token between engine and trainer; bfloat16 engines cause about 0.001, float32 1e-12
MATCHED = 0.002  # nats per token in the first step, which shows that engine and trainer can agree
KL_LIMIT = 1.0  # nats per token from the reference; runs that learn stay below 0.1
CLIPPED = 0.4  # fraction of tokens; runs that learn stay below 0.05
CLIPPED_SEQUENCES = 0.8  # with ratios of whole sequences, whose ranges are narrow: runs that learn reach 0.58
SHORTER = 0.25  # mean length relative to the first steps
DISTORTED = 3.0  # factor of the mean length that, with a fall of the reward, shows instability
MIN_LENGTH = 8.0  # tokens in the first steps: shorter answers have nothing to lose
CUT_OFF, SELDOM_CUT_OFF = 0.5, 0.25  # fractions of answers
USELESS = 0.9  # fraction of groups without advantages: 10 times more answers per update than necessary
BEST = 4  # steps with the highest reward, or half of them at the start, since a run may break in its first steps
DROP = 0.25  # of the range of rewards: a fall of the mean reward that is not a fluctuation
CERTAIN = 4.0  # standard errors
EXPLODED = 5.0  # factor of the gradient norm, or of the entropy


def stale_or_mismatched(run: RunHistory) -> Diagnosis | None:
    """Engine and trainer give the sampled tokens different probabilities, although they should have equal weights."""
    window = run.window(partial(is_mismatched, recomputes=recomputes_logprobs(run)), late=SHORT)
    if window is None:
        return None
    first, verified = run.steps[0], any({"weights/changed", "sync/probe_gap"} & row.keys() for row in run.steps)
    kl, difference = window.mean("mismatch/kl"), window.mean("mismatch/logprob_abs_diff")
    what = f"engine and trainer disagree on the sampled tokens {window.span} (mismatch/kl {kl:.3g} nats per token"
    start = finite(first, "mismatch/kl")
    if first["step"] <= 1 and start is not None and start < MATCHED and not verified:
        return Diagnosis(
            "stale_weights",
            f"{what}; {start:.2g} in step 1), so the engine does not get the new weights",
            f"set engine.verify = 'auto' ({window.now('engine.verify')}), and check how the engine updates its weights "
            f"({window.now('engine.name')})",
        )
    return Diagnosis(
        "mismatch",
        f"{what}, mean difference of log-probabilities {difference:.2g})",
        f"use the same precision in both ({window.now('engine.dtype')}, {window.now('dtype')}), another engine "
        f"({window.now('engine.name')}), or correct for it (algo.correction = 'token_truncate')",
    )


def recomputes_logprobs(run: RunHistory) -> bool:
    """Whether mismatch/* compares engine and trainer before the first update."""
    keys = ("algo.recompute_logprobs", "algo.correction")
    return any(setting(run.config, key) for key in keys) or setting(run.config, "algo.recipe") == "gspo"


def is_mismatched(row: Row, recomputes: bool) -> bool:
    """Whether engine and trainer disagree although they had the same weights."""
    first_update = finite(row, "optim/updates") == 1.0 or recomputes  # later ones have changed the trainer's weights
    stale = finite(row, "replay/share") or finite(row, "async/staleness")  # sampled by earlier weights
    return first_update and not stale and (finite(row, "mismatch/kl") or 0.0) >= MISMATCH


def learning_rate_high(run: RunHistory) -> Diagnosis | None:
    """The reward has fallen, and the update or the policy shows that the optimization is unstable."""
    if len(run.steps) < FIRST + SHORT:
        return None
    last = run.steps[-SHORT:]
    scale = max(values(run.steps, "reward/range"), default=0.0)
    if max(values(run.steps, "reward/mean"), default=0.0) - mean_of(last, "reward/mean") < DROP * scale or not scale:
        return None  # as in nearly all steps
    starts = range(0, len(run.steps) - SHORT - BEST + 1, BEST // 2)
    earlier = [*(run.steps[start : start + BEST] for start in starts), run.steps[: BEST // 2]]
    best = max(earlier, key=lambda rows: mean_of(rows, "reward/mean"))
    reward, peak = mean_of(last, "reward/mean"), mean_of(best, "reward/mean")
    prompts = setting(run.config, "train.prompts") or 1
    error = math.hypot(*(sampling_error(rows, prompts) for rows in (best, last)))
    window = Window(last, best, run.config)
    signs = instabilities(window)
    if peak - reward < max(DROP * scale, CERTAIN * error) or not signs:
        return None
    return Diagnosis(
        "learning_rate_high",
        f"the mean reward fell from {peak:.3g} (steps {best[0]['step']} to {best[-1]['step']}) to {reward:.3g} "
        f"{window.span}, while {' and '.join(signs[:3])}",
        f"lower {window.now('optim.lr')} by a factor of 3 to 10 and start again, or resume from a checkpoint before "
        "the fall; a KL term (algo.kl_coef) or fewer updates per batch (algo.updates, train.passes) also help",
    )


def sampling_error(rows: Sequence[Row], prompts: int) -> float:
    """Standard error of the mean reward. Answers to the same prompt are not independent: each prompt counts once."""
    squares = [value**2 for value in values(rows, "reward/std")]
    return math.sqrt(sum(squares) / max(len(squares), 1) / (len(rows) * prompts))


def instabilities(window: Window) -> list[str]:
    """Signs that updates have changed the policy too much, between `window.first` and the window."""
    signs: list[str] = []

    def compare(name: str, text: str, upper: float, lower: float = 0.0) -> None:
        before, after = values(window.first, name), values(window.rows, name)
        if before and after and median(before) > 0:
            old, new = median(before), median(after)
            if new >= upper * old or (lower and new <= lower * old):
                signs.append(f"{text} went from {old:.3g} to {new:.3g}")

    compare("optim/grad_norm", "the gradient norm", EXPLODED)
    compare("length/mean", "the mean length", DISTORTED, 1 / DISTORTED)
    compare("sampling/entropy", "the entropy", EXPLODED, COLLAPSED)
    names = ("status/no_answer", "status/unparsable")
    before, after = (sum(mean_of(rows, name) for name in names) for rows in (window.first, window.rows))
    if after >= before + DROP:
        signs.append(f"answers without a readable final answer went from {percent(before)} to {percent(after)}")
    cut_off = [mean_of(rows, "length/truncated") for rows in (window.first, window.rows)]
    if cut_off[1] >= cut_off[0] + CUT_OFF:
        signs.append(f"answers that were cut off went from {percent(cut_off[0])} to {percent(cut_off[1])}")
    for name, limit in (("policy/kl", KL_LIMIT), ("policy/clip_fraction", CLIPPED)):
        if window.mean(name) >= limit:
            signs.append(f"{name} is {window.mean(name):.2g}")
    return signs


def entropy_collapse(run: RunHistory) -> Diagnosis | None:
    start = mean_of(run.first, "sampling/entropy")

    def collapsed(row: Row) -> bool:
        value = finite(row, "sampling/entropy")
        return value is not None and value <= min(COLLAPSED * start, LOW_ENTROPY)

    window = run.trend(collapsed)
    if window is None or window.mean("reward/correct") >= NEARLY_ALL:
        return None
    return Diagnosis(
        "entropy_collapse",
        f"the entropy fell from {start:.2g} to {window.mean('sampling/entropy'):.2g} nats per token {window.span}, and "
        "the reward did not rise: answers to the same prompt are nearly identical",
        f"lower {window.now('optim.lr')}, set algo.entropy_coef or algo.kl_coef above 0, or use algo.clip_high = 0.28",
        "warning",
    )


def length_collapse(run: RunHistory) -> Diagnosis | None:
    start = mean_of(run.first, "length/mean")
    window = run.trend(lambda row: (finite(row, "length/mean") or start) <= SHORTER * start)
    if window is None or start < MIN_LENGTH:
        return None
    return Diagnosis(
        "length_collapse",
        f"the mean length fell from {start:.0f} to {window.mean('length/mean'):.1f} tokens {window.span}, and the "
        "reward did not rise",
        f"lower {window.now('optim.lr')}, check that short answers get no reward by chance "
        f"({window.now('reward.length')}), and use algo.aggregate = 'token' or 'constant', which does not "
        "favor short answers",
    )


def length_explosion(run: RunHistory) -> Diagnosis | None:
    start, cut_off = mean_of(run.first, "length/mean"), mean_of(run.first, "length/truncated")

    def exploded(row: Row) -> bool:
        return (finite(row, "length/mean") or 0.0) > start and (finite(row, "length/truncated") or 0.0) >= CUT_OFF

    window = run.trend(exploded)
    if window is None or cut_off > SELDOM_CUT_OFF or not start:
        return None
    return Diagnosis(
        "length_explosion",
        f"the mean length rose from {start:.0f} to {window.mean('length/mean'):.0f} tokens {window.span}, "
        f"{percent(window.mean('length/truncated'))} of the answers were cut off ({percent(cut_off)} in the first "
        "steps), and the reward did not rise",
        f"lower {window.now('optim.lr')}, penalize long answers (algo.soft_overlong_buffer = 0.2, reward.length), or "
        "use algo.aggregate = 'token', in which long wrong answers are not favored",
    )


def kl_blow_up(run: RunHistory) -> Diagnosis | None:
    window = run.trend(at_least("policy/kl", KL_LIMIT), SHORT)
    if window is None:
        return None
    return Diagnosis(
        "kl_blow_up",
        f"the policy is {window.mean('policy/kl'):.2g} nats per token away from the reference {window.span} "
        f"(policy/kl; {window.start('policy/kl'):.2g} in the first steps), and the reward did not rise",
        f"lower {window.now('optim.lr')}, or raise {window.now('algo.kl_coef')}",
    )


def always_clipped(run: RunHistory) -> Diagnosis | None:
    whole = setting(run.config, "algo.ratio") == "sequence" or setting(run.config, "algo.recipe") == "gspo"
    window = run.trend(at_least("policy/clip_fraction", CLIPPED_SEQUENCES if whole else CLIPPED))
    if window is None:
        return None
    return Diagnosis(
        "always_clipped",
        f"{percent(window.mean('policy/clip_fraction'))} of the tokens were clipped {window.span}, which leaves them "
        "without a gradient, and the reward did not rise",
        f"lower {window.now('optim.lr')}, make fewer updates per batch ({window.now('algo.updates')}, "
        f"{window.now('train.passes')}), or widen {window.now('algo.clip_low')} and {window.now('algo.clip_high')}",
    )


def truncated(run: RunHistory) -> Diagnosis | None:
    """Half of the answers are cut off before they give a final answer."""

    def cut_off(row: Row) -> bool:
        unreadable = (finite(row, "status/no_answer") or 0.0) + (finite(row, "status/unparsable") or 0.0)
        return min(finite(row, "length/truncated") or 0.0, unreadable) >= CUT_OFF

    window = run.trend(cut_off)
    if window is None:
        return None
    return Diagnosis(
        "truncated",
        f"{percent(window.mean('length/truncated'))} of the answers {window.span} were cut off, most of them before a "
        "final answer, and the reward did not rise",
        f"raise {window.now('sampling.max_new_tokens')} or {window.now('model.max_length')}, ask for shorter "
        "answers in the prompt, or teach them by a warm start (sft.steps)",
        "warning",
    )


def few_useful_groups(run: RunHistory) -> Diagnosis | None:
    def useless(row: Row) -> bool:
        names = ("groups/zero_variance", "advantage/zero")
        return min(finite(row, name) or 0.0 for name in names) >= USELESS

    window = run.trend(useless)
    if window is None or window.mean("reward/correct") >= NEARLY_ALL:
        return None
    solved = fmean(values(window.rows, "reward/correct") or [0.0])
    problems = "easier" if solved < 0.5 else "harder"
    return Diagnosis(
        "few_useful_groups",
        f"in {percent(window.mean('groups/zero_variance'))} of the groups {window.span}, all answers got the same "
        f"reward ({percent(solved)} were correct), and the reward did not rise: little is learned per step",
        f"use {problems} problems (task.args), raise {window.now('train.samples')}, or sample other prompts instead "
        "(algo.drop_zero_variance = true, algo.resample = 9, or algo.pass_rate_low and algo.pass_rate_high)",
    )
