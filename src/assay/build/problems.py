"""Settings -> task or environment, prompts, demonstrations, and the algorithm; and checks of their texts."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from assay.algos import Algorithm, make_algorithm
from assay.config import EnvConfig, TaskConfig, TrainConfig
from assay.envs import Env, TaskEnv, make_env
from assay.rewards.functions import load_object, normalized
from assay.runs.console import Console
from assay.tasks import Task, make_task
from assay.tasks.base import UNLIMITED, FilteredPrompts, LazyPrompts, take_in_time
from assay.tasks.registry import MixedPrompts
from assay.text import Renderer, Tokenizer
from assay.types import Prompt, UserError, plural

GENERATED, READ = 256, 20_000  # texts whose tokens are checked: generated ones, ones from a file
TEMPLATE_TOKENS = 16  # bos, and tokens of an empty text


def build_task(cfg: TaskConfig, **changes: object) -> Task:
    if not cfg.name:
        raise UserError(
            "no task: set task.name to gsm8k, math, countdown, abacus, code, jsonl, or your own, e.g. --task gsm8k"
        )
    return make_task(cfg.name, cfg.path or None, **{**cfg.args, **changes})


def build_problems(task: TaskConfig, env: EnvConfig) -> Task:
    """The task, or the environment if there is one. Both provide prompts."""
    if not env.name:
        return build_task(task)
    made = make_env(env.name, env.path or None, build_task(task) if task.name else None, **env.args)
    if isinstance(made, TaskEnv):
        made.defer_judging = True
    if env.pool == "local":
        return made
    on_nodes = pkgutil.resolve_name("assay.integrations.ray.environments:ClusterEnv")  # its package is optional
    return on_nodes(made, partial(build_problems, task, env.model_copy(update={"pool": "local"})))


def build_demonstrations(cfg: TrainConfig, renderer: Renderer, console: Console) -> Sequence[Prompt]:
    """Problems with the worked solutions that the warm start trains on."""
    if not cfg.sft.steps:
        return ()
    if cfg.env.name and not cfg.task.name:
        return gold_episodes(make_env(cfg.env.name, cfg.env.path or None, **{**cfg.env.args, **cfg.sft.args}))
    prompts = build_task(cfg.task, **cfg.sft.args).prompts("train")
    return select_prompts(prompts, cfg, renderer, console, "prompts of the warm start")


def gold_episodes(env: Env) -> Sequence[Prompt]:
    """Train prompts of an environment with worked episodes."""
    prompts = env.prompts("train")
    if not env.gold_episode(prompts[0]):
        raise UserError(
            f"the environment {env.name} has no worked episodes: define gold_action(), or set sft.steps = 0"
        )
    return LazyPrompts(lambda index: replace(prompts[index], episode=env.gold_episode(prompts[index])), len(prompts))


def take(prompts: Sequence[Prompt], count: int, split: str, endless: bool = False) -> Sequence[Prompt]:
    """The first `count` prompts (0: all). `endless`: whether a split without an end is allowed."""
    if not len(prompts):
        raise UserError(f"the {split} split is empty: check task.path")
    if not count and not endless and len(prompts) >= UNLIMITED:
        raise UserError(
            f"the {split} split is generated and endless: "
            "set the number of problems to use (eval.examples, eval.final_examples)"
        )
    return prompts[:count] if count else prompts


def select_prompts(
    prompts: Sequence[Prompt], cfg: TrainConfig, renderer: Renderer, console: Console, what: str = "train prompts"
) -> Sequence[Prompt]:
    """The prompts to train on: without few-shot examples of the train split, and without prompts that are too long."""
    if cfg.prompt.few_shot and not cfg.prompt.few_shot_file:
        prompts = drop_examples(prompts, renderer, console, what)
    return drop_long_prompts(prompts, renderer, cfg.train.max_prompt_tokens, console, what)


def drop_examples(prompts: Sequence[Prompt], renderer: Renderer, console: Console, what: str) -> Sequence[Prompt]:
    """The prompts without the few-shot examples, which would be asked together with their own solution."""
    shown = {question for question, _ in renderer.few_shot}

    def others(candidates: Sequence[Prompt]) -> Sequence[Prompt]:
        if len(candidates) >= UNLIMITED:
            filtered = FilteredPrompts(
                candidates, lambda prompt: prompt.question not in shown, "prompt.few_shot: lower it"
            )
            return LazyPrompts(filtered.__getitem__, len(candidates))  # whose `rejected` counts long prompts only
        kept = [prompt for prompt in candidates if prompt.question not in shown]
        if not kept:
            raise UserError(f"all {len(candidates):,} {what} are few-shot examples: lower prompt.few_shot")
        return kept

    console.note(f"left the {plural(len(shown), 'few-shot example')} out of the {what} (prompt.few_shot)")
    return prompts.filtered(others) if isinstance(prompts, MixedPrompts) else others(prompts)


def drop_long_prompts(
    prompts: Sequence[Prompt], renderer: Renderer, limit: int, console: Console, what: str
) -> Sequence[Prompt]:
    """The prompts with at most `limit` tokens (0: all of them); reports how many are dropped.

    Of an endless split, longer prompts are replaced when they are drawn.
    """
    if not limit:
        return prompts
    if isinstance(prompts, MixedPrompts):
        return prompts.filtered(lambda part: drop_long_prompts(part, renderer, limit, console, what))
    if len(prompts) >= UNLIMITED:
        rule = f"train.max_prompt_tokens = {limit}: raise it, or generate shorter problems (task.args)"
        return FilteredPrompts(prompts, lambda prompt: len(renderer.prompt_ids(prompt)) <= limit, rule)
    given = list(prompts)
    kept = [prompt for prompt, ids in zip(given, renderer.all_prompt_ids(given), strict=True) if len(ids) <= limit]
    if not kept:
        raise UserError(f"all {len(given):,} {what} have more than train.max_prompt_tokens = {limit} tokens")
    if dropped := len(given) - len(kept):
        console.note(
            f"dropped {dropped:,} of {len(given):,} {what} with more than {limit} tokens (train.max_prompt_tokens)"
        )
    return kept


def build_algorithm(cfg: TrainConfig) -> Algorithm:
    """The recipe with the user's changes. Code that settings name by path is imported."""
    explicit_fields = cfg.algo.model_fields_set - {"recipe"}
    changes = {name: with_absolute_paths(getattr(cfg.algo, name)) for name in explicit_fields}
    algo = make_algorithm(
        cfg.algo.recipe,
        max_new_tokens=cfg.sampling.max_new_tokens,
        critic_settings=cfg.critic,
        load=load_object,
        **changes,
    )
    algo.check_samples(cfg.train.samples)
    if cfg.replay.groups:
        algo.check_replay()
    if cfg.source.name == "async" and cfg.source.max_staleness:
        algo.check_staleness()
    return algo


def with_absolute_paths(value: Any) -> Any:
    """The setting, with paths of code that are valid in every working directory."""
    if isinstance(value, list):
        return [with_absolute_paths(item) for item in value]
    return normalized(value) if isinstance(value, str) else value


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
    trained = [[index for index, in_loss in zip(tokens, mask, strict=True) if in_loss] for tokens, mask in ids]
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
