"""Checks before a run that need its tokenizer, model or engine: texts, lengths of prompts, capabilities of the engine,
and trials of the user's environment, advantage and loss. No trial changes the policy's weights or writes files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from assay.config import TrainConfig
from assay.engine.base import BaseEngine, SamplingParams
from assay.envs.base import Env, safe_step
from assay.models import PolicyModel
from assay.models.device import free_memory
from assay.rollout import Collector
from assay.rollout.episodes import check_history
from assay.runs.console import Console
from assay.system.awaiting import resolve
from assay.tasks.base import LazyPrompts, take_in_time
from assay.tasks.registry import MixedPrompts
from assay.text import Renderer, Tokenizer
from assay.training.learner.learner import Learner
from assay.training.sync import Method
from assay.types import Group, Prompt, Status, UserError, Verdict, describe_user_error, plural

PROMPTS, SAMPLES, NEW_TOKENS = 2, 4, 8  # of the trial update, at most
GENERATED, READ = 256, 20_000  # texts whose tokens are checked: generated ones, ones from a file
MAX_GENERATED = 64  # prompts per generated split whose length is checked
TEMPLATE_TOKENS = 16  # bos, and tokens of an empty text
MOMENTS_BYTES = 12  # per trained parameter: gradient and moments, which the trial allocates


def check_texts(
    console: Console,
    splits: Mapping[str, Sequence[Prompt]],
    demonstrations: Sequence[Prompt],
    renderer: Renderer,
    max_length: int,
    limit: int,
) -> None:
    """Check the first `limit` prompts of each split and worked solutions; generated ones: the first few."""
    for split, prompts in splits.items():
        for warning in unknown_prompt_words(split, first_prompts(prompts, limit, GENERATED), renderer):
            console.warn(warning)
    for warning in check_demonstrations(demonstrations, renderer, max_length, limit):
        console.warn(warning)


def first_prompts(prompts: Sequence[Prompt], limit: int, generated: int) -> Sequence[Prompt]:
    """The first `limit` prompts; of a generated split at most `generated`, and those that take little time."""
    if not isinstance(prompts, LazyPrompts):
        return prompts[:limit]
    return take_in_time(prompts, range(min(limit, generated, len(prompts))))


def check_demonstrations(
    demonstrations: Sequence[Prompt], renderer: Renderer, max_length: int, limit: int = READ
) -> Iterator[str]:
    """Raise a UserError if a worked solution is missing or does not fit; yield warnings about the others.

    The words of at most `limit` solutions are checked, and fewer of a task that generates them. Rows of files without
    a solution, or without space for one, are all found.
    """
    first = min(limit, GENERATED) if isinstance(demonstrations, LazyPrompts) else limit
    checked, rows = list(demonstrations[:first]), rows_of_files(demonstrations)
    for prompts in (rows, checked):
        if missing := [prompt.id for prompt in prompts if prompt.worked_text is None]:
            raise UserError(
                f"{len(missing):,} of {plural(len(prompts), 'problem')} have no worked solution to train on (e.g. "
                f"{missing[0]}): set sft.steps = 0, or add solutions"
            )
    ids = [renderer.worked_example(prompt) for prompt in checked]
    long = [prompt.id for prompt, (tokens, _) in zip(checked, ids, strict=True) if len(tokens) > max_length]
    without = [prompt.id for prompt, (_, mask) in zip(checked, ids, strict=True) if not any(mask[:max_length])]
    empty = [prompt.id for prompt in checked if not (prompt.worked_text or "").strip()]
    for prompt in may_be_long(rows if isinstance(demonstrations, MixedPrompts) else rows[first:], renderer, max_length):
        if not any(renderer.worked_example(prompt)[1][:max_length]):
            without.append(prompt.id)
    if without:
        raise UserError(
            f"{len(without):,} of {plural(len(rows or checked), 'prompt')} fill the context of {max_length} tokens, "
            f"without a solution (e.g. {without[0]}): remove or shorten them, or raise model.max_length"
        )
    if long:
        yield (
            f"{len(long)} of {plural(len(checked), 'worked solution')} do not fit into the context of {max_length} "
            f"tokens and are cut off (e.g. {long[0]}): remove or shorten them, or raise model.max_length"
        )
    if empty:
        yield (
            f"{len(empty)} of {plural(len(checked), 'worked solution')} are empty (e.g. {empty[0]}), which trains the "
            "model to answer nothing: remove them"
        )
    trained = [[index for index, one in zip(tokens, mask, strict=True) if one] for tokens, mask in ids]
    texts = [prompt.worked_text or "" for prompt in checked]
    yield from unknown_words("worked solutions", checked, texts, trained, renderer.tokenizer)


def rows_of_files(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """All problems that are not generated."""
    if isinstance(prompts, MixedPrompts):
        return [prompt for part in prompts.prompts for prompt in rows_of_files(part)]
    return () if isinstance(prompts, LazyPrompts) else prompts


def may_be_long(prompts: Sequence[Prompt], renderer: Renderer, max_length: int) -> list[Prompt]:
    """The prompts that could fill the context, by their bytes: a token has at least one."""
    if not prompts:
        return []

    def size(prompt: Prompt) -> int:
        return sum(len(message["content"].encode("utf-8", "replace")) for message in prompt.messages)

    template = len(renderer.prompt_text(prompts[0]).encode("utf-8", "replace")) - size(prompts[0]) + TEMPLATE_TOKENS
    return [prompt for prompt in prompts if size(prompt) + template >= max_length]


def unknown_words(
    what: str, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield a warning if token ids contain the tokenizer's unknown token. `texts`: to find an example in."""
    unknown = tokenizer.hf.unk_token_id
    if unknown is None:
        return
    affected = [number for number, tokens in enumerate(ids) if unknown in tokens]
    if not affected:
        return
    first = affected[0]
    words = [word for word in texts[first].split() if unknown in tokenizer.encode(tokenizer.escape(word))]
    example = f"{words[0]!r:.60} in {prompts[first].id}" if words else prompts[first].id
    yield (
        f"{len(affected)} of {len(ids):,} {what} contain words that the tokenizer does not know (e.g. {example}), and "
        f"that the model can neither read nor write ({tokenizer.hf.unk_token}): set model.tokenizer (for a preset, "
        "'characters' or a tokenizer's folder), or change the data"
    )


def unknown_prompt_words(split: str, prompts: Sequence[Prompt], renderer: Renderer) -> Iterator[str]:
    """Yield a warning if prompts contain words that are unknown to the tokenizer."""
    if renderer.unknown_id is None:
        return
    texts = ["\n".join(message["content"] for message in prompt.messages) for prompt in prompts]
    ids = renderer.all_prompt_ids(prompts)
    yield from unknown_words(f"{split} prompts", prompts, texts, ids, renderer.tokenizer)


def check_collector(
    cfg: TrainConfig,
    collector: Collector,
    train: Sequence[Prompt],
    evaluations: Mapping[str, Sequence[Prompt]],
    policy: PolicyModel,
    console: Console,
) -> None:
    """Check the environment and the lengths of prompts."""
    if collector.env and (warning := check_history(collector.renderer, collector.env, train[0])):
        console.warn(warning)
    context = min(cfg.model.max_length or policy.max_length, policy.max_length)
    splits = (train, *evaluations.values())
    new_tokens = cfg.sampling.max_new_tokens
    if longest := max(check_prompt_lengths(collector, prompts, new_tokens, context) for prompts in splits):
        console.warn(
            f"engine.kv_cache_gib holds keys and values of {collector.engine.info.max_length - 1} tokens, and prompts "
            f"have up to {longest}: longer answers are cut off; raise engine.kv_cache_gib, or lower "
            "sampling.max_new_tokens"
        )


def check_prompt_lengths(collector: Collector, prompts: Sequence[Prompt], new_tokens: int, context: int) -> int:
    """Raise if a prompt fills the context; of a generated split, the first few are checked.

    Returns the length of the longest prompt if answers are limited by the engine's memory, not by the context; else 0.
    """
    checked = first_prompts(prompts, READ, MAX_GENERATED)
    ids = collector.renderer.all_prompt_ids(checked)
    collector.check_lengths(checked, ids)
    longest, limit = max(map(len, ids)), collector.engine.info.max_length
    return longest if limit < context and longest + new_tokens > limit else 0


def check_capabilities(cfg: TrainConfig, engine: BaseEngine, trains: bool, verify: Method, console: Console) -> None:
    """Refuse an engine that cannot serve this run, and warn of everything that degrades.

    `trains`: not only SFT. `verify`: how weight syncs are verified.
    """
    has, name = engine.info.capabilities, cfg.engine.name
    if trains and not has.temperature_logprobs:
        raise UserError(
            f"engine {name} does not report log-probabilities at the sampling temperature (temperature_logprobs), "
            "which training needs: set engine.name to auto, or to an engine that does"
        )
    if trains and cfg.sampling.truncates and not has.truncated_logprobs:
        raise UserError(
            f"engine {name} reports log-probabilities after truncation (truncated_logprobs), which training cannot "
            "use: switch off sampling.top_k, top_p, min_p and min_new_tokens, or set engine.name to auto"
        )
    if cfg.source.name == "async" and cfg.source.max_staleness and not has.inflight_updates:
        raise UserError(
            f"engine {name} cannot update weights while it generates (inflight_updates), which asynchronous training "
            "needs: set source.max_staleness = 0, or engine.name to native, assay, vllm or sglang"
        )
    if not has.exact_seeds:
        console.warn(
            f"engine {name} has no exact seeds (exact_seeds): the same seed may give different tokens, and a resumed "
            "run does not repeat what it had sampled"
        )
    if verify == "off" and cfg.engine.verify != "off":
        console.warn(
            f"engine {name} has neither a fingerprint of its weights (fingerprint) nor scores (score): weights are not "
            "verified after a sync"
        )
    if verify == "probe" and cfg.engine.verify == "auto":
        console.note(f"engine {name} has no fingerprint of its weights: probe sequences verify every weight sync")
    for metric in ("entropy", "kept_mass"):
        if trains and not getattr(has, metric):
            console.warn(f"engine {name} does not report {metric}: the metric sampling/{metric} is left out")


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
