"""Check a run without training.

`diagnose_config` (`assay doctor`) takes seconds and loads no weights: settings, splits, judge, and a rough estimate of
memory. `dry_run` (`assay train --dry-run`) builds the run and tries its parts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from assay.algos import Algorithm
from assay.build.cost import (
    LONG_S,
    Prediction,
    Speeds,
    Work,
    fewer_prompts,
    kv_bytes,
    memory_by_purpose,
    model_memory,
    predict,
    quantized_bytes,
    update_bytes,
)
from assay.build.models import model_source
from assay.build.preflight import model_spec
from assay.build.problems import READ, build_algorithm, build_problems, take
from assay.build.run import assemble, evaluation_prompts, has_rl_steps
from assay.build.speeds import measure, with_trial_rewards
from assay.checks import Diagnosis
from assay.checks.causes import now, ranked
from assay.checks.settings import check_judge, check_settings, data_problems, settings_problems
from assay.config import TrainConfig
from assay.engine.base import SamplingParams
from assay.envs.base import Env, safe_step
from assay.mesh import Mesh
from assay.models.device import free_memory, pick_device, pick_dtype
from assay.models.spec import ModelSpec
from assay.rollout import Collector
from assay.runs.console import Console, count, duration
from assay.runs.directory import check_writable
from assay.system.awaiting import resolve
from assay.tasks import Task
from assay.tasks.base import UNLIMITED
from assay.tasks.registry import build_judge_pool
from assay.training.learner.learner import Learner, load_reference, solution_rows
from assay.training.parallel import start_mesh
from assay.types import Prompt, Status, UserError, describe_user_error, plural

T = TypeVar("T")
GIB, MIB = 2**30, 2**20
TYPICAL_PROMPT = 256  # tokens; prompts are not tokenized by `diagnose_config`
PROMPTS, SAMPLES, NEW_TOKENS = 2, 4, 8  # of the trial update, at most


def diagnose_config(cfg: TrainConfig) -> list[Diagnosis]:
    """Causes that the settings, the task and the size of the model show, most important first."""
    found: list[Diagnosis] = []
    attempt(found, lambda: check_settings(cfg))
    algo = attempt(found, lambda: build_algorithm(cfg), "zero_loss" if cfg.train.samples == 1 else "refused")
    spec = attempt(found, lambda: model_spec(cfg))
    task = attempt(found, lambda: build_problems(cfg.task, cfg.env))
    found += settings_problems(cfg, algo, task, spec.parameters if spec else None)
    if spec is not None and (cause := estimate_memory(cfg, spec, algo)):
        found.append(cause)
    if task is not None:
        attempt(found, lambda: check_task(cfg, task, found))
    return ranked(merged(found))


def attempt(found: list[Diagnosis], make: Callable[[], T], name: str = "refused") -> T | None:
    """The result of `make`. What a run would refuse becomes a cause, and the result is None."""
    try:
        return make()
    except UserError as error:
        found.append(Diagnosis(name, error.problem.what, error.problem.remedy))
        return None


def merged(causes: list[Diagnosis]) -> Iterator[Diagnosis]:
    """Causes of the same name as one, since each name is reported once."""
    by_name: dict[str, list[Diagnosis]] = {}
    for cause in causes:
        by_name.setdefault(cause.name, []).append(cause)
    for first, *others in by_name.values():
        if not others:
            yield first
            continue
        more = "".join(f"; {other.evidence}" for other in others)
        remedies = list(dict.fromkeys(filter(None, (cause.remedy for cause in (first, *others)))))
        yield Diagnosis(first.name, first.evidence + more, "; ".join(remedies), first.severity)


def check_task(cfg: TrainConfig, task: Task, found: list[Diagnosis]) -> None:
    """Check the judge on one problem, and the splits."""
    train = take(task.prompts("train"), cfg.train.max_train_prompts, "train", endless=True)
    with build_judge_pool(cfg.reward, task, cfg.judge) as judge:
        attempt(found, lambda: check_judge(judge, train[0]), "judge_fails")
    found += data_problems(cfg, train, evaluation_prompts(cfg, task), note=lambda text: None)


def estimate_memory(cfg: TrainConfig, spec: ModelSpec, algo: Algorithm | None) -> Diagnosis | None:
    """Compare what weights, optimizer, engine and references need with the free memory. Activations are not counted:
    micro-batches adapt to the memory that is left.
    """
    device = pick_device(cfg.device)
    free = free_memory(device)
    if free is None:
        return None
    dtype, engine_dtype = pick_dtype(cfg.dtype, device), pick_dtype(cfg.engine.dtype, device)
    count = spec.parameters
    in_16_bits = dtype == torch.bfloat16 and (cfg.lora.rank or cfg.optim.precision != "float32")
    weight_bytes = quantized_bytes(spec, dtype) if cfg.lora.quantize else (2.0 if in_16_bits else 4.0) * count
    parts = model_memory(cfg, algo, dtype, engine_dtype, count, 0 if cfg.lora.rank else count, weight_bytes)
    length = min(TYPICAL_PROMPT + cfg.sampling.max_new_tokens, spec.max_length)
    parts["KV cache of one answer"] = kv_bytes(spec, engine_dtype) * length
    total = sum(parts.values())
    if total <= free:
        return None
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size > 0.05 * total)
    config = cfg.model_dump()
    return Diagnosis(
        "memory_full",
        f"the run needs at least {total / GIB:.1f} GiB ({listed}), and {free / GIB:.1f} GiB are free on {device}",
        f"use a smaller model, optim.precision = '8bit', LoRA ({now(config, 'lora.rank')}), more devices "
        "(docs/guides/many-processes.md), or end other processes that use the memory",
    )


def dry_run(cfg: TrainConfig, console: Console) -> Iterator[str]:
    """Build a run, check its inputs and predict its cost, without training. Yields the report line by line."""
    check_writable(Path(cfg.runs_dir))
    started = time.perf_counter()
    mesh = start_mesh(cfg)
    source = model_source(cfg.model, cfg.runs_dir)
    run = assemble(cfg, console, source, mesh, started, checked_texts=READ)
    collector, stream, learner = run.collector, run.source.prompts, run.learner
    with collector:
        prompts = stream.next(min(max(cfg.train.prompts, PROMPTS), 64))
        lengths = [*map(len, collector.renderer.all_prompt_ids(prompts))]
        longest, limit = max(lengths), collector.engine.info.max_length
        task = " ".join(filter(None, (cfg.env.name, cfg.task.name)))
        problems = len(stream.prompts)
        listed = plural(problems, "train problem") if problems < UNLIMITED else "an endless train split"
        yield f"task {task}: {listed}; {plural(run.schedule.total_steps, 'step')}"
        new = cfg.sampling.max_new_tokens
        yield f"prompts of {min(lengths)} to {longest} tokens, answers of up to {new}; context {limit}"
        if longest + new > limit:
            yield f"warning: prompt and answer can exceed the context of {limit} tokens; longer answers are cut off"
        verdict = check_judge(collector.judge, prompts[0])
        if collector.env is None or collector.env.judged:
            yield f"the judge works: an empty answer is '{verdict.status}' with reward {verdict.reward:g}"
        if cfg.sft.steps:
            first_batch = run.demonstrations[: cfg.sft.batch]
            rows = solution_rows(first_batch, collector.renderer, learner.policy.max_length)
            longest_solution = plural(max(sum(row.trained) for row in rows), "token")
            yield f"warm start: {plural(cfg.sft.steps, 'step')} on solutions of up to {longest_solution}"
        if learner.algo.needs.reference:
            load_reference(learner.updater, cfg, run.tokenizer, console)
        sizes = memory_by_purpose(cfg, learner, collector.engine, longest)
        if collector.env is not None:
            try_env(collector.env, prompts[0])
        start_s = time.perf_counter() - started
        if has_rl_steps(cfg):
            yield try_update(cfg, collector, learner, prompts)
            if room_for_updates(learner):
                speeds, work = measure(run, prompts, start_s)
                yield from describe_cost(work, speeds, task, mesh.device)
    yield from memory_report(sizes, mesh, run.cfg.train.token_budget)


def describe_cost(work: Work, speeds: Speeds, task: str, device: torch.device) -> Iterator[str]:
    """Predicted seconds, tokens and disk space of a run, and what would make it shorter."""
    cost, answers = predict(work, speeds), work.answers
    parts = {"sampling": cost.sampling, "judging": cost.judging, "update": cost.update, "rest": cost.rest}
    listed = ", ".join(f"{name} {rounded(part)}" for name, part in parts.items())
    yield f"a step: {rounded(cost.step)} s ({listed}), with answers of {answers.mean:.0f} tokens on average"
    parts = {"start": cost.start, "warm start": cost.warm_start}
    parts |= {"evaluations": cost.evaluations, "checkpoints": cost.saving}
    listed = ", ".join(f"{name} {duration(part)}" for name, part in parts.items() if part > 0.05 * cost.total)
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device) if device.type == "cuda" else "device"
    text = f"{plural(work.steps, 'step')} of {task} on this {where}: about {duration(cost.total)}"
    yield text + f" ({listed})" * bool(listed) + shorter(work, speeds, cost, device)
    yield (
        f"{count(round(cost.tokens))} sampled tokens; {cost.disk / GIB:.2f} GiB of disk for checkpoints and rollouts"
    )


def rounded(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 100 else f"{seconds:,.0f}"


def shorter(work: Work, speeds: Speeds, cost: Prediction, device: torch.device) -> str:
    """Advice for a long run; empty for a short one."""
    if cost.total < LONG_S:
        return ""
    ways = []
    if cost.evaluations > 0.5 * cost.total:
        ways.append("--eval.final_examples 200 and a larger --eval.every")
    elif fewer := fewer_prompts(work, speeds):
        ways.append(f"--train.prompts {fewer[0]} ({duration(fewer[1])})")
    if device.type == "cpu":
        ways.append("a GPU")
    return f"; try {' or '.join(ways)}" if ways else ""


def memory_report(sizes: Mapping[str, float], mesh: Mesh, token_budget: int) -> Iterator[str]:
    """`sizes`: bytes by purpose."""
    needed, free = sum(sizes.values()), free_memory(mesh.device)
    unit, size_of_unit = ("GiB", GIB) if needed >= GIB else ("MiB", MIB)
    for name, size in sizes.items():
        yield f"{name:<28}{size / size_of_unit:8.2f} {unit}"
    total = f"{needed / size_of_unit:8.2f} {unit} on {mesh.device}"
    yield f"{'estimated total':<28}{total}, train.token_budget = {token_budget}"
    if free is not None and needed > free:
        yield (
            f"warning: only {free / GIB:.2f} GiB are free; lower train.token_budget or engine.max_batch (a micro-batch "
            "that does not fit is halved during the run)"
        )
    else:
        yield "all checks passed"


def try_env(env: Env, prompt: Prompt) -> None:
    """Start an episode and make one step, with the action of a perfect policy if the environment knows it."""
    episode = env.copy()
    resolve(episode.start(prompt))
    try:
        action = episode.gold_action() or ""
    except Exception as error:
        raise UserError(f"{env.name}: gold_action failed: {describe_user_error(error)}") from error
    verdict = resolve(safe_step(episode, action))[4].get("verdict")
    if verdict is not None and verdict.status is Status.ERROR:
        raise UserError(f"{env.name}: step({action!r:.60}) failed: {verdict.detail}; see assay env check")


def try_update(cfg: TrainConfig, collector: Collector, learner: Learner, prompts: Sequence[Prompt]) -> str:
    """Sample a few short answers, and compute advantages, loss and gradient of them. Returns a line for the report."""
    if not room_for_updates(learner):
        return "warning: advantage and loss were not tried, because memory is short"
    params = SamplingParams(n=min(cfg.train.samples, SAMPLES), max_new_tokens=NEW_TOKENS)
    params = replace(params, temperature=cfg.sampling.temperature)
    groups = with_trial_rewards(collector.collect(prompts[:PROMPTS], params, (cfg.seed, 0)))
    updater, critic = learner.updater, learner.critic
    if learner.algo.needs.reference and updater.reference is None and updater.served is None:
        updater.reference = updater.policy  # as at the start of a run
    if critic is not None:
        critic.start_from(learner.policy)
    updater.expects_more = False
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # an update that is skipped is reported below
        learner.credit(groups)
        metrics = updater.update(groups, learner.algo, lr=0.0)
    if updater.faults:
        raise UserError(
            f"{updater.faults[0].what} is not finite in a trial update (loss {updater.faults[0].loss:g}): check your "
            "own advantages and losses (algo.advantage, algo.policy_loss), or set dtype = 'float32'"
        )
    answers = sum(len(group.rollouts) for group in groups)
    if not metrics.get("optim/grad_norm"):
        return (
            f"warning: a trial update on {answers} answers with different rewards has no gradient: check "
            "algo.advantage and algo.policy_loss"
        )
    return f"advantage and loss work: tried on {answers} short answers, gradient norm {metrics['optim/grad_norm']:.2g}"


def room_for_updates(learner: Learner) -> bool:
    free = free_memory(learner.mesh.device)
    return free is None or update_bytes(learner.cfg) * learner.policy.trained_count <= free
