"""Settings -> a run that is ready to train: new, or resumed from its last checkpoint. Inputs are checked on the way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from assay.algos import LengthLimits
from assay.config import TrainConfig
from assay.config.settings import to_toml
from assay.engine.base import Engine
from assay.mesh import Mesh
from assay.models import Decoder, Lora, PolicyModel, load_adapter, pick_dtype
from assay.rewards import JudgePool, check_verdicts
from assay.rollout import Collector
from assay.rollout.episodes import check_history
from assay.runs import Run, checkpoints
from assay.runs.console import Console
from assay.runs.directory import check_name
from assay.runs.resolve import since_checkpoint
from assay.runs.trackers import check_trackers
from assay.tasks import Task
from assay.tasks.base import LazyPrompts, overlap, prompts_of
from assay.text import Renderer, Tokenizer
from assay.train import checkpoint, components
from assay.train.checks import check_inputs, risky_settings, start_mesh, unused_settings
from assay.train.evaluation import RunEvaluator
from assay.train.faults import check_loaded
from assay.train.learner.critic import make_critic
from assay.train.learner.learner import Learner
from assay.train.learner.optim import make_optimizer
from assay.train.learner.parallel import parallelise
from assay.train.learner.reference import load_reference
from assay.train.learner.replay import Replay
from assay.train.learner.subprocess_updater import SubprocessUpdater, policy_device
from assay.train.learner.update import Updater
from assay.train.recorder import Recorder
from assay.train.run import TrainingRun
from assay.train.sources import OnPolicySource, PromptStream
from assay.train.state import Schedule
from assay.train.stopping import Stopping
from assay.train.trust import remember
from assay.types import Prompt, UserError, Verdict

READ_FIRST, READ_AT_MOST = 64, 20_000  # prompts whose length is looked at before a run, generated or from a file


def new_run(cfg: TrainConfig, console: Console) -> TrainingRun:
    """Build a run from its settings. Whatever can fail because of them fails before there is a run directory."""
    started = time.perf_counter()
    mesh = start_mesh(cfg)
    run = assemble(cfg, console, named_model(cfg, mesh), mesh, started)
    if run.learner.algo.needs.reference:
        load_reference(run.learner.updater, cfg, run.tokenizer)
    inherit_replay(run)
    mesh.barrier()  # if one rank fails, all end before there is a run
    run.directory.path = mesh.on_main(lambda: Run.create(Path(cfg.runs_dir), cfg.name or "run", to_toml(cfg)).path)
    if mesh.is_main:
        remember(cfg, begun=True)
    run.recorder.open_trackers()
    return run


def resume_run(cfg: TrainConfig, directory: Run, console: Console) -> TrainingRun:
    """Resume a run from its last intact checkpoint; whatever was written after that checkpoint is removed."""
    started = time.perf_counter()
    mesh, path = start_mesh(cfg), directory.path
    step = last_checkpoint(cfg, path, mesh, console)
    source, base_damaged = resumed_model(cfg, path, step, mesh, console)
    adapters = checkpoints.folder(path, step) / checkpoint.ADAPTER if cfg.lora.rank and step is not None else None
    run = assemble(cfg, console, source, mesh, started, directory, adapters)
    if base_damaged:  # `load_adapter` has compared fingerprints: it is the same model
        checkpoint.save_base(path, run.learner.policy, run.tokenizer, mesh.is_main)
    if step is not None:
        run.load_state_dict(checkpoint.read_state(path, step, run.state_dict().keys()))
        check_loaded(run.learner.policy, step, path)
        run.resumed = step > 0 or run.state.unmeasured is None  # else it was stopped during its first evaluation
        run.recorder.started -= run.state.wall_s
    if run.learner.algo.needs.reference:
        load_reference(run.learner.updater, cfg, run.tokenizer, path if run.resumed else None, run.state.step)
    if step is not None:
        load_tensors(run, step)
    else:
        inherit_replay(run)
    mesh.barrier()
    if mesh.is_main:
        directory.cut_back(-1 if step is None else step)  # last: a resume that fails leaves the run as it was
        if run.state.best:  # the note of it may have been removed too, or never written
            checkpoints.set_best(path, **run.state.best)
    run.recorder.open_trackers()
    return run


def last_checkpoint(cfg: TrainConfig, path: Path, mesh: Mesh, console: Console) -> int | None:
    """Step of the last intact checkpoint; None if there is none yet."""
    step, problems = mesh.on_main(lambda: checkpoints.last_sound(path))
    if step is None and problems:
        raise UserError(
            f"no checkpoint of {path} is sound ({problems[0]}): delete {path / 'checkpoints'} to begin again"
        )
    for problem in problems:
        console.warn(f"{problem}: going on from an earlier checkpoint")
    if step is not None:
        report_changes(cfg, path, step, console)
    return step


def resumed_model(cfg: TrainConfig, path: Path, step: int | None, mesh: Mesh, console: Console) -> tuple[str, bool]:
    """Where to load the model of a resumed run from, and whether the base of its adapters has to be written again."""
    if step is None:
        return named_model(cfg, mesh), False
    if not cfg.lora.rank:
        return str(checkpoints.folder(path, step) / "model"), False
    problems = mesh.on_main(lambda: checkpoints.problems(path / checkpoint.BASE))
    for problem in problems:
        console.warn(f"{problem}: writing it again from {cfg.model.source}")
    return named_model(cfg, mesh) if problems else str(path / checkpoint.BASE), bool(problems)


def load_tensors(run: TrainingRun, step: int) -> None:
    """Load moments, critic and replay buffer of a checkpoint, and give the engine the weights."""
    path, learner = run.directory.path, run.learner
    checkpoint.load_optimizer(path, step, learner.policy, learner.updater.optimizer)
    if learner.critic is not None and run.resumed:
        learner.critic.load(checkpoints.folder(path, step))
    if run.replay.buffer is not None:
        checkpoint.load_replay(path, step, run.replay.buffer)
    run.sync()


def report_changes(cfg: TrainConfig, path: Path, step: int, console: Console) -> None:
    """Warn of settings, or past metrics, that have changed since the checkpoint was saved."""
    for line in since_checkpoint(cfg, path, step):
        console.warn(line)
    if not checkpoints.metrics_intact(path, step):
        console.warn(
            f"{path / 'metrics.jsonl'} was cut or changed since step {step} was saved: weights are not affected, "
            "but curves and training time will lack what is missing there"
        )


def named_model(cfg: TrainConfig, mesh: Mesh) -> str:
    """The model that the settings name; one rank verifies its checksums for all."""
    return mesh.on_main(lambda: components.model_source(cfg.model, cfg.runs_dir))


def inherit_replay(run: TrainingRun) -> None:
    """Fill the replay buffer of a run without checkpoints from the one that `replay.load` names."""
    buffer, folder = run.replay.buffer, run.cfg.replay.load
    if buffer is not None and folder:
        checkpoints.verify(Path(folder))
        buffer.inherit(folder, run.learner.policy.vocab_size, run.collector.renderer.decode)


def assemble(
    cfg: TrainConfig,
    console: Console,
    source: str,
    mesh: Mesh,
    started: float,
    directory: Run | None = None,
    adapters: Path | None = None,
) -> TrainingRun:
    """Build all components and check their inputs. `source`: the model; `adapters`: those of a resumed run with LoRA.

    Without a `directory`, the run gets one whose path is still to be set.
    """
    check_trackers(cfg.log.wandb or None, cfg.log.tensorboard)
    check_name(cfg.name or "run")
    home = policy_device(cfg, mesh)
    algo = components.build_algorithm(cfg)
    dtype = pick_dtype(cfg.dtype, mesh.device)
    task = components.build_problems(cfg.task, cfg.env)
    for warning in (*unused_settings(cfg, algo, task), *risky_settings(cfg, algo)):
        console.warn(warning)
    train = components.take(task.prompts("train"), cfg.train.max_train_prompts, "train", endless=True)
    evaluations = evaluation_prompts(cfg, task)
    report_overlap(train, evaluations, console)
    tokenizer = components.build_tokenizer(cfg.model, source, task)
    renderer = components.build_renderer(cfg.prompt, tokenizer, task)
    policy = load_policy(cfg, source, tokenizer, home, dtype, adapters)
    demonstrations = components.build_demonstrations(cfg)
    check_inputs(mesh, {"train": train, **evaluations, "sft": demonstrations}, renderer, policy)
    critic = make_critic(cfg, algo, policy, mesh, dtype)
    engine = shard_and_build_engine(cfg, policy, renderer, mesh, dtype)
    check_capabilities(cfg, engine, reinforces(cfg), console)
    components.prepare_policy(policy, cfg.train, mesh.world)
    updater = build_updater(cfg, policy, mesh, dtype)
    updater.critic = critic if critic and critic.shared else None
    stopping = Stopping(cfg.save.grace_s, mesh)
    collector = components.build_collector(cfg, task, engine, renderer, mesh, stopping)
    check_collector(cfg, collector, train, evaluations, policy, console)
    algo.limits = LengthLimits(cfg.sampling.max_new_tokens, engine.info.max_length)
    schedule = Schedule.of(cfg.train, len(train))
    directory = directory or Run(Path())
    what = "answers" if collector.env is None else "steps"
    judge_warning = (
        f"{collector.reward_source} failed on some {what} (status/error), which count as 0: see the rollouts"
    )
    return TrainingRun(
        cfg=cfg,
        directory=directory,
        schedule=schedule,
        collector=collector,
        source=OnPolicySource(cfg, algo, collector, PromptStream(train, cfg.seed), schedule, stopping),
        learner=Learner(cfg, algo, updater, schedule, critic),
        replay=Replay(cfg.replay, cfg.seed),
        evaluator=RunEvaluator(cfg, collector, evaluations, directory, console),
        recorder=Recorder(cfg, directory, console, mesh, judge_warning, started),
        stopping=stopping,
        demonstrations=demonstrations,
    )


def load_policy(
    cfg: TrainConfig, source: str, tokenizer: Tokenizer, home: torch.device, dtype: torch.dtype, adapters: Path | None
) -> PolicyModel:
    """The policy, whole, with its adapters if it has some."""
    policy = components.build_policy(cfg.model, source, tokenizer, home, cfg.seed, dtype)
    if tokenizer.vocab_size > policy.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {policy.vocab_size}: "
            "they do not belong together; set model.tokenizer to the model's own"
        )
    if cfg.lora.rank:
        lora = Lora(cfg.lora.rank, cfg.lora.alpha, tuple(cfg.lora.targets), cfg.model.source)
        policy.add_lora(lora, cfg.seed)
    if adapters is not None:
        load_adapter(policy, adapters)
    return policy


def build_updater(cfg: TrainConfig, policy: PolicyModel, mesh: Mesh, dtype: torch.dtype) -> Updater:
    updater = Updater(
        policy,
        make_optimizer(policy, cfg.optim),
        temperature=cfg.sampling.temperature,
        max_grad_norm=cfg.optim.max_grad_norm,
        token_budget=cfg.train.token_budget,
        offload_reference=cfg.train.offload_reference and mesh.world == 1,  # parts of a model stay where they are
        dtype=dtype,
        mesh=mesh,
    )
    return updater if cfg.train.process == "same" else SubprocessUpdater.of(updater)


def shard_and_build_engine(
    cfg: TrainConfig, policy: PolicyModel, renderer: Renderer, mesh: Mesh, dtype: torch.dtype
) -> Engine:
    """Shard the policy over the ranks, and build the engine, or this rank's part of it, that serves all of it."""
    build = partial(
        components.build_engine, cfg.engine, policy, renderer, cfg.model.max_length, mesh.tp_group, device=mesh.device
    )
    copies_model = components.names_own_backend(cfg.engine) or not isinstance(policy, Decoder)
    copied = build() if copies_model else None  # while the model is whole
    parallelise(policy, mesh, cfg.parallel.mode, dtype)
    return copied or build()  # by now it is known how much memory is left


def check_capabilities(cfg: TrainConfig, engine: Engine, trains: bool, console: Console) -> None:
    """Refuse an engine that cannot serve this run, and warn of everything that degrades. `trains`: not only SFT."""
    has, name = engine.info.capabilities, cfg.engine.name
    if trains and not has.temperature_logprobs:
        raise UserError(
            f"engine {name} does not report log-probabilities at the sampling temperature (temperature_logprobs), "
            "which training needs: set engine.name to auto, or to an engine that does"
        )
    if not has.exact_seeds:
        console.warn(
            f"engine {name} has no exact seeds (exact_seeds): the same seed does not give the same tokens again, and a "
            "resumed run does not repeat what it had sampled"
        )
    if not has.fingerprint:
        console.warn(
            f"engine {name} has no fingerprint of its weights (fingerprint): weights are not verified after a sync"
        )
    for metric in ("entropy", "kept_mass"):
        if trains and not getattr(has, metric):
            console.warn(f"engine {name} does not report {metric}: the metric sampling/{metric} is left out")


def check_collector(
    cfg: TrainConfig,
    collector: Collector,
    train: Sequence[Prompt],
    evaluations: Mapping[str, Sequence[Prompt]],
    policy: PolicyModel,
    console: Console,
) -> None:
    """Judge, environment and prompt lengths: what would fail or be cut off later is reported now."""
    check_judge(collector.judge, train[0])
    if collector.env and (warning := check_history(collector.renderer, collector.env, train[0])):
        console.warn(warning)
    context = min(cfg.model.max_length or policy.max_length, policy.max_length)
    splits = (train, *evaluations.values())
    new_tokens = cfg.sampling.max_new_tokens
    if longest := max(check_prompt_lengths(collector, prompts, new_tokens, context) for prompts in splits):
        console.warn(
            f"engine.memory holds keys and values of {collector.engine.info.max_length - 1} tokens, and prompts have "
            f"up to {longest}: what passes that is cut off; raise it, or lower sampling.max_new_tokens"
        )


def check_judge(judge: JudgePool, prompt: Prompt) -> Verdict:
    """Report a judge that always fails before training. Returns the verdict on an empty answer."""
    texts = ("", prompt.answer, prompt.solution or prompt.answer)
    verdicts = judge.judge([(text, prompt.answer, prompt.fields) for text in texts])
    check_verdicts(verdicts)
    return verdicts[0]


def check_prompt_lengths(collector: Collector, prompts: Sequence[Prompt], new_tokens: int, context: int) -> int:
    """Raise if a prompt fills the context; of a generated split, the first few are checked.

    Returns the length of the longest prompt if the engine's memory, and not the context, limits answers; else 0.
    """
    some = prompts[: READ_FIRST if isinstance(prompts, LazyPrompts) else READ_AT_MOST]
    ids = collector.renderer.all_prompt_ids(some)
    collector.check_lengths(some, ids)
    longest, limit = max(map(len, ids)), collector.engine.info.max_length
    return longest if limit < context and longest + new_tokens > limit else 0


def evaluation_prompts(cfg: TrainConfig, task: Task) -> dict[str, Sequence[Prompt]]:
    """By label and split: the problems of the periodic evaluation, and those of start, before and after."""
    final = components.take(prompts_of(task, cfg.eval.final_split), cfg.eval.final_examples, cfg.eval.final_split)
    # A fresh model knows nothing before its warm start: that needs no measurement.
    warmed = reinforces(cfg) and cfg.sft.steps and not cfg.model.source.startswith(components.PRESET)
    labels = ("start", "before", "after") if warmed else ("before", "after")
    found = {f"{label}:{cfg.eval.final_split}": final for label in labels}
    if reinforces(cfg):
        periodic = components.take(task.prompts(cfg.eval.split), cfg.eval.examples, cfg.eval.split)
        found[f"eval:{cfg.eval.split}"] = periodic
    return found


def reinforces(cfg: TrainConfig) -> bool:
    """Whether the run consists of more than a warm start."""
    return bool(cfg.train.steps or cfg.train.epochs or cfg.train.budget)


def report_overlap(train: Sequence[Prompt], evaluations: dict[str, Sequence[Prompt]], console: Console) -> None:
    for label, prompts in evaluations.items():
        if label.startswith(("start:", "after:")):
            continue  # the same problems as before
        found = overlap(train, prompts)
        name = label.partition(":")[2]
        if found.n_shared == found.n_eval:
            raise UserError(
                f"every one of the {name} problems is in the train split: give task.path a folder with train.jsonl and "
                "test.jsonl, or set eval.final_split = 'validation', which is carved from the train split"
            )
        if found.n_shared:
            console.warn(
                f"{found.n_shared} of the {found.n_eval} {name} problems are in the train split too "
                f"(e.g. {found.examples[0]}): accuracies on them are too good to be true"
            )
        else:
            sample = " (a sample: the split is endless)" if found.sampled else ""
            console.note(
                f"no overlap between {found.n_train_checked:,} train{sample} and {found.n_eval:,} {name} problems"
            )
