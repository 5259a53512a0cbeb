"""Settings -> a run that is ready to train: a new one, or one resumed from its last checkpoint.

Both call `assemble`, which builds every component and checks the inputs. So does a dry run (see `dry_run`).

`carried_out` explains how a run ends: errors as one line with the call that resumes it, stop requests, and a complete
run whose updates were all skipped.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from assay.algos import LengthLimits
from assay.build.cost import check_before_loading, check_reference, checkpoint_bytes, disk_warning
from assay.build.models import (
    build_collector,
    build_engine,
    build_policy,
    build_renderer,
    build_tokenizer,
    check_capabilities,
    check_collector,
    choose_token_budget,
    is_custom_backend,
    model_source,
    prepare_policy,
    set_up_threads,
)
from assay.build.problems import (
    build_algorithm,
    build_demonstrations,
    build_problems,
    check_texts,
    select_prompts,
    take,
)
from assay.build.trust import extend_trust, remember_trust
from assay.checks.settings import PRESET, check_judge, check_settings, check_sizes, data_problems, settings_problems
from assay.config import CLUSTER_MEMBER, RewardConfig, TrainConfig
from assay.config.settings import to_toml
from assay.engine.base import BaseEngine
from assay.mesh import Mesh
from assay.models import Decoder, Lora, PolicyModel, load_adapter, pick_dtype
from assay.models.device import deterministic, use_expandable_segments
from assay.rollout import Collector
from assay.runs import Run, checkpoints
from assay.runs.console import Console, is_distributed, is_main
from assay.runs.directory import check_name, check_writable, free_name, read_metrics
from assay.runs.files import disk_error, read_json, write_text
from assay.runs.metrics import non_finite_terms
from assay.runs.resolve import changes_since_checkpoint
from assay.tasks import Task
from assay.tasks.base import NoSuchSplit, prompts_of
from assay.tasks.registry import build_judge_pool
from assay.text import Renderer, Tokenizer
from assay.training import checkpoint
from assay.training.async_source import AsyncSource
from assay.training.learner.critic import make_critic
from assay.training.learner.learner import Learner, load_reference
from assay.training.learner.low_memory import Precision, lower_precision
from assay.training.learner.optim import make_optimizer
from assay.training.learner.subprocess_updater import SubprocessUpdater, policy_device
from assay.training.learner.update import Updater
from assay.training.parallel import check_inputs, check_layout, parallelise, start_mesh
from assay.training.progress import Schedule, Stopping
from assay.training.recorder import Recorder, RunEvaluator
from assay.training.run import TrainingRun
from assay.training.sources import OnPolicySource, PromptStream, Replay
from assay.training.sync import PROBE_PROMPTS, Method, WeightSync, probe_sequences, verify_method
from assay.types import Progress, Prompt, UserError

CHECKED_TEXTS = 1_000  # prompts and solutions that a run tokenizes at its start; a dry run checks more


def new_run(cfg: TrainConfig, console: Console) -> TrainingRun:
    """Build a run from its settings. Errors in the settings are raised before the run directory is created."""
    started = time.perf_counter()
    require_command_line(cfg)
    with deterministic(cfg.train.deterministic, cfg.device):
        mesh = start_mesh(cfg)
        planned = mesh.on_main(lambda: planned_name(cfg, console))
        run = assemble(cfg, console, named_model(cfg, mesh), mesh, started)
        if run.learner.algo.needs.reference:
            load_reference(run.learner.updater, cfg, run.tokenizer, console)
        inherit_replay(run)
    mesh.barrier()  # if one rank fails, all ranks end before the run directory is created
    run.directory.path = mesh.on_main(lambda: Run.create(Path(cfg.runs_dir), cfg.name or "run", to_toml(run.cfg)).path)
    if run.directory.name != planned:  # another process has created a run of this name meanwhile
        console.note(f"{planned} exists: this run is {run.directory.name}")
    if mesh.is_main:
        remember_trust(cfg, started=True)
    run.recorder.open()
    return run


def require_command_line(cfg: TrainConfig) -> None:
    """Raise a `UserError` if Ray has to start training processes, which only `assay train` asks it to."""
    if cfg.cluster.kind == "ray" and not os.environ.get(CLUSTER_MEMBER):
        raise UserError("cluster.kind = 'ray' is for the command line, `assay train`: leave it out here")


def planned_name(cfg: TrainConfig, console: Console) -> str:
    """The name of the new run. Raises unless the run can be created."""
    wanted = cfg.name or "run"
    check_name(wanted)
    check_writable(Path(cfg.runs_dir))
    name = free_name(Path(cfg.runs_dir), wanted)
    if name != wanted:
        console.note(f"{wanted} exists: this run is {name}")
    return name


def resume_run(cfg: TrainConfig, directory: Run, console: Console) -> TrainingRun:
    """Resume a run from its last intact checkpoint. Everything that was written after that checkpoint is deleted."""
    started = time.perf_counter()
    require_command_line(cfg)
    with deterministic(cfg.train.deterministic, cfg.device):
        mesh, path = start_mesh(cfg), directory.path
        step = last_checkpoint(cfg, path, mesh, console)
        source, base_damaged = resumed_model(cfg, path, step, mesh, console)
        adapters = checkpoints.folder(path, step) / checkpoint.ADAPTER if cfg.lora.rank and step is not None else None
        run = assemble(cfg, console, source, mesh, started, directory, adapters)
        learner = run.learner
        if base_damaged:  # replaced by the model of the settings; `load_adapter` has compared fingerprints
            checkpoint.save_base(path, learner.policy, run.tokenizer, mesh.is_main)
        if step is not None:
            state = checkpoint.read_state(path, step, run.state_dict().keys())
            run.load_state_dict(state, checkpoint.load_queue(path, step))
            # Else it was stopped in its warm start or its first evaluation.
            run.resumed = step > 0 or (run.state.unmeasured is None and not run.state.sft_step)
            run.recorder.started -= run.state.wall_s
        if learner.algo.needs.reference:
            load_reference(learner.updater, cfg, run.tokenizer, console, path if run.resumed else None, run.state.step)
        if step is not None:
            load_tensors(run, step)
        else:
            inherit_replay(run)
    mesh.barrier()
    if mesh.is_main:
        directory.truncate_after(-1 if step is None else step)  # last: a resume that fails changes nothing
        if run.state.best:  # best.json may have been deleted as well, or never written
            checkpoints.set_best(path, **run.state.best)
    run.recorder.open()
    return run


def last_checkpoint(cfg: TrainConfig, path: Path, mesh: Mesh, console: Console) -> int | None:
    """Step of the last intact checkpoint (None if there is none yet). Warns of what has changed since it was saved."""
    step, problems = mesh.on_main(lambda: checkpoints.last_intact(path))
    if step is None and problems:
        raise UserError(
            f"no checkpoint of {path} is intact ({problems[0]}): delete {path / 'checkpoints'} to start from step 0"
        )
    warnings = [f"{problem}: resuming from an earlier checkpoint" for problem in problems]
    if step is None:
        warnings.append(f"run {path.name} has no checkpoint yet: it starts anew, from step 0")
    if step is not None:
        warnings += changes_since_checkpoint(cfg, path, step)
        if checkpoints.saved_metrics(path, step) is None:
            warnings.append(
                f"{path / 'metrics.jsonl'} was truncated or changed since step {step} was saved: weights are not "
                "affected, but curves and training time will be incomplete"
            )
    for warning in warnings:
        console.warn(warning)
    return step


def resumed_model(cfg: TrainConfig, path: Path, step: int | None, mesh: Mesh, console: Console) -> tuple[str, bool]:
    """Source of the model of a resumed run, and whether the saved base model of its adapters is damaged."""
    if step is None:
        return named_model(cfg, mesh), False
    if not cfg.lora.rank:
        return str(checkpoints.folder(path, step) / "model"), False
    problems = mesh.on_main(lambda: checkpoints.problems(path / checkpoint.BASE))
    for problem in problems:
        console.warn(f"{problem}: replacing it with {cfg.model.source}")
    return named_model(cfg, mesh) if problems else str(path / checkpoint.BASE), bool(problems)


def load_tensors(run: TrainingRun, step: int) -> None:
    """Load optimizer state, critic and replay buffer of a checkpoint, and copy the weights to the engine."""
    path, learner = run.directory.path, run.learner
    warm_start = run.begin_warm_start() if run.state.sft_step else None
    optimizer = warm_start.optimizer if warm_start else learner.updater.optimizer
    try:
        checkpoint.load_optimizer(path, step, learner.policy, optimizer)
        if learner.critic is not None and run.resumed:
            learner.critic.load(checkpoints.folder(path, step))
    except SafetensorError as error:  # checksums show damage, but not a file that was saved like this
        raise UserError(
            f"the checkpoint of step {step} is invalid ({error}): resume from another checkpoint"
        ) from error
    if run.replay.buffer is not None:
        checkpoint.load_replay(path, step, run.replay.buffer)
    run.sync()


def named_model(cfg: TrainConfig, mesh: Mesh) -> str:
    """Source of the model in the settings; rank 0 verifies its checksums."""
    return mesh.on_main(lambda: model_source(cfg.model, cfg.runs_dir))


def inherit_replay(run: TrainingRun) -> None:
    """Fill the replay buffer of a run without checkpoints from the folder in `replay.load`."""
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
    checked_texts: int = CHECKED_TEXTS,
) -> TrainingRun:
    """Build all components and check their inputs. The run's settings contain the token budget that was chosen.

    `source`: the model. `directory`: of a resumed run; without it, the path of the run directory is set later.
    `adapters`: LoRA adapters of a resumed run. `checked_texts`: prompts and solutions checked for unknown words.
    """
    check_settings(cfg)
    device = policy_device(cfg, mesh)
    algo = build_algorithm(cfg)
    check_layout(cfg, mesh, algo)
    dtype = pick_dtype(cfg.dtype, mesh.device)
    precision = stored_precision(cfg, mesh, dtype)
    task, train, evaluations = load_problems(cfg, console)
    # Before the model, which may take minutes to load.
    with build_judge_pool(cfg.reward, task, cfg.judge) as judge:
        verdict = check_judge(judge, train[0], console.warn)
    check_before_loading(cfg, algo, train, verdict)
    if directory is None:  # a resumed run may have its own copy
        check_reference(cfg, algo)
    tokenizer = build_tokenizer(cfg.model, source, task)
    renderer = build_renderer(cfg.prompt, tokenizer, task)
    train = select_prompts(train, cfg, renderer, console)
    if alone(cfg, mesh) and cfg.engine.name in ("auto", "native", "hf"):  # others share memory between processes
        use_expandable_segments(mesh.device)
    policy = load_policy(cfg, source, tokenizer, device, dtype, precision, adapters, console)
    if cfg.train.deterministic and mesh.device.type == "cuda" and not isinstance(policy, Decoder):
        raise UserError(
            f"train.deterministic = true is not available on CUDA for {cfg.model.source}, which runs through "
            "transformers: use a model of another family, or set device = 'cpu'"
        )
    check_sizes(cfg, policy.max_length)  # again: of a model on the hub, the size was not known before
    set_up_threads(cfg.model.source, policy, dtype, cfg.threads, console)
    for cause in settings_problems(cfg, algo, task, policy.parameter_count):
        console.warn(str(cause))
    if not cfg.train.token_budget:  # a resumed run has the one that it was started with
        tokens = choose_token_budget(policy, dtype, mesh, cfg.train.activation_checkpointing)
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"token_budget": tokens})})
    demonstrations = build_demonstrations(cfg, renderer, console)
    splits = {"train": train} | {cfg.eval.split_of(label): prompts for label, prompts in evaluations.items()}
    check_texts(console, splits, demonstrations, renderer, policy.max_length, checked_texts)
    check_inputs(mesh, {"train": train, **evaluations, "sft": demonstrations}, renderer, policy)
    critic = make_critic(cfg, algo, policy, mesh, dtype)
    lower_precision(policy, precision)  # a critic begins with the exact weights
    engine = shard_and_build_engine(cfg, policy, renderer, mesh, dtype, console)
    verify = verify_method(cfg.engine, engine)
    check_capabilities(cfg, engine, has_rl_steps(cfg), verify, console)
    prepare_policy(policy, cfg.train, mesh.world, dtype)
    updater = build_updater(cfg, policy, mesh, dtype, console.progress)
    if cfg.train.process == "separate":
        updater = SubprocessUpdater.of(updater)
    updater.critic = critic if critic and critic.shared else None
    if directory is None and mesh.is_main and (text := disk_warning(cfg, checkpoint_bytes(cfg, policy))):
        console.warn(text)
    stopping = Stopping(cfg.save.grace_s, mesh)
    collector = build_collector(cfg, task, engine, renderer, mesh, stopping, console.progress)
    check_collector(cfg, collector, train, evaluations, policy, console)
    algo.limits = LengthLimits(cfg.sampling.max_new_tokens, engine.info.max_length)
    schedule = Schedule.of(cfg.train, len(train))
    directory = directory or Run(Path())
    # Asynchronous sampling without staleness is on-policy.
    make_source = AsyncSource if cfg.source.name == "async" and cfg.source.max_staleness else OnPolicySource
    return TrainingRun(
        cfg=cfg,
        directory=directory,
        schedule=schedule,
        collector=collector,
        source=make_source(cfg, algo, collector, PromptStream(train, cfg.seed), schedule, stopping),
        learner=Learner(cfg, algo, updater, schedule, critic),
        replay=Replay(cfg.replay, cfg.seed),
        weight_sync=build_weight_sync(cfg, updater, engine, verify, renderer, train),
        evaluator=RunEvaluator(cfg, collector, evaluations, directory, console),
        recorder=Recorder(cfg, directory, console, mesh, judge_warnings(cfg.reward, collector), started),
        stopping=stopping,
        demonstrations=demonstrations,
    )


def stored_precision(cfg: TrainConfig, mesh: Mesh, dtype: torch.dtype) -> Precision:
    """How weights are stored. A model that only adapters change is stored in the dtype of the computation."""
    precision = cfg.optim.precision
    if precision == "float32":
        frozen = cfg.lora.rank and not cfg.lora.quantize and alone(cfg, mesh) and dtype == torch.bfloat16
        return "bfloat16" if frozen else precision
    if dtype != torch.bfloat16:
        raise UserError(
            f"optim.precision = {precision!r} needs dtype = 'bfloat16', not {cfg.dtype!r}: change one of them"
        )
    if not alone(cfg, mesh):
        raise UserError(f"optim.precision = {precision!r} works with one training process only: set it to 'float32'")
    return precision


def alone(cfg: TrainConfig, mesh: Mesh) -> bool:
    """Whether this process trains without others."""
    return mesh.world == 1 and cfg.train.process == "same"


def build_weight_sync(
    cfg: TrainConfig, updater: Updater, engine: BaseEngine, method: Method, renderer: Renderer, train: Sequence[Prompt]
) -> WeightSync:
    """With the sequences that a probe of the engine's weights scores, if that is the `method`."""
    sync, policy = WeightSync(updater, engine, method, cfg.engine.verify_every), updater.policy
    if method == "probe":
        prompts = renderer.all_prompt_ids(PromptStream(train, cfg.seed).next(PROBE_PROMPTS))
        vocabulary = min(renderer.tokenizer.vocab_size, policy.vocab_size)
        sync.sequences = probe_sequences(prompts, vocabulary, min(policy.max_length, engine.info.max_length), cfg.seed)
    return sync


def load_problems(cfg: TrainConfig, console: Console) -> tuple[Task, Sequence[Prompt], dict[str, Sequence[Prompt]]]:
    """The task or environment, the prompts of the train split, and the prompts of evaluations by label."""
    task = build_problems(cfg.task, cfg.env)
    train = take(task.prompts("train"), cfg.train.max_train_prompts, "train", endless=True)
    evaluations = evaluation_prompts(cfg, task)
    for cause in data_problems(cfg, train, evaluations, console.note):
        if cause.severity == "error":  # no problem of an evaluation is new to the model
            raise UserError(str(cause))
        console.warn(str(cause))
    return task, train, evaluations


def judge_warnings(cfg: RewardConfig, collector: Collector) -> dict[str, Callable[[], str]]:
    """Warnings for the first failure and the first timeout of the judge or environment, by metric."""
    judged = "answers" if collector.env is None else "steps"

    def failed() -> str:
        first = f": {detail}" if (detail := collector.first_failure) else ""
        return f"{collector.reward_source} failed on some {judged} (status/error), which are not trained on{first}"

    def timed_out() -> str:
        return (
            f"judging some answers took longer than {cfg.timeout_s:g} s (status/timeout), which count as unparsable: "
            "raise reward.timeout_s, or make the judge faster"
        )

    return {"status/error": failed, "status/timeout": timed_out}


def load_policy(
    cfg: TrainConfig,
    source: str,
    tokenizer: Tokenizer,
    device: torch.device,
    dtype: torch.dtype,
    precision: Precision,
    adapters: Path | None,
    console: Console,
) -> PolicyModel:
    """Load the policy, with LoRA if the settings say so. It is not sharded yet.

    A model that will be quantized is loaded to main memory first, and moved to the device layer by layer.
    """
    quantize = bool(cfg.lora.quantize)
    with console.loading(cfg.model.source) as report:
        target = torch.device("cpu") if quantize else device
        policy = build_policy(cfg.model, source, tokenizer, target, cfg.seed, dtype, report, frozen=quantize)
    if quantize:
        policy.quantize(device)
    if tokenizer.vocab_size > policy.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {policy.vocab_size}: "
            "they do not match; set model.tokenizer to the tokenizer of the model"
        )
    if cfg.lora.rank:
        lora = Lora(cfg.lora.rank, cfg.lora.alpha, tuple(cfg.lora.targets), cfg.model.source)
        policy.add_lora(lora, cfg.seed)
        lower_precision(policy, precision)  # before their fingerprint is compared
    if adapters is not None:
        load_adapter(policy, adapters)
    return policy


def build_updater(cfg: TrainConfig, policy: PolicyModel, mesh: Mesh, dtype: torch.dtype, progress: Progress) -> Updater:
    return Updater(
        policy,
        make_optimizer(policy, cfg.optim),
        temperature=cfg.sampling.temperature,
        max_grad_norm=cfg.optim.max_grad_norm,
        token_budget=cfg.train.token_budget,
        offload_reference=cfg.train.offload_reference and mesh.world == 1,  # shards are never moved
        dtype=dtype,
        mesh=mesh,
        progress=progress,
    )


def shard_and_build_engine(
    cfg: TrainConfig, policy: PolicyModel, renderer: Renderer, mesh: Mesh, dtype: torch.dtype, console: Console
) -> BaseEngine:
    """Shard the policy over the ranks, and build the engine that serves it, or this rank's part of the engine."""
    build = partial(
        build_engine,
        cfg,
        policy,
        renderer,
        cfg.model.max_length,
        mesh.tp_group,
        device=mesh.device,
        notify=console.warn,
    )
    copies_model = is_custom_backend(cfg.engine) or not isinstance(policy, Decoder)
    engine = build() if copies_model else None  # copies the model before it is sharded
    parallelise(policy, mesh, cfg.parallel.mode, dtype)
    return engine or build()  # sizes its KV cache by the memory that is left


def evaluation_prompts(cfg: TrainConfig, task: Task) -> dict[str, Sequence[Prompt]]:
    """Problems of the evaluations start, before and after, and of the periodic one, by label."""
    final = take(prompts_of(task, cfg.eval.final_split), cfg.eval.final_examples, cfg.eval.final_split)
    # A randomly initialized model is not evaluated before its warm start.
    warm_started = has_rl_steps(cfg) and cfg.sft.steps and not cfg.model.source.startswith(PRESET)
    labels = ("start", "before", "after") if warm_started else ("before", "after")
    prompts = dict.fromkeys(labels, final)
    if has_rl_steps(cfg):
        try:
            prompts["eval"] = take(task.prompts(cfg.eval.split), cfg.eval.examples, cfg.eval.split)
        except NoSuchSplit as error:
            if cfg.eval.every:
                raise UserError(f"{error}; eval.every = 0 turns periodic evaluation off") from None
    return prompts


def has_rl_steps(cfg: TrainConfig) -> bool:
    """Whether the run is more than supervised fine-tuning."""
    return bool(cfg.train.steps or cfg.train.epochs or cfg.train.budget)


# Messages of gloo and NCCL after another process has ended.
LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|timed out|NCCL|remote process", re.I)


@contextmanager
def reopened(path: Path, before: TrainConfig, cfg: TrainConfig, console: Console) -> Iterator[TrainingRun]:
    """Resume a run with the settings `cfg`, and store them in its config.toml. `before`: its previous settings."""
    with Run.open(path, write=is_main()) as opened:
        resumed = resume_run(cfg, opened, console)
        if is_main():
            write_text(path / "config.toml", to_toml(resumed.cfg))
            extend_trust(before, resumed.cfg)
        yield resumed


@contextmanager
def carried_out(training: TrainingRun, console: Console, resume: Callable[[TrainingRun], str]) -> Iterator[None]:
    """Hold the resources of a run during the block, which finishes it, and explain how it ended if that was not as
    planned. `resume`: what the user writes to resume the run.
    """
    try:
        with training.active():
            yield
    except KeyboardInterrupt as stop:
        console.stop()
        console.note(describe_stop(training, resume(training)))
        if is_distributed() and not getattr(stop, "at_once", True):
            # The launcher ends all processes when the first one exits: wait, so that they keep their exit codes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            training.mesh.close()
        raise
    except Exception as error:
        if is_lost_peer(error):
            raise UserError(
                f"rank {os.environ['RANK']} lost another process, which has ended or hangs ({str(error)[:200]}): "
                f"see the output of that process; resume with: {resume(training)}"
            ) from error
        problem = disk_error(error)
        if problem is None and isinstance(error, OSError):
            problem = f"reading or writing failed ({error})", "fix this"
        if isinstance(error, UserError) or problem is None:
            raise
        what, remedy = problem
        raise UserError(f"{what}: {remedy} and resume with: {resume(training)} (checkpoints are intact)") from error
    finally:
        console.stop()
    training.mesh.close()
    if training.mesh.is_main:
        check_updates(training)


def check_updates(training: TrainingRun) -> None:
    """Raise if a complete run has changed no weights because of values that were not finite."""
    path = training.path
    rows = [row for row in read_metrics(path) if "optim/updates" in row]
    updates, skipped, faults = (
        sum(row.get(f"optim/{name}", 0.0) for row in rows) for name in ("updates", "skipped", "non_finite")
    )
    if faults > 0 and skipped == updates:
        remedy = "lower optim.lr, set dtype = 'float32', or check custom weights, rewards, advantages or losses"
        if terms := non_finite_terms(rows[-1]):
            remedy = "fix it"
        raise UserError(
            f"the run is complete, but every update was skipped, because {terms or 'the loss or the gradient'} was not "
            f"finite; its batches are saved in {path / 'skipped'}: {remedy}, and start a new run"
        )


def describe_stop(training: TrainingRun, resume: str) -> str:
    """What a stopped run has saved, and how to resume it."""
    path, total = training.path, training.schedule.total_steps
    saved = checkpoints.last(path)
    if saved is None:
        return f"stopped before the first checkpoint; to start this run again from the beginning: {resume}"
    sft_step = read_json(checkpoints.folder(path, saved) / "state.json").get("sft_step")
    where = f"step {sft_step} of {training.cfg.sft.steps} of the warm start" if sft_step else f"step {saved} of {total}"
    return f"stopped; saved after {where}; to resume from there: {resume}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another process has ended."""
    return is_distributed() and isinstance(error, RuntimeError) and bool(LOST.search(str(error)))
