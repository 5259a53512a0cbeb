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
from assay.build.models import activation_bytes, model_source
from assay.build.preflight import model_spec
from assay.build.problems import READ, build_algorithm, build_problems, take
from assay.build.run import assemble, evaluation_prompts, has_rl_steps
from assay.checks import Diagnosis
from assay.checks.causes import now, ranked
from assay.checks.settings import check_judge, check_settings, data_problems, settings_problems
from assay.config import TrainConfig
from assay.engine.base import BaseEngine, SamplingParams
from assay.envs.base import Env, safe_step
from assay.mesh import Mesh
from assay.models import Decoder
from assay.models.device import free_memory, pick_device, pick_dtype
from assay.models.quantize import BLOCK
from assay.models.spec import ModelSpec
from assay.rollout import Collector
from assay.runs.console import Console
from assay.runs.directory import check_writable
from assay.system.awaiting import resolve
from assay.tasks import Task
from assay.tasks.registry import build_judge_pool
from assay.training.learner.learner import Learner, load_reference, solution_rows
from assay.training.parallel import start_mesh
from assay.types import Group, Prompt, Status, UserError, Verdict, describe_user_error, plural

T = TypeVar("T")
GIB = 2**30
TYPICAL_PROMPT = 256  # tokens; prompts are not tokenized by `diagnose_config`
PROMPTS, SAMPLES, NEW_TOKENS = 2, 4, 8  # of the trial update, at most
MOMENTS_BYTES = 12  # per trained parameter: gradient and moments, which the trial allocates


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
    weight_bytes = quantized_bytes(spec, dtype) if cfg.lora.quantize else 4.0 * count
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
        f"use a smaller model, LoRA ({now(config, 'lora.rank')}), more devices (docs/guides/many-processes.md), "
        "or end other processes that use the memory",
    )


def quantized_bytes(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Bytes of a model in NF4: 4 bits and a share of a scale per weight of a layer; embedding and head are not
    quantized.
    """
    embeddings = spec.vocab_size * spec.hidden * (1 if spec.tied else 2)
    return embeddings * dtype.itemsize + (spec.parameters - embeddings) * (0.5 + dtype.itemsize / BLOCK)


def model_memory(
    cfg: TrainConfig,
    algo: Algorithm | None,
    dtype: torch.dtype,
    engine_dtype: torch.dtype,
    count: int,
    trained: int,
    weight_bytes: float,
    reference_count: int | None = None,
) -> dict[str, float]:
    """Bytes by purpose that do not depend on batches. `count`, `trained`: parameters. `dtype`: of the computation."""
    lora_base = cfg.lora.rank and not (cfg.algo.reference or cfg.sft.steps or cfg.algo.dynamic_reference)
    has_reference = algo is not None and algo.needs.reference and not cfg.reference.url and not lora_base
    has_critic = algo is not None and algo.settings.critic and cfg.critic.trunk == "separate"
    reference_bytes = 4 if cfg.algo.reference_ema else dtype.itemsize
    sizes = {
        "weights, gradients, AdamW": weight_bytes + 12.0 * trained,
        "engine's copy of the weights": float(engine_dtype.itemsize * count),
        "reference": float(reference_bytes * (reference_count or count) * has_reference),
        "critic, gradients, AdamW": 16.0 * count * bool(has_critic),
    }
    return {name: size for name, size in sizes.items() if size}


def kv_bytes(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Bytes of the keys and values of a token."""
    return 2.0 * spec.layers * spec.kv_heads * spec.head_dim * dtype.itemsize


def dry_run(cfg: TrainConfig, console: Console) -> Iterator[str]:
    """Build a run and check its inputs without training. Yields the report line by line."""
    check_writable(Path(cfg.runs_dir))
    mesh = start_mesh(cfg)
    source = model_source(cfg.model, cfg.runs_dir)
    run = assemble(cfg, console, source, mesh, time.perf_counter(), checked_texts=READ)
    collector, stream, learner = run.collector, run.source.prompts, run.learner
    with collector:
        prompts = stream.next(min(max(cfg.train.prompts, PROMPTS), 64))
        lengths = [*map(len, collector.renderer.all_prompt_ids(prompts))]
        longest, limit = max(lengths), collector.engine.info.max_length
        task = " ".join(filter(None, (cfg.env.name, cfg.task.name)))
        yield f"task {task}: {plural(len(stream.prompts), 'train problem')}; {plural(run.schedule.total_steps, 'step')}"
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
        if has_rl_steps(cfg):
            yield try_update(cfg, collector, learner, prompts)
    yield from memory_report(sizes, mesh, run.cfg.train.token_budget)


def memory_report(sizes: Mapping[str, float], mesh: Mesh, token_budget: int) -> Iterator[str]:
    """`sizes`: bytes by purpose."""
    for name, size in sizes.items():
        yield f"{name:<28}{size / GIB:8.2f} GiB"
    needed, free = sum(sizes.values()), free_memory(mesh.device)
    yield f"{'estimated total':<28}{needed / GIB:8.2f} GiB on {mesh.device}, train.token_budget = {token_budget}"
    if free is not None and needed > free:
        yield (
            f"warning: only {free / GIB:.2f} GiB are free; lower train.token_budget or engine.max_batch (a micro-batch "
            "that does not fit is halved during the run)"
        )
    else:
        yield "all checks passed"


def memory_by_purpose(cfg: TrainConfig, learner: Learner, engine: BaseEngine, prompt_tokens: int) -> dict[str, float]:
    """Estimated bytes at the peak of a step, without kernels, fragmentation and the interpreter."""
    policy, updater, reference = learner.policy, learner.updater, learner.updater.reference
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    reference_count = None if reference is None else sum(p.numel() for p in reference.parameters())
    parameters = policy.parameter_count, trained, policy.weight_bytes, reference_count
    sizes = model_memory(cfg, learner.algo, updater.dtype, engine.info.dtype, *parameters)
    length = min(prompt_tokens + cfg.sampling.max_new_tokens, engine.info.max_length)
    sequences = cfg.train.prompts * cfg.train.samples
    tokens = min(updater.token_budget, sequences * length)
    if isinstance(policy, Decoder):
        sizes["KV cache"] = kv_bytes(policy.spec, engine.info.dtype) * length * min(engine.info.max_batch, sequences)
        sizes["activations"] = float(tokens * activation_bytes(policy.spec, updater.dtype, policy.recompute))
    return sizes | {"logits": 4.0 * 3 * min(tokens * policy.vocab_size, 1 << 25)}


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
    trained = sum(parameter.numel() for parameter in learner.policy.parameters() if parameter.requires_grad)
    free = free_memory(collector.mesh.device)
    if free is not None and MOMENTS_BYTES * trained > free:
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


def with_trial_rewards(groups: list[Group]) -> list[Group]:
    """Give answers rewards of 0 and 1 in turn, so that they have advantages."""
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            reward = float((number + rollout.sample) % 2)
            rollout.verdict = Verdict(reward, Status.OK if reward else Status.WRONG)
            rollout.reward = reward
    return groups
