"""A microbenchmark of a built run: the speeds that `cost.predict` needs, and the amounts of work of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil
from statistics import fmean, median
from typing import TypeVar

from assay.build.cost import Answers, EvaluationWork, Line, Speeds, Work, checkpoint_bytes
from assay.engine import Request, generate
from assay.engine.base import SamplingParams
from assay.rollout import sampling_params
from assay.training.learner.learner import solution_rows
from assay.training.run import TrainingRun
from assay.types import Finish, Group, Prompt, Status, Verdict

T = TypeVar("T")
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
