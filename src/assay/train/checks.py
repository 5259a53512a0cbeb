"""Checks before a run starts: settings without effect or with risks, engine capabilities, judge, prompts and splits.

With several ranks, also that all of them agree: on settings, code, data and weights at the start, on replicas at every
save. Otherwise a different learning rate on one rank would only show in the results, and a different number of steps
would make the other ranks wait forever.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

import assay
from assay.algos import Algorithm, RunFacts, complete_settings
from assay.config import EnvConfig, RewardConfig, TrainConfig
from assay.config.settings import keys
from assay.engine.base import BaseEngine
from assay.envs import Env
from assay.mesh import Mesh, init_mesh, local_tensor
from assay.models import PolicyModel, pick_device
from assay.models.base import digests, fingerprint
from assay.rewards import Judging, check_verdicts
from assay.rollout import Collector
from assay.rollout.episodes import check_history
from assay.runs.console import Console
from assay.tasks import Task
from assay.tasks.base import LazyPrompts, overlap
from assay.text import Renderer
from assay.train.sync import Method
from assay.types import Prompt, UserError, Verdict, plural

MAX_GENERATED, MAX_READ = 64, 20_000  # prompts per split whose length is checked: generated ones, ones from a file


def unused_settings(cfg: TrainConfig, algo: Algorithm, task: Task | None = None) -> Iterator[str]:
    """A line for each setting that differs from its default and has no effect. `task`: of the run, or its environment.

    The default of an algorithm setting is that of the recipe.
    """
    defaults = {key: field.get_default(call_default_factory=True) for key, field in keys(TrainConfig)}
    defaults |= {f"algo.{name}": value for name, value in complete_settings(cfg.algo.recipe)}
    own = {f"algo.{name}" for name in cfg.algo.model_fields_set}
    for reason, names in (*_unused_with_problems(cfg, task), *algo.unused(run_facts(cfg, algo))):
        for name in names:
            is_set = name in own or not name.startswith("algo.")
            if is_set and attrgetter(name)(cfg) != defaults[name]:
                yield f"{name} has no effect: {reason}"


def risky_settings(cfg: TrainConfig, algo: Algorithm) -> Iterator[str]:
    """A line for each setting that harms learning, with what to do about it."""
    if cfg.sampling.top_k or cfg.sampling.top_p < 1 or cfg.sampling.min_p or cfg.sampling.min_new_tokens:
        yield (
            "sampling is truncated (top_k, top_p, min_p or min_new_tokens): importance ratios are inexact; "
            "see sampling/kept_mass"
        )
    yield from algo.warnings(run_facts(cfg, algo))


def run_facts(cfg: TrainConfig, algo: Algorithm) -> RunFacts:
    largest_batch = cfg.train.prompts + cfg.replay.groups
    updates = algo.update_count(largest_batch) * cfg.train.passes
    stale = cfg.replay.groups > 0 or (cfg.source.name == "async" and cfg.source.max_staleness > 0)
    # Recomputed log-probabilities are those of the policy before the update, whichever policy has sampled.
    stale_ratios = stale and not algo.needs.trainer_logprobs
    return RunFacts(episodes=bool(cfg.env.name), updates=updates, stale_ratios=stale_ratios)


def _unused_with_problems(cfg: TrainConfig, task: Task | None) -> Iterator[tuple[str, Sequence[str]]]:
    """Settings of an environment without one; reward settings, for an environment that computes all rewards itself."""
    if not cfg.env.name:
        yield "no environment is set (env.name)", [f"env.{name}" for name in EnvConfig.model_fields if name != "name"]
    if isinstance(task, Env) and not task.judged:
        of_pool = ("workers", "timeout_s")
        yield (
            f"all rewards come from {task.name} (an environment whose answers are judged sets judged = True)",
            [f"reward.{name}" for name in RewardConfig.model_fields if name not in of_pool],
        )


def check_async_ranks(cfg: TrainConfig, mesh: Mesh, algo: Algorithm) -> None:
    """Raise a `UserError` unless the main rank can sample for all others, as asynchronous training does."""
    if mesh.world == 1 or cfg.source.name != "async":
        return
    if cfg.engine.name not in ("assay", "vllm", "sglang"):
        raise UserError(
            f"asynchronous training with {mesh.world} processes needs engine servers: set engine.name to assay, vllm "
            "or sglang"
        )
    if mesh.tp_size > 1:
        raise UserError("asynchronous training has no tensor parallelism: set parallel.tp to 1, e.g. with mode 'fsdp'")
    if algo.needs.greedy_rollouts:
        raise UserError(
            f"asynchronous training with {mesh.world} processes has no greedy baselines: use another algo.recipe"
        )


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
    truncates = cfg.sampling.top_k or cfg.sampling.top_p < 1 or cfg.sampling.min_p or cfg.sampling.min_new_tokens
    if trains and truncates and not has.truncated_logprobs:
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


def check_quantization(cfg: TrainConfig, mesh: Mesh) -> None:
    if not cfg.lora.quantize:
        return
    if not cfg.lora.rank:
        raise UserError("lora.quantize freezes the weights, and nothing would be trained: set lora.rank above 0")
    if mesh.dp_size > 1 and cfg.parallel.mode == "fsdp":
        raise UserError("quantized weights cannot be sharded: set parallel.mode = 'ddp', or remove lora.quantize")


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


def check_judge(judge: Judging, prompt: Prompt) -> Verdict:
    """Raise if the judge fails on every answer. Returns the verdict on an empty answer."""
    texts = ("", prompt.answer, prompt.solution or prompt.answer)
    (verdicts,) = judge.judge_groups([(texts, prompt.answer, judge.fields(prompt))])
    check_verdicts(verdicts)
    return verdicts[0]


def check_prompt_lengths(collector: Collector, prompts: Sequence[Prompt], new_tokens: int, context: int) -> int:
    """Raise if a prompt fills the context; of a generated split, the first few are checked.

    Returns the length of the longest prompt if answers are limited by the engine's memory, not by the context; else 0.
    """
    checked = prompts[: MAX_GENERATED if isinstance(prompts, LazyPrompts) else MAX_READ]
    ids = collector.renderer.all_prompt_ids(checked)
    collector.check_lengths(checked, ids)
    longest, limit = max(map(len, ids)), collector.engine.info.max_length
    return longest if limit < context and longest + new_tokens > limit else 0


def check_overlap(train: Sequence[Prompt], evaluations: Mapping[str, Sequence[Prompt]], console: Console) -> None:
    """Report problems that are both in the train split and in an evaluation; refuse if all of them are."""
    for label, prompts in evaluations.items():
        if label.startswith(("start:", "after:")):
            continue  # the same problems as "before"
        shared = overlap(train, prompts)
        name = label.partition(":")[2]
        if shared.n_shared == shared.n_eval:
            raise UserError(
                f"every one of the {name} problems is in the train split (e.g. {' and '.join(shared.examples[0])}): "
                "remove repeated rows, or give task.path a folder with train.jsonl and test.jsonl that share no problem"
            )
        if shared.n_shared:
            console.warn(
                f"{shared.n_shared} of the {shared.n_eval} {name} problems are also in the train split "
                f"(e.g. {shared.examples[0]}): accuracies on them are too high"
            )
        else:
            sample = " (a sample: the split is endless)" if shared.sampled else ""
            evaluated = plural(shared.n_eval, f"{name} problem")
            console.note(f"no overlap between {shared.n_train_checked:,} train{sample} and {evaluated}")


def check_ids(train: Sequence[Prompt], evaluations: Mapping[str, Sequence[Prompt]], console: Console) -> None:
    """Warn once if several problems of a split have the same id."""
    splits = {label.partition(":")[2]: prompts for label, prompts in evaluations.items()} | {"train": train}
    repeated, example = [], ""
    for name, prompts in splits.items():
        ids = Counter(() if isinstance(prompts, LazyPrompts) else (prompt.id for prompt in prompts))
        if ids.total() > len(ids):
            repeated.append(f"{ids.total() - len(ids)} of the {ids.total()} {name} problems")
            example = example or ids.most_common(1)[0][0]
    if repeated:
        console.warn(
            f"problems with the id of another problem: {' and '.join(repeated)} (e.g. {example!r:.80}); they share its "
            "running pass rate (algo.pass_rate_low, algo.pass_rate_high) and cannot be told apart in rollouts and "
            "evaluations: give each problem its own id"
        )


MAY_DIFFER = ("name", "runs_dir", "reward.workers", "log.wandb", "log.tensorboard")  # used by rank 0 or one host only
# Hosts may have their own copies of these files: their contents are compared as prompts and tokens.
PATHS = ("model.tokenizer", "task.path", "env.path", "prompt.system_file", "prompt.few_shot_file")
PACKAGES = ("transformers", "tokenizers", "safetensors", "math-verify")
GENERATED = 16  # number of prompts that are compared if prompts are generated on demand
SAME_INPUTS = "give all ranks the same files"


def start_mesh(cfg: TrainConfig) -> Mesh:
    """Create the process grid; settings and code must be equal on all ranks."""
    timeout_s = cfg.parallel.heartbeat_timeout_s
    return init_mesh(cfg.parallel.tp, pick_device(cfg.device), code_versions() | compared_settings(cfg), timeout_s)


def compared_settings(cfg: TrainConfig) -> dict[str, str]:
    compared = [key for key, _ in keys(TrainConfig) if key not in (*MAY_DIFFER, *PATHS)]
    return {key: repr(value) + hash_of_code(value) for key in compared for value in [attrgetter(key)(cfg)]}


def hash_of_code(value: object) -> str:
    """A hash of the file that a setting such as `my_file.py:reward` names; empty for other settings."""
    file = Path(value.rpartition(":")[0]).expanduser() if isinstance(value, str) and ".py:" in value else None
    return f" (hash {digest([file.read_bytes()])})" if file and file.is_file() else ""


def code_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, and a hash of the source files of this package."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    root = Path(assay.__file__).parent
    files = sorted(file for file in root.rglob("*") if file.suffix in (".py", ".c"))
    parts = (part for file in files for part in (file.relative_to(root).as_posix().encode(), file.read_bytes()))
    return {"assay": assay.__version__} | versions | {"hash of assay's source files": digest(parts)}


def check_inputs(mesh: Mesh, prompts: Mapping[str, Sequence[Prompt]], renderer: Renderer, policy: PolicyModel) -> None:
    """Compare the prompts of each split, their tokens, and the weights of `policy`, which is not sharded yet."""
    if mesh.world == 1:
        return
    inputs = {f"{split} prompts": describe_prompts(rows) for split, rows in prompts.items()}
    ids = renderer.all_prompt_ids(next(iter(prompts.values()))[:GENERATED])
    inputs["hash of the first prompts' tokens"] = digest(json.dumps(list(one)).encode() for one in ids)
    mesh.require_equal(inputs, SAME_INPUTS)
    check_weights(mesh, "model", policy)


def check_weights(mesh: Mesh, name: str, model: nn.Module) -> None:
    """Compare the weights that the ranks have loaded; the model is not sharded yet."""
    if mesh.world > 1:
        weights = fingerprint(model.named_parameters())[:12]
        mesh.require_equal({f"fingerprint of the {name}": weights}, SAME_INPUTS)


def describe_prompts(prompts: Sequence[Prompt]) -> str:
    """Number of prompts and a hash of them."""
    compared = prompts[:GENERATED] if isinstance(prompts, LazyPrompts) else prompts
    return f"{len(prompts)} (hash {digest(map(canonical, compared))})"


def canonical(prompt: Prompt) -> bytes:
    """The same bytes for the same prompt in every process; objects that JSON cannot represent count by their type."""
    parts = [prompt.id, [dict(message) for message in prompt.messages], prompt.answer, prompt.solution]
    values = [*parts, dict(prompt.fields)]
    return json.dumps(values, skipkeys=True, default=lambda value: type(value).__name__).encode()


def digest(parts: Iterable[bytes]) -> str:
    result = hashlib.blake2b(digest_size=6)
    for part in parts:
        result.update(len(part).to_bytes(8, "big") + part)
    return result.hexdigest()


def check_replicas(tensors: Mapping[str, Tensor], counters: Mapping[str, object], step: int, mesh: Mesh) -> None:
    """Raise unless ranks that hold the same shard of a weight or moment hold the same bits.

    `counters`: progress of the run on this rank, which is compared as well.
    """
    if mesh.world == 1:
        return
    values = {key: repr(value) for key, value in counters.items()}
    parts = ((f"{name} {shard(tensor)}".strip(), local_tensor(tensor)) for name, tensor in tensors.items())
    values |= {key: text.rpartition(":")[2] for key, text in digests(parts).items()}
    mesh.require_equal(
        values,
        f"the checkpoint of step {step} is not written, because ranks no longer train the same model: resume from the "
        "last checkpoint, and test the memory and devices of that host if it happens again",
    )


def shard(tensor: Tensor) -> str:
    """Which shard of a tensor this rank holds, in the same words on all ranks that hold it."""
    grid = getattr(tensor, "device_mesh", None)
    if grid is None:
        return ""
    placements = zip(grid.mesh_dim_names, tensor.placements, strict=True)  # type: ignore[attr-defined]
    return " ".join(f"{name}={grid.get_local_rank(name)}" for name, kind in placements if not kind.is_replicate())
