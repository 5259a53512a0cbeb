"""Settings -> a run that is ready to train: new, or resumed from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from assay.config import TrainConfig
from assay.engine.base import Engine
from assay.mesh import Mesh
from assay.models import Decoder, Lora, PolicyModel, add_lora, load_adapter, pick_dtype
from assay.rewards import JudgePool, check_verdicts
from assay.rollout import Collector
from assay.rollout.episodes import check_history
from assay.runs import Run, checkpoints
from assay.runs.changes import since_checkpoint
from assay.runs.console import Console
from assay.runs.directory import check_name
from assay.runs.trackers import check_trackers, make_trackers
from assay.settings import to_toml
from assay.tasks import Task
from assay.tasks.base import UNLIMITED, LazyPrompts, prompts_of
from assay.tasks.overlap import overlap
from assay.text import Renderer
from assay.train import checkpoint, setup
from assay.train.agreement import check_inputs, start_mesh
from assay.train.apart import Apart, home_of_policy
from assay.train.critic import make_critic
from assay.train.data import PromptStream
from assay.train.faults import check_loaded
from assay.train.idle import idle_settings, risky_settings
from assay.train.optim import make_optimizer
from assay.train.parallel import parallelise
from assay.train.reference import load_reference
from assay.train.replay import make_buffer
from assay.train.stages import Parts
from assay.train.stopping import Stopping
from assay.train.sync import sync_weights
from assay.train.trust import remember
from assay.train.update import Updater
from assay.types import Prompt, UserError, Verdict

READ_FIRST, READ_AT_MOST = 64, 20_000  # prompts whose length is looked at before a run, generated or from a file


def new_run(cfg: TrainConfig, console: Console) -> Parts:
    """Everything that can fail on the user's settings fails before a run directory is made."""
    clock = time.perf_counter()
    mesh = start_mesh(cfg)
    parts = assemble(cfg, console, named_model(cfg, mesh), mesh, clock)
    if parts.algo.needs_reference:
        load_reference(parts.updater, cfg, parts.tokenizer)
    inherit_replay(parts)
    mesh.barrier()  # a rank that cannot begin ends them all before there is a run
    if mesh.is_main:
        parts.run = Run.create(Path(cfg.runs_dir), cfg.name or "run", to_toml(cfg))
        remember(cfg, begun=True)
        parts.trackers = make_trackers(cfg.log.wandb or None, cfg.log.tensorboard, parts.run)
    parts.run.path = mesh.broadcast_object(parts.run.path)
    return parts


def resume_run(cfg: TrainConfig, run: Run, console: Console) -> Parts:
    """Go on from the last sound checkpoint; whatever the run wrote after it is cut back."""
    clock = time.perf_counter()
    mesh = start_mesh(cfg)
    step, complaints = mesh.on_main(lambda: checkpoints.last_sound(run.path))
    damage: list[str] = []  # of the model that adapters were trained on
    if step is None and complaints:
        raise UserError(
            f"no checkpoint of {run.path} is sound ({complaints[0]}): delete {run.path / 'checkpoints'} to begin again"
        )
    for complaint in complaints:
        console.warn(f"{complaint}: going on from an earlier checkpoint")
    if step is not None:
        report_changes(cfg, run, step, console)
    if step is None:
        source = named_model(cfg, mesh)
    elif cfg.lora.rank:
        damage = mesh.on_main(lambda: checkpoints.problems(run.path / checkpoint.BASE))
        for line in damage:
            console.warn(f"{line}: writing it again from {cfg.model.source}")
        source = named_model(cfg, mesh) if damage else str(run.path / checkpoint.BASE)
    else:
        source = str(checkpoints.folder(run.path, step) / "model")
    adapters = checkpoints.folder(run.path, step) / checkpoint.ADAPTER if cfg.lora.rank and step is not None else None
    parts = assemble(cfg, console, source, mesh, clock, adapters)
    parts.run = run
    if damage:  # `load_adapter` has compared fingerprints: it is the same model
        checkpoint.save_base(run.path, parts.updater.policy, parts.tokenizer, mesh.is_main)
    if step is not None:
        parts.state = checkpoint.load_state(run.path, step)
        check_loaded(parts.updater.policy, step, run.path)
        parts.resumed = step > 0 or parts.state.unmeasured is None  # else it was stopped before reinforcement began
    if parts.algo.needs_reference:
        load_reference(parts.updater, cfg, parts.tokenizer, run.path if parts.resumed else None, parts.state.step)
    if step is not None:
        checkpoint.load_optimizer(run.path, step, parts.updater.policy, parts.updater.optimizer)
        if parts.critic is not None and parts.resumed:
            parts.critic.load(checkpoints.folder(run.path, step))
        if parts.replay is not None:
            checkpoint.load_replay(run.path, step, parts.replay)
        sync_weights(parts.updater.policy, parts.collector.engine, version=step)
        parts.stream.cursor = parts.state.cursor
        parts.clock -= parts.state.wall_s
    else:
        inherit_replay(parts)
    mesh.barrier()
    if mesh.is_main:
        run.cut_back(-1 if step is None else step)  # last: a resume that fails leaves the run as it was
        if parts.state.best:  # the note of it may have been cut back too, or never written
            checkpoints.set_best(run.path, **parts.state.best)
        parts.trackers = make_trackers(cfg.log.wandb or None, cfg.log.tensorboard, run)
    return parts


def report_changes(cfg: TrainConfig, run: Run, step: int, console: Console) -> None:
    """Say which settings, and whether past metrics, are not what they were when the checkpoint was saved."""
    for line in since_checkpoint(cfg, run.path, step):
        console.warn(line)
    if not checkpoints.metrics_intact(run.path, step):
        console.warn(
            f"{run.path / 'metrics.jsonl'} was cut or changed since step {step} was saved: weights are not affected, "
            "but curves and training time will lack what is missing there"
        )


def named_model(cfg: TrainConfig, mesh: Mesh) -> str:
    """The model that the settings name; one rank verifies its checksums for all."""
    return mesh.on_main(lambda: setup.model_source(cfg.model, cfg.runs_dir))


def inherit_replay(parts: Parts) -> None:
    """What a run that has no checkpoint yet begins with."""
    if parts.replay is not None and parts.cfg.replay.load:
        folder, vocab_size = parts.cfg.replay.load, parts.updater.policy.vocab_size
        checkpoints.verify(Path(folder))
        parts.replay.inherit(folder, vocab_size, parts.collector.renderer.decode)


def assemble(
    cfg: TrainConfig, console: Console, source: str, mesh: Mesh, clock: float, adapters: Path | None = None
) -> Parts:
    """`adapters`: where those of a resumed run are."""
    check_trackers(cfg.log.wandb or None, cfg.log.tensorboard)
    check_name(cfg.name or "run")
    home = home_of_policy(cfg, mesh)
    algo = setup.build_algorithm(cfg)
    dtype = pick_dtype(cfg.dtype, mesh.device)
    task = setup.build_problems(cfg.task, cfg.env)
    for warning in (*idle_settings(cfg, algo, task), *risky_settings(cfg, algo)):
        console.warn(warning)
    train = setup.take(task.prompts("train"), cfg.train.max_train_prompts, "train", endless=True)
    evaluations = evaluation_prompts(cfg, task)
    report_overlap(train, evaluations, console)
    tokenizer = setup.build_tokenizer(cfg.model, source, task)
    renderer = setup.build_renderer(cfg.prompt, tokenizer, task)
    policy = setup.build_policy(cfg.model, source, tokenizer, home, cfg.seed, dtype)
    if tokenizer.vocab_size > policy.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {policy.vocab_size}: "
            "they do not belong together; set model.tokenizer to the model's own"
        )
    if cfg.lora.rank:
        lora = Lora(cfg.lora.rank, cfg.lora.alpha, tuple(cfg.lora.targets), cfg.model.source)
        add_lora(policy, lora, cfg.seed)
    if adapters is not None:
        load_adapter(policy, adapters)
    demonstrations = setup.build_demonstrations(cfg)
    check_inputs(mesh, {"train": train, **evaluations, "sft": demonstrations}, renderer, policy)
    critic = make_critic(cfg, algo, policy, mesh, dtype)
    engine = lay_out(cfg, policy, renderer, mesh, dtype)
    setup.prepare_policy(policy, cfg.train, mesh.world)
    updater = build_updater(cfg, policy, mesh, dtype)
    updater.critic = critic if critic and critic.shared else None
    stopping = Stopping(cfg.save.grace_s, mesh)
    collector = setup.build_collector(cfg, task, engine, renderer, mesh, stopping)
    probe(collector.judge, train[0])
    if collector.env and (warning := check_history(renderer, collector.env, train[0])):
        console.warn(warning)
    context = min(cfg.model.max_length or policy.max_length, policy.max_length)
    splits = (train, *evaluations.values())
    if longest := max(check_room(collector, prompts, cfg.sampling.max_new_tokens, context) for prompts in splits):
        console.warn(
            f"engine.memory holds keys and values of {engine.info.max_length - 1} tokens, and prompts have up to "
            f"{longest}: what passes that is cut off; raise it, or lower sampling.max_new_tokens"
        )
    return Parts(
        cfg=cfg,
        run=Run(Path()),
        tokenizer=tokenizer,
        collector=collector,
        updater=updater,
        algo=replace(algo, max_length=engine.info.max_length),
        stream=PromptStream(train, cfg.seed),
        demonstrations=demonstrations,
        evaluations=evaluations,
        total_steps=total_steps(cfg, len(train)),
        state=checkpoint.State(),
        console=console,
        clock=clock,
        stopping=stopping,
        replay=make_buffer(cfg.replay),
        critic=critic,
    )


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
    return updater if cfg.train.process == "same" else Apart.of(updater, setup.own_functions(cfg.algo))


def lay_out(cfg: TrainConfig, policy: PolicyModel, renderer: Renderer, mesh: Mesh, dtype: torch.dtype) -> Engine:
    """Leave each rank its part of the policy, and give it an engine, or its part of one, that serves all of it."""
    build = partial(
        setup.build_engine, cfg.engine, policy, renderer, cfg.model.max_length, mesh.tp_group, device=mesh.device
    )
    copied = None if isinstance(policy, Decoder) else build()  # a copy of the model, to be made while that is whole
    parallelise(policy, mesh, cfg.parallel.mode, dtype)
    return copied or build()  # by now it is known how much memory is left


def probe(judge: JudgePool, prompt: Prompt) -> Verdict:
    """A judge that fails on everything is told now, not after the warm start. Gives the verdict on an empty answer."""
    texts = ("", prompt.answer, prompt.solution or prompt.answer)
    verdicts = judge.judge([(text, prompt.answer, prompt.fields) for text in texts])
    check_verdicts(verdicts)
    return verdicts[0]


def check_room(collector: Collector, prompts: Sequence[Prompt], new_tokens: int, context: int) -> int:
    """A prompt that fills the context is told now, not when it is drawn; of an endless split the first few are read.

    Returns the longest prompt's length if the engine's memory, and not the context, cuts its answer off; else 0.
    """
    some = prompts[: READ_FIRST if isinstance(prompts, LazyPrompts) else READ_AT_MOST]
    ids = collector.renderer.all_prompt_ids(some)
    collector.check_lengths(some, ids)
    longest, limit = max(map(len, ids)), collector.engine.info.max_length
    return longest if limit < context and longest + new_tokens > limit else 0


def total_steps(cfg: TrainConfig, prompts: int) -> int:
    if cfg.train.epochs and prompts >= UNLIMITED:
        raise UserError("an endless train split has no epochs: set train.steps, or train.max_train_prompts to bound it")
    if cfg.train.budget:
        return -(-cfg.train.budget // (cfg.train.prompts * cfg.train.samples))
    return -(-int(cfg.train.epochs * prompts) // cfg.train.prompts) if cfg.train.epochs else cfg.train.steps


def evaluation_prompts(cfg: TrainConfig, task: Task) -> dict[str, Sequence[Prompt]]:
    """By label and split: the problems of the periodic evaluation, and those of start, before and after."""
    final = setup.take(prompts_of(task, cfg.eval.final_split), cfg.eval.final_examples, cfg.eval.final_split)
    reinforces = cfg.train.steps or cfg.train.epochs or cfg.train.budget
    # A fresh model knows nothing before its warm start: that needs no measurement.
    warmed = reinforces and cfg.sft.steps and not cfg.model.source.startswith(setup.PRESET)
    labels = ("start", "before", "after") if warmed else ("before", "after")
    found = {f"{label}:{cfg.eval.final_split}": final for label in labels}
    if reinforces:
        periodic = setup.take(task.prompts(cfg.eval.split), cfg.eval.examples, cfg.eval.split)
        found[f"eval:{cfg.eval.split}"] = periodic
    return found


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
