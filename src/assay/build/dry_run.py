"""Check a run without training.

`diagnose_config` (`assay doctor`) takes seconds and loads no weights: settings, splits, judge, and a rough estimate of
memory. `dry_run` (`assay train --dry-run`) builds the run, tries its parts, and measures their speeds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import torch

from assay.algos import Algorithm
from assay.build.cost import (
    LONG_S,
    Answers,
    EvaluationWork,
    Line,
    Prediction,
    Speeds,
    Work,
    checkpoint_bytes,
    fewer_prompts,
    kv_bytes,
    memory_by_purpose,
    model_memory,
    model_spec,
    predict,
    quantized_bytes,
    update_bytes,
)
from assay.build.models import model_source
from assay.build.problems import READ, build_algorithm, build_problems, take
from assay.build.run import assemble, evaluation_prompts, has_rl_steps
from assay.checks import Diagnosis
from assay.checks.causes import now, ranked
from assay.checks.settings import check_judge, check_settings, data_problems, settings_problems
from assay.config import TrainConfig
from assay.engine import Request, generate
from assay.engine.base import SamplingParams
from assay.envs.base import Env, safe_step
from assay.mesh import Mesh
from assay.models.device import deterministic, free_memory, pick_device, pick_dtype
from assay.models.spec import ModelSpec
from assay.rollout import Collector, sampling_params
from assay.runs.console import Console, count, duration
from assay.runs.directory import check_writable
from assay.system.awaiting import resolve
from assay.tasks import Task
from assay.tasks.base import UNLIMITED
from assay.tasks.registry import build_judge_pool
from assay.training.learner.learner import Learner, load_reference, solution_rows
from assay.training.parallel import start_mesh
from assay.training.run import TrainingRun
from assay.types import Finish, Group, Prompt, Status, UserError, Verdict, describe_user_error, plural

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
    with deterministic(cfg.train.deterministic, cfg.device):
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


# A microbenchmark of a built run: the speeds that `cost.predict` needs, and the amounts of work of the run

FEW_ROWS, MOST_ROWS = 4, 1024  # sequences that are decoded in a measurement
FEW_POSITIONS, MOST_POSITIONS = 8, 64
# Longest measurements: of decoding, of prefill, of a sample of answers, of updates.
DECODE_S, PREFILL_S, SAMPLE_S, UPDATE_S = 4.0, 2.0, 15.0, 6.0
SAMPLED_PROMPTS, SAMPLED_ANSWERS = 4, 4
SHORTEST_SAMPLE = 8  # tokens
SOLUTIONS = 256  # whose lengths are measured
LEARNING_SHARE = 0.7  # of answers that have an advantage; groups with equal rewards have none
BEST_SHARE = 0.5  # of periodic evaluations that are the best so far, and are saved


def measure(run: TrainingRun, prompts: Sequence[Prompt], start_s: float) -> tuple[Speeds, Work]:
    """The speeds of this machine, and the work of the run. `start_s`: seconds to build the run."""
    position = measure_decoding(run, prompts)
    limit = run.cfg.sampling.max_new_tokens
    tokens = limit
    if run.collector.env is None:
        sampled = SAMPLED_PROMPTS * min(run.cfg.train.samples, SAMPLED_ANSWERS)
        tokens = min(limit, max(int(SAMPLE_S / position.at(sampled)), SHORTEST_SAMPLE))
    params = sampling_params(run.cfg.sampling, min(run.cfg.train.samples, SAMPLED_ANSWERS))
    before = run.collector.seconds.get("judge", 0.0)
    groups = run.collector.collect(prompts[:SAMPLED_PROMPTS], replace(params, max_new_tokens=tokens), (run.cfg.seed, 0))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    judge = Line(0.0, (run.collector.seconds.get("judge", 0.0) - before) / len(rollouts))
    if run.collector.env is None:
        judge = measured_line(groups, lambda group: len(group.rollouts), run.collector.judge_groups)
    lengths = sorted(
        (rollout.trained, tokens < limit and rollout.turns[-1].completion.finish is Finish.LENGTH)
        for rollout in rollouts
    )
    answers = Answers.of([length for length, _ in lengths], sum(cut for _, cut in lengths), limit)
    update = measure_update(run, with_trial_rewards(groups))
    sync = repeated(lambda: run.weight_sync.sync(0))
    speeds = Speeds(position, measure_prefill(run, prompts), judge, update, sync, start_s)
    sampled = sum(rollout.trained for rollout in rollouts)
    observed = sum(len(rollout.token_ids) - len(rollout.turns[0].context_ids) for rollout in rollouts) / sampled - 1
    return speeds, work_of(run, prompts, answers, observed)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def repeated(work: Callable[[], object]) -> float:
    """Seconds of a call without what only the first one does, such as compilation; a median if it is short."""
    first, second = seconds(work), seconds(work)
    return min(first, second) if second > 1 else median([first, second, seconds(work)])


def generation_seconds(run: TrainingRun, contexts: Sequence[Sequence[int]], rows: int, tokens: int) -> float:
    """Seconds to sample `rows` answers of this length to each context."""
    engine, params = run.collector.engine, SamplingParams(n=rows, max_new_tokens=tokens)

    def sample() -> None:
        engine.reset_prefix_cache()
        generate(engine, [Request(ids, params, seed) for seed, ids in enumerate(contexts)])

    return repeated(sample)


def measure_decoding(run: TrainingRun, prompts: Sequence[Prompt]) -> Line:
    """Seconds per decoded position by the number of sequences, in the middle of an answer."""
    engine, train = run.collector.engine, run.cfg.train
    ids = run.collector.renderer.all_prompt_ids(prompts[:1])[0]
    most = min(MOST_POSITIONS, max(run.cfg.sampling.max_new_tokens // 2, 2))
    middle = len(ids) + run.cfg.sampling.max_new_tokens // 2
    length = min(middle - most // 2, engine.info.max_length - MOST_POSITIONS - 1)
    context = (ids * ceil(max(length, 1) / len(ids)))[: max(length, 1)]
    rows = min(train.prompts * train.samples, engine.info.max_batch, MOST_ROWS)

    def per_position(count: int, positions: int) -> float:
        short, long = (generation_seconds(run, [context], count, tokens) for tokens in (1, positions + 1))
        return max(long - short, 0.1 * long) / positions

    few = min(FEW_ROWS, rows)
    few_s = per_position(few, min(FEW_POSITIONS, most))
    row_positions = DECODE_S / (few_s / few)  # if the time grows with the rows
    rows = max(min(rows, int(row_positions / FEW_POSITIONS)), few)
    positions = int(min(max(row_positions / rows, 2), most))
    return Line.through((few, few_s), (rows, per_position(rows, positions)))


def measure_prefill(run: TrainingRun, prompts: Sequence[Prompt]) -> float:
    """Seconds per token of prompts that are computed together: of all of them, if that is fast."""
    contexts = run.collector.renderer.all_prompt_ids(prompts)

    def line(count: int) -> Line:
        return measured_line(contexts[:count], len, lambda part: generation_seconds(run, part, 1, 1))

    few = line(SAMPLED_PROMPTS)
    return (line(len(contexts)) if few.at(sum(map(len, contexts))) < PREFILL_S else few).slope


def measured_line(items: Sequence[T], size: Callable[[T], float], work: Callable[[Sequence[T]], object]) -> Line:
    """Seconds of `work` by the total size of its items, from the first one alone and all together."""
    few_s, many_s = repeated(lambda: work(items[:1])), repeated(lambda: work(items))
    return Line.through((size(items[0]), few_s), (sum(map(size, items)), many_s))


def measure_update(run: TrainingRun, groups: Sequence[Group]) -> Line:
    """Seconds of advantages and update by the number of tokens. The learning rate is 0."""
    learner = run.learner

    def update(count: int) -> None:
        part = list(groups[:count])
        learner.credit(part)
        learner.updater.update(part, learner.algo, lr=0.0)

    tokens = [group_tokens(group) for group in groups]
    first_s = repeated(lambda: update(1))
    count = min(len(groups), max(int(UPDATE_S / first_s), 1))
    if count == 1:
        return Line.through((0, 0.0), (tokens[0], first_s))
    return Line.through((tokens[0], first_s), (sum(tokens[:count]), repeated(lambda: update(count))))


def group_tokens(group: Group) -> int:
    """Tokens that an update computes: the shared prompt once, and all that follows it."""
    first = len(group.rollouts[0].turns[0].context_ids)
    return first + sum(len(rollout.token_ids) - first for rollout in group.rollouts)


def with_trial_rewards(groups: list[Group]) -> list[Group]:
    """Give answers rewards of 0 and 1 in turn, so that they have advantages."""
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            reward = float((number + rollout.sample) % 2)
            rollout.verdict = Verdict(reward, Status.OK if reward else Status.WRONG)
            rollout.reward = reward
    return groups


def work_of(run: TrainingRun, prompts: Sequence[Prompt], now: Answers, observed: float) -> Work:
    """`now`: answers of the model before its warm start. `observed`: see `Work`."""
    cfg, learner, engine = run.cfg, run.learner, run.collector.engine
    steps, train = run.schedule.total_steps, cfg.train
    prompt_tokens = fmean(map(len, run.collector.renderer.all_prompt_ids(prompts)))
    answers, warm_tokens = now, 0.0
    if cfg.sft.steps:
        solutions = list(islice(run.demonstrations, SOLUTIONS))
        rows = solution_rows(solutions, run.collector.renderer, learner.policy.max_length)
        if run.collector.env is None:
            limit = cfg.sampling.max_new_tokens
            answers = Answers.of([min(sum(row.trained), limit) for row in rows], 0, limit)
        warm_tokens = cfg.sft.batch * fmean(len(row.ids) for row in rows)
    periodic = ceil(steps / cfg.eval.every) if cfg.eval.every else 0
    regular = ceil(steps / cfg.save.every) if cfg.save.every else 1
    saves = 1 + regular + int(BEST_SHARE * periodic * cfg.save.best)
    limit = cfg.eval.max_new_tokens or cfg.sampling.max_new_tokens
    return Work(
        steps=steps,
        prompts=train.prompts,
        samples=train.samples,
        prompt_tokens=prompt_tokens,
        answers=answers,
        max_batch=engine.info.max_batch,
        observed=observed,
        evaluations=tuple(
            EvaluationWork(
                problems=len(asked),
                samples=cfg.eval.samples,
                times=periodic if label == "eval" else 1,
                answers=(now if label == "start" else answers).limited(limit),
            )
            for label, asked in run.evaluator.prompts.items()
        ),
        passes=train.passes,
        learning_share=1.0 if learner.algo.needs.every_rollout else LEARNING_SHARE,
        processes=run.mesh.dp_size,
        overlaps=cfg.source.name == "async" and cfg.source.max_staleness > 0,
        warm_steps=cfg.sft.steps,
        warm_tokens=warm_tokens,
        checkpoint_bytes=checkpoint_bytes(cfg, learner.policy),
        saves=saves,
        # The first, the latest, the best.
        kept=min(saves, 1 + (cfg.save.keep or saves) + bool(cfg.save.best and periodic)),
        rollout_steps=steps if cfg.save.rollouts < 0 else min(cfg.save.rollouts, steps),
    )
