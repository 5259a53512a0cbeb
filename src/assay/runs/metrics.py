"""The metrics of a run and what they mean: the one list of them, from which the reference is generated.

In a name, a part in capitals stands for several: `status/NAME` for `status/ok` and so on, N and K for numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

METRICS: dict[str, dict[str, str]] = {
    "Rewards and groups": {
        "reward/mean": "mean reward of all answers of the step, after shaping, including dropped groups",
        "reward/std": "standard deviation of these rewards",
        "reward/range": "highest minus lowest reward of all answers of the step, before shaping",
        "reward/correct": "fraction of answers with status `ok`",
        "reward/greedy": "with `algo.greedy_baseline`: mean reward of the greedy answers",
        "reward/kl": "with a KL term in the reward: mean over answers of log(policy / reference)",
        "parts/NAME": "mean of a part of the reward before weighting: `accuracy`, `format`, a reward function, ...",
        "task/LABEL/NAME": "with the task `mix`: `reward` and `correct` of one of its tasks",
        "status/NAME": "fraction of answers with this status",
        "advantage/zero": "fraction of answers whose advantages are all 0, including dropped groups",
        "groups/zero_variance": "fraction of sampled groups, including dropped ones, in which the judge gave all "
        "answers the same reward (with `algo.discount` or `algo.step_credit`: the same returns)",
        "groups/dropped": "number of groups that a filter removed",
        "prompts/too_long": "number of generated prompts replaced because of `train.max_prompt_tokens`; only if any",
        "prompts/known": "with a filter by pass rate: number of prompts with a known rate",
        "prompts/within_reach": "with a filter by pass rate: fraction of the known prompts within the bounds",
    },
    "Sampling": {
        "length/mean": "mean number of sampled tokens per answer",
        "length/max": "largest number of sampled tokens of an answer",
        "length/truncated": "fraction of answers that were cut off",
        "turns/mean": "actions per episode",
        "turns/masked": "fraction of actions that environments left out of the loss; only if there are any",
        "sampling/answers": "number of answers sampled so far, including those of dropped groups",
        "sampling/entropy": "nats per token over all answers, by the engine, at `sampling.temperature`, before "
        "truncation; only if the engine reports it",
        "sampling/logprob": "mean log-probability of the sampled tokens, by the engine, at `sampling.temperature`, "
        "before truncation",
        "sampling/kept_mass": "mean probability of the tokens that could be sampled: those that top-k, top-p, min-p "
        "and `sampling.min_new_tokens` keep; 1 without these settings; only if the engine reports it",
        "sampling/truncation_kl": "estimate in nats of the KL divergence that these settings cause: mean over tokens "
        "of `sampling_logprobs` minus `engine_logprobs`; omitted if 0",
    },
    "Training": {
        "loss/total": "loss, mean over the updates of the step",
        "loss/NAME": "a term of the loss: `policy`, `kl`, `entropy`, `value`, or your own",
        "policy/entropy": "nats per token of the trained tokens, by the trainer, at the sampling temperature",
        "policy/entropy_coef": "with `algo.entropy_target`: the current entropy coefficient",
        "policy/logprob": "mean log-probability of the trained tokens under the policy, by the trainer in each update",
        "policy/kl": "with a KL term in the loss: its mean per token",
        "policy/ratio_mean": "mean importance ratio",
        "policy/ratio_max": "largest importance ratio",
        "policy/clip_fraction": "with `ppo_clip` or `cispo`: fraction of clipped tokens",
        "policy/clip_low_fraction": "with `ppo_clip` or `cispo`: fraction of tokens clipped at the lower bound",
        "policy/clip_high_fraction": "with `ppo_clip` or `cispo`: fraction of tokens clipped at the upper bound",
        "policy/dual_clip_fraction": "with `algo.dual_clip`: fraction of tokens whose ratio was limited",
        "policy/marked_fraction": "with `algo.cov`: fraction of tokens that it restrains",
        "policy/NAME": "a statistic of your own policy loss",
        "mismatch/logprob_abs_diff": "mean absolute difference between the log-probabilities of engine and trainer; "
        "for answers sampled by earlier weights it includes the change of the policy",
        "mismatch/logprob_abs_diff_max": "the largest of these differences",
        "mismatch/kl": "estimate of the KL divergence between engine and trainer, nats per token",
        "mismatch/weight": "with `algo.correction`: mean weight",
        "mismatch/held_fraction": "with `algo.correction`: fraction of tokens that were truncated or masked",
        "optim/lr": "`optim.lr` after the schedule; rates of other kinds of weights keep their ratio to it",
        "optim/grad_norm": "gradient norm before clipping",
        "optim/updates": "number of updates, one per mini-batch and pass, including skipped ones",
        "optim/skipped": "number of updates skipped because the gradient was not finite or 0",
        "optim/non_finite": "number of updates skipped because loss or gradient was not finite",
    },
    "Weight sync and servers": {
        "weights/changed": "1 if the engine's weights differ from those of the previous step, else 0; only with "
        "fingerprints",
        "sync/probe_gap": "with `engine.verify = probe`: root mean square difference between the "
        "log-probabilities of engine and trainer on the probe tokens",
        "sync/probe_limit": "the gap at which the run stops",
        "sync/probe_change": "root mean square change of the trainer's log-probabilities of the probe since the start",
        "servers/serving": "with several servers: how many of them get requests",
        "servers/failures": "how often a server has failed since the start of the process",
        "servers/retries": "number of requests that were sent again since the start of the process",
    },
    "Critic and replay": {
        "critic/loss": "loss of a critic with a separate trunk (shared trunk: `loss/value`)",
        "critic/value_mean": "mean predicted value",
        "critic/explained_variance": "1: values predict the returns; 0: nothing; below 0: worse than a constant",
        "critic/skipped": "separate trunk: updates skipped because the gradient was not finite",
        "replay/size": "number of groups in the buffer",
        "replay/age": "their mean age in steps",
        "replay/share": "replayed fraction of the batch",
    },
    "Asynchronous training": {
        "async/staleness": "mean staleness of the groups of the step, in versions of the weights",
        "async/staleness_max": "largest staleness of a group",
        "async/staleness_N": "fraction of groups with staleness N",
        "async/queued": "groups that are finished and wait, after the batch was taken",
        "async/running": "groups that are being sampled, after the batch was taken",
        "async/engine_idle": "fraction of the time since the last batch in which nothing was sampled",
        "async/learner_idle": "fraction of the time since the last batch in which the learner waited for groups",
        "async/tokens_per_s": "sampled tokens of finished groups per second",
        "async/restarted": "answers that were sampled again",
        "async/restarted_qN": "the same by length, in quarters of `sampling.max_new_tokens`",
        "async/cancelled": "answers of groups that `source.cancel_stale` has dropped",
        "async/cancelled_qN": "the same by length, in quarters of `sampling.max_new_tokens`",
        "async/expired": "finished groups that were too stale and were sampled again",
    },
    "Evaluation": {
        "eval/accuracy": "accuracy of the periodic evaluation",
        "eval/low": "lower bound of its 95 % interval",
        "eval/high": "upper bound of its 95 % interval",
        "eval/length": "mean number of tokens",
        "eval/truncated": "fraction of answers that were cut off",
        "eval/format": "fraction of answers that could be parsed",
        "eval/pass@K": "with `eval.samples` above 1: unbiased estimate",
        "eval/majority@K": "the same for majority votes; only if the judge parses answers",
        "eval/accuracy/LABEL": "with the task `mix`: accuracy of one of its tasks",
        "start/NAME": "as `eval/NAME`: before a warm start, on the final split",
        "before/NAME": "as `eval/NAME`: before RL, on the final split",
        "after/NAME": "as `eval/NAME`: after training, on the final split",
    },
    "Warm start": {
        "sft/step": "step of the warm start; lines of a warm start have step 0",
        "sft/loss": "negative mean log-probability of the tokens of the solutions",
        "sft/grad_norm": "gradient norm before clipping",
        "sft/lr": "learning rate",
        "sft/skipped": "number of skipped updates",
    },
    "Time and memory": {
        "time/wall": "seconds since the start of the run, over all resumes",
        "time/step": "seconds of the step",
        "time/NAME": "seconds of a part of the step: `sample`, `generate`, `judge`, `train`, `sync`, `eval`",
        "time/tokens_per_s": "tokens that the engine sampled per second of `time/generate`",
        "memory/gpu": "fraction of the GPU's memory in use at the peak so far, with other processes; CUDA only",
        "memory/host": "fraction of main memory in use at the end of the step, of the machine or its container, "
        "without file cache; omitted where `/proc` does not exist",
    },
}

_PLACEHOLDER = re.compile(r"NAME|LABEL|N|K")


def meaning(metric: str) -> str | None:
    """What a metric means; None if it is not in the list."""
    listed = {name: text for part in METRICS.values() for name, text in part.items()}
    if metric in listed:
        return listed[metric]
    patterns = ((_PLACEHOLDER.sub(lambda m: r"\d+" if m[0] in "NK" else r".+", name), name) for name in listed)
    return next((listed[name] for pattern, name in patterns if re.fullmatch(pattern, metric)), None)


def non_finite_terms(metrics: Mapping[str, Any]) -> str:
    """Terms of the loss whose value is not finite although the log-probabilities are, with their values; empty if
    there are none: then the weights or the learning rate are the cause.
    """
    if not math.isfinite(metrics.get("policy/logprob") or 0.0):
        return ""
    losses = {key.removeprefix("loss/"): value for key, value in metrics.items() if key.startswith("loss/")}
    terms = {name: value for name, value in losses.items() if name != "total" and not math.isfinite(value or 0.0)}
    return " and ".join(f"the loss term '{name}' ({value:g})" for name, value in terms.items())
