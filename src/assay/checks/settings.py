"""Rules on settings, data and judge that need neither torch nor a model: before a run, nothing has been measured yet.

`assay train`, `assay train --dry-run` and `assay doctor` apply the same rules: `check_settings` and `check_judge` raise
what a run refuses, the others yield causes. A run shows each cause as a warning, and `assay doctor` lists them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from assay.checks.causes import Diagnosis, now
from assay.checks.diagnosis import explain_leakage
from assay.config import EnvConfig, ModelConfig, RewardConfig, TrainConfig
from assay.config.settings import keys
from assay.envs import Env
from assay.rewards import Judging, check_verdicts
from assay.runs.directory import check_name, setting
from assay.runs.trackers import check_trackers
from assay.tasks import Task
from assay.tasks.base import LazyPrompts, overlap
from assay.types import INVALID_REWARD, Problem, Prompt, Status, UserError, Verdict, plural

if TYPE_CHECKING:
    from assay.algos import Algorithm, RunFacts


PRESET = "preset:"  # in front of the name of a model that is not trained yet
PRESET_TOKENIZERS = ("words", "characters")  # values of model.tokenizer that name no tokenizer


MAX_ANSWERS = 1_000_000  # per step; published runs use hundreds to thousands


def check_settings(cfg: TrainConfig) -> None:
    """Raise a `UserError` if settings are invalid or contradict each other."""
    check_trackers(cfg.log)
    check_name(cfg.name or "run")
    if cfg.lora.quantize and not cfg.lora.rank:
        raise UserError(
            Problem("lora.quantize freezes the weights, and nothing would be trained", "set lora.rank above 0")
        )
    answers = cfg.train.prompts * cfg.train.samples
    if answers > MAX_ANSWERS:
        sizes = f"{cfg.train.prompts:,} prompts x {cfg.train.samples:,} samples"
        what = f"{sizes} are {answers:,} answers per step, more than {MAX_ANSWERS:,}"
        raise UserError(Problem(what, "lower train.prompts or train.samples"))
    check_cluster(cfg)
    if cfg.train.deterministic:
        check_deterministic(cfg)
    if cfg.train.stop_early and (not cfg.eval.every or cfg.eval.split == "test"):
        what = "train.stop_early needs periodic evaluations on problems that are not the test split"
        raise UserError(Problem(what, "set eval.every, and eval.split = 'validation'"))


def check_deterministic(cfg: TrainConfig) -> None:
    """Raise if a part of the run depends on time, so that `train.deterministic` cannot be kept."""
    causes = {
        "asynchronous training, whose batches depend on how fast groups are sampled": (
            cfg.source.name == "async" and cfg.source.max_staleness > 0,
            "set source.max_staleness = 0",
        ),
        f"engine.name = '{cfg.engine.name}', whose servers compute together what arrives together": (
            cfg.engine.name in SERVER_SECTIONS,
            "set it to 'auto'",
        ),
        "reference.url, whose server computes together what arrives together": (
            bool(cfg.reference.url),
            "set algo.reference instead",
        ),
        "env.max_seconds, which ends episodes by the clock": (cfg.env.max_seconds > 0, "set env.max_steps instead"),
    }
    for cause, (applies, remedy) in causes.items():
        if applies:
            raise UserError(Problem(f"train.deterministic = true cannot be combined with {cause}", remedy))


SERVER_SECTIONS = {"assay": "server", "vllm": "vllm", "sglang": "sglang"}  # of the settings, by engine


def check_cluster(cfg: TrainConfig) -> None:
    """Raise if settings contradict `cluster`."""
    cluster = cfg.cluster
    if cluster.kind == "none" or not cluster.engines:
        return
    check_placed_servers(cfg, "cluster.engines", apart=cluster.place == "apart")
    if cfg.engine.name == "assay" and cluster.gpus_per_engine > 1:
        what = f"cluster.gpus_per_engine = {cluster.gpus_per_engine}, but a server of the engine assay uses one GPU"
        raise UserError(Problem(what, "set it to 1 and raise cluster.engines, or use the engine vllm"))


def check_placed_servers(cfg: TrainConfig, option: str, apart: bool = True) -> None:
    """Raise if settings contradict servers that a cluster places, as `option` demands. `apart`: not beside learners."""
    engine = cfg.engine
    if engine.name not in SERVER_SECTIONS:
        what = f"{option}: engine {engine.name} has no servers"
        raise UserError(Problem(what, f"set engine.name to assay, vllm or sglang, or leave out {option}"))
    section = SERVER_SECTIONS[engine.name]
    changed = changed_keys(getattr(cfg, section))
    if "urls" in changed:
        what = f"{option} starts servers, and {section}.urls names running ones"
        raise UserError(Problem(what, "leave out one of them"))
    if placed := [key for key in ("servers", "devices", "port") if key in changed]:
        what = f"{section}.{placed[0]} is for servers on the trainer's node, and {option} starts them elsewhere"
        raise UserError(Problem(what, "leave it out"))
    if engine.sleep_while_training and apart:
        what = f"engine.sleep_while_training has no use with {option}, where servers have GPUs of their own"
        raise UserError(Problem(what, "leave it out"))


def changed_keys(section: BaseModel) -> list[str]:
    """The settings of a section that differ from their defaults."""
    defaults = type(section)()
    return [key for key in type(section).model_fields if getattr(section, key) != getattr(defaults, key)]


def check_sizes(cfg: TrainConfig, context: int, hidden: int = 0) -> None:
    """Raise if answers cannot fit into the context of the model, or adapters are larger than what they adapt.

    `context`: longest sequence of the model; `hidden`: its width, if it is known.
    """
    context = min(cfg.model.max_length or context, context)
    for key, tokens in (
        ("sampling.max_new_tokens", cfg.sampling.max_new_tokens),
        ("eval.max_new_tokens", cfg.eval.max_new_tokens),
    ):
        if tokens > context:
            more = "" if context < cfg.model.max_length else ", or raise model.max_length"
            what = f"{key} = {tokens:,} is more than the context of {context:,} tokens, which holds the prompt as well"
            raise UserError(Problem(what, f"lower it{more}"))
    if 0 < hidden < cfg.lora.rank:
        what = f"lora.rank = {cfg.lora.rank:,} is above the width of the model, {hidden:,}"
        raise UserError(Problem(what, "lower it, e.g. to 16, or set it to 0 to train all weights"))


def settings_problems(
    cfg: TrainConfig, algo: Algorithm | None, task: Task | None, parameters: int | None
) -> Iterator[Diagnosis]:
    """Settings that keep a run from learning, harm it or have no effect. Unknown arguments (None) are left out.

    `task`: of the run, or its environment. `parameters`: of the model.
    """
    complete = cfg.model_dump() | ({} if algo is None else {"algo": dict(algo.settings)})
    yield from diagnose_settings(complete, parameters)
    if algo is not None:
        yield from risky_settings(cfg, algo)
        yield from unused_settings(cfg, algo, task)
        yield from unused_tokenizer(cfg.model)


def unused_settings(cfg: TrainConfig, algo: Algorithm, task: Task | None = None) -> Iterator[Diagnosis]:
    """Settings that differ from their default and have no effect. The recipe sets the defaults of algorithm
    settings.
    """
    from assay.algos import complete_settings

    defaults = {key: field.get_default(call_default_factory=True) for key, field in keys(TrainConfig)}
    defaults |= {f"algo.{name}": value for name, value in complete_settings(cfg.algo.recipe)}
    explicit_keys = {f"algo.{name}" for name in cfg.algo.model_fields_set}
    for reason, names in (*_unused_with_problems(cfg, task), *algo.unused(run_facts(cfg, algo))):
        for name in names:
            is_set = name in explicit_keys or not name.startswith("algo.")
            if is_set and attrgetter(name)(cfg) != defaults[name]:
                yield Diagnosis("unused_setting", f"{name} has no effect", reason)


def unused_tokenizer(cfg: ModelConfig) -> Iterator[Diagnosis]:
    if cfg.tokenizer in PRESET_TOKENIZERS and cfg.source and not cfg.source.startswith(PRESET):
        why = f"{' and '.join(map(repr, PRESET_TOKENIZERS))} are for presets, and {cfg.source} has its own tokenizer"
        yield Diagnosis("unused_setting", "model.tokenizer has no effect", why)


def risky_settings(cfg: TrainConfig, algo: Algorithm) -> Iterator[Diagnosis]:
    """Settings that harm learning."""
    if cfg.sampling.truncates:
        what = "sampling is truncated (top_k, top_p, min_p or min_new_tokens)"
        yield Diagnosis("risky_setting", what, "importance ratios are inexact; see sampling/kept_mass")
    for warning in algo.warnings(run_facts(cfg, algo)):
        yield Diagnosis("risky_setting", warning, "")


def run_facts(cfg: TrainConfig, algo: Algorithm) -> RunFacts:
    from assay.algos import RunFacts

    largest_batch = cfg.train.prompts + cfg.replay.groups
    updates = algo.update_count(largest_batch) * cfg.train.passes
    stale = cfg.replay.groups > 0 or (cfg.source.name == "async" and cfg.source.max_staleness > 0)
    # Recomputed log-probabilities come from the policy before the update, whichever policy has sampled.
    stale_ratios = stale and not algo.needs.trainer_logprobs
    return RunFacts(episodes=bool(cfg.env.name), updates=updates, stale_ratios=stale_ratios)


def _unused_with_problems(cfg: TrainConfig, task: Task | None) -> Iterator[tuple[str, Sequence[str]]]:
    """Settings of parts that the run does not have; reward settings, for an environment that computes them."""
    yield from _unused_sections(cfg)
    if cfg.cluster.kind == "none":
        yield "set cluster.kind = 'ray'", [f"cluster.{key}" for key in changed_keys(cfg.cluster)]
    if not cfg.env.name:
        yield "no environment is set (env.name)", [f"env.{name}" for name in EnvConfig.model_fields if name != "name"]
    if isinstance(task, Env) and not task.judged:
        of_pool = ("workers", "timeout_s")
        yield (
            f"all rewards come from {task.name} (an environment whose answers are judged sets judged = True)",
            [f"reward.{name}" for name in RewardConfig.model_fields if name not in of_pool],
        )


def _unused_sections(cfg: TrainConfig) -> Iterator[tuple[str, Sequence[str]]]:
    def all_but(section: str, *used: str) -> list[str]:
        return [f"{section}.{name}" for name in type(getattr(cfg, section)).model_fields if name not in used]

    if not cfg.lora.rank:
        yield "all weights are trained (lora.rank = 0)", all_but("lora", "rank", "quantize")
    if "judge" not in (cfg.reward.function, *cfg.reward.functions):
        yield "no model judges answers (reward.function = 'judge')", all_but("judge")
    for engine, section in SERVER_SECTIONS.items():
        if cfg.engine.name != engine:
            yield f"engine.name is not '{engine}'", all_but(section)
    if cfg.source.name != "async":
        yield "source.name is not 'async'", all_but("source", "name")
    if cfg.optim.precision == "float32":
        yield "optim.precision is 'float32'", ["optim.offload"]
    if cfg.optim.name != "muon":
        yield "optim.name is not 'muon'", ["optim.momentum"]
    if cfg.optim.schedule == "constant":
        yield "optim.schedule is 'constant'", ["optim.min_lr_ratio"]
    if not cfg.reward.length:
        yield "reward.length is 0", ["reward.target_length"]
    if not cfg.reward.format:
        yield "reward.format is 0", ["reward.format_pattern"]


def check_judge(judge: Judging, prompt: Prompt, warn: Callable[[str], None] | None = None) -> Verdict:
    """Raise if the judge fails on every answer, `warn` if it fails on some. Returns the verdict on an empty answer."""
    texts = ("", prompt.answer, prompt.solution or prompt.answer)
    (verdicts,) = judge.judge_groups([(texts, prompt.answer, judge.fields(prompt))])
    check_verdicts(verdicts)
    if invalid := next((verdict.detail for verdict in verdicts if INVALID_REWARD in verdict.detail), ""):
        raise UserError(f"judging an answer to {prompt.id} failed ({invalid}): scale the rewards down")
    failed = [(text, v) for text, v in zip(texts, verdicts, strict=True) if v.status in (Status.ERROR, Status.TIMEOUT)]
    if failed and warn is not None:
        text, verdict = failed[0]
        what = f"judging the answer {text!r:.60} to {prompt.id} failed ({verdict.detail})"
        warn(f"{what}, and answers that were not judged are not trained on")
    return verdicts[0]


def data_problems(
    cfg: TrainConfig, train: Sequence[Prompt], evaluations: Mapping[str, Sequence[Prompt]], note: Callable[[str], None]
) -> Iterator[Diagnosis]:
    """Problems of an evaluation that are also in the train split, and repeated ids. `evaluations`: by label.

    `note` gets a line for each split that shares no problem with the train split.
    """
    for label, prompts in evaluations.items():
        if label in ("start", "after"):
            continue  # the same problems as "before"
        split, shared = cfg.eval.split_of(label), overlap(train, prompts)
        if shared.n_shared:
            yield explain_leakage(split, shared.n_shared, shared.n_eval, shared.examples[0])
        else:
            sample = " (a sample: the split is endless)" if shared.sampled else ""
            evaluated = plural(shared.n_eval, f"{split} problem")
            note(f"no overlap between {shared.n_train_checked:,} train{sample} and {evaluated}")
    if cfg.train.prompts > len(train):
        problems = plural(len(train), "problem")
        yield Diagnosis(
            "risky_setting",
            f"train.prompts = {cfg.train.prompts:,}, but the train split has {problems}, so each step repeats some",
            f"lower train.prompts to at most {len(train):,}, or raise train.samples instead",
        )
    splits = {cfg.eval.split_of(label): prompts for label, prompts in evaluations.items()}
    yield from repeated_ids(splits | {"train": train})


def repeated_ids(splits: Mapping[str, Sequence[Prompt]]) -> Iterator[Diagnosis]:
    """A cause if several problems of a split have the same id."""
    repeated, example = [], ""
    for name, prompts in splits.items():
        ids = Counter(() if isinstance(prompts, LazyPrompts) else (prompt.id for prompt in prompts))
        if ids.total() > len(ids):
            repeated.append(f"{ids.total() - len(ids)} of the {ids.total()} {name} problems")
            example = example or ids.most_common(1)[0][0]
    if repeated:
        yield Diagnosis(
            "repeated_ids",
            f"problems with the id of another problem: {' and '.join(repeated)} (e.g. {example!r:.80}); they share its "
            "running pass rate (algo.pass_rate_low, algo.pass_rate_high) and cannot be told apart in rollouts and "
            "evaluations",
            "give each problem its own id",
        )


# Rewards, batch sizes and learning rates

LARGE = 50_000_000  # parameters; smaller models need and bear learning rates that destroy larger ones
SMALL_BATCH = 128  # answers per step
# Learning rates that runs of this project and published runs have trained with, widened by a factor of 3 to 10 on
# both sides. Configs of this repository: 1e-6 to 3e-5 for 135M to 1.5B parameters (1e-5 is already too high for
# 1.5B), 4e-4 to 1e-2 for presets. Published RL with AdamW: 1e-7 (70B) to 1e-5; LoRA: 10 to 100 times as high.
# (optimizer or kind, large model): lowest, highest
REASONABLE: dict[tuple[str, bool], tuple[float, float]] = {
    ("full", True): (1e-8, 1e-4),
    ("full", False): (1e-6, 3e-2),
    ("lora", True): (1e-7, 3e-3),
    ("lora", False): (1e-6, 1e-1),
    ("muon", True): (1e-6, 1e-1),
    ("muon", False): (1e-5, 3e-1),
    ("sft", True): (1e-7, 1e-3),
    ("sft", False): (1e-6, 1e-1),
}


def diagnose_settings(config: Mapping[str, Any], parameters: int | None = None) -> Iterator[Diagnosis]:
    """`config`: complete settings, including the recipe's. `parameters`: their number in the model, if known."""
    if equal := always_equal_reward(config):
        yield Diagnosis("zero_loss", f"every answer gets the same reward, because {equal[0]}", equal[1])
    if setting(config, "train.samples") == 1 and setting(config, "algo.drop_zero_variance"):
        yield Diagnosis(
            "zero_loss",
            "algo.drop_zero_variance removes every group, because a group of one answer has no variance",
            f"raise {now(config, 'train.samples')}, or set algo.drop_zero_variance = false",
        )
    if cause := small_batch(config, parameters):
        yield cause
    if parameters is not None:
        yield from far_off_learning_rates(config, parameters)
    steps, warmup = setting(config, "train.steps"), setting(config, "optim.warmup") or 0
    fixed = not setting(config, "train.epochs") and not setting(config, "train.budget")
    if steps and fixed and warmup >= steps:
        yield Diagnosis(
            "learning_rate_low",
            f"the warm-up of {warmup} steps is not shorter than the run, so {now(config, 'optim.lr')} is not reached",
            f"lower {now(config, 'optim.warmup')}, or raise {now(config, 'train.steps')}",
        )


def small_batch(config: Mapping[str, Any], parameters: int | None) -> Diagnosis | None:
    """Few answers per step: noise determines the direction of an update. Presets on CPUs learn with fewer."""
    samples = setting(config, "train.samples") or 0
    answers = samples * ((setting(config, "train.prompts") or 0) + (setting(config, "replay.groups") or 0))
    if answers >= SMALL_BATCH or not answers or (parameters is not None and parameters < LARGE):
        return None
    return Diagnosis(
        "small_batch",
        f"each step has only {answers} answers, so its gradient is noisy (published runs use hundreds to thousands)",
        f"raise {now(config, 'train.prompts')} or {now(config, 'train.samples')}",
    )


def always_equal_reward(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the settings give every answer the same reward, and what to change; None if they do not."""
    reward = setting(config, "reward") or {}
    if reward.get("functions"):
        weights = reward.get("weights") or [1.0]
        return None if any(weights) else ("all reward.weights are 0", "set reward.weights")
    if reward.get("function") or setting(config, "env.name"):
        return None  # an environment may compute its own rewards
    values = {reward.get(name) for name in ("correct", "wrong", "unparsable")}
    accuracy = reward.get("accuracy") and len(values) > 1
    if accuracy or reward.get("format") or reward.get("length"):
        return None
    if not reward.get("accuracy"):
        return "reward.accuracy, reward.format and reward.length are 0", "set reward.accuracy = 1"
    return f"reward.correct, reward.wrong and reward.unparsable are all {values.pop():g}", "set reward.correct = 1"


def far_off_learning_rates(config: Mapping[str, Any], parameters: int) -> Iterator[Diagnosis]:
    large = parameters >= LARGE
    kind = "lora" if setting(config, "lora.rank") else "full"
    trains = any(setting(config, f"train.{key}") for key in ("steps", "epochs", "budget"))
    rates = []
    if trains:
        rates.append(("optim.lr", kind))
        rates += [("optim.matrix_lr", "muon")] if setting(config, "optim.name") == "muon" else []
    if setting(config, "sft.steps"):
        rates.append(("sft.lr", "sft"))
        rates += [("sft.matrix_lr", "muon")] if setting(config, "sft.optimizer") == "muon" else []
    size = f"{parameters / 1e6:,.{1 if parameters < 1e7 else 0}f}M parameters"
    what = {"lora": "LoRA", "muon": "Muon", "sft": "supervised fine-tuning", "full": "training of all weights"}
    for key, kind in rates:
        value = setting(config, key)
        low, high = REASONABLE[kind, large]
        if value is None or low <= value <= high:
            continue
        name, change = ("learning_rate_low", "raise") if value < low else ("learning_rate_high", "lower")
        yield Diagnosis(
            name,
            f"{key} = {value:g} is {'below' if value < low else 'above'} the range of learning rates that work for "
            f"{what[kind]} of a model with {size} ({low:g} to {high:g})",
            f"{change} {key}",
        )
