"""Updates in a worker process: the same results and errors as in this process, and no process left behind.

The worker is also called directly, in this process.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh_parts import token_scores
from small_run import SmallRuns, gpt2_folder, inject
from train_parts import make_adamw, make_groups, tiny_decoder, weights_of

from assay.algos import Algorithm, make_algorithm
from assay.config import TrainConfig
from assay.mesh import Mesh
from assay.rewards.functions import load_object
from assay.runs import checkpoints
from assay.system.spawn import RemoteWorker, reply
from assay.training.learner.optim import optimizer_tensors
from assay.training.learner.subprocess_updater import (
    ALIGNMENT,
    NameUnpickler,
    SharedTensors,
    SubprocessUpdater,
    UpdateWorker,
    policy_device,
)
from assay.training.learner.update import Updater
from assay.training.progress import ECHO_S
from assay.training.sources import OnPolicySource
from assay.types import Group, UserError

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")

# The functions are in a file that a new process cannot import by a module name.
LOSSES = """
import os, signal, time, warnings
from pathlib import Path
from assay.algos.terms import ppo_clip
from assay.types import UserError

HERE = Path(__file__).parent

def plain(logprobs, behaviour, advantages, low, high):
    strike = HERE / "strike"
    if strike.exists() and strike.read_text() == str(os.getppid()):  # we are in the training process
        strike.unlink()
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGINT)
    return ppo_clip(logprobs, behaviour, 2 * advantages, low, high)

def mistaken(*_):
    warnings.warn("this will not go well")
    print("not an answer")
    raise UserError("fix your loss")

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

calls = []

def tight(*tensors):
    calls.append(1)
    if len(calls) == 1:
        raise RuntimeError("can't allocate memory")
    return ppo_clip(*tensors)

def slow(*tensors):
    if os.getppid() == int((HERE / "runner").read_text()):  # the loss is tried before the run
        return ppo_clip(*tensors)
    (HERE / "pid.new").write_text(str(os.getpid()))
    (HERE / "pid.new").rename(HERE / "pid")
    time.sleep(600)

own = lambda *tensors: plain(*tensors)
"""


@pytest.fixture
def small(tmp_path: Path) -> SmallRuns:
    (tmp_path / "losses.py").write_text(LOSSES)
    return SmallRuns(tmp_path)


def own_loss(small: SmallRuns, name: str = "own") -> str:
    return f"{small.folder}/losses.py:{name}"


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


WORDS = ("--train.steps", 2, "--save.every", 1, "--eval.every", 1, "--sft.steps", 2, "--sft.batch", 4)
WORDS = (*WORDS, "--algo.kl_coef", 0.1)
SEPARATE = ("--train.process", "separate")


@pytest.mark.slow
def test_a_run_stopped_in_a_worker_and_resumed_without_one_equals_an_uninterrupted_run(small: SmallRuns) -> None:
    words = (*WORDS, "--algo.policy_loss", own_loss(small))
    assert small.train(*words) == 0
    # Ctrl-C reaches both processes in the middle of a step, which is finished.
    (small.folder / "strike").write_text(str(os.getpid()))
    assert small.train(*words, *SEPARATE, "--name", "first-apart") == 128 + signal.SIGINT
    assert checkpoints.last(small.runs / "first-apart") == 1 and not (small.folder / "strike").exists()
    assert small.resume("first-apart", "--train.process", "same") == 0
    small.same_run("small", "first-apart", 2)


STEPS = 5
VARIANTS: dict[str, tuple[object, ...]] = {
    "muon, updates, passes, cosine, decay": (
        *("--optim.name", "muon", "--optim.matrix_lr", 0.01, "--optim.embedding_lr", 0.02),
        *("--algo.updates", 3, "--train.passes", 2, "--optim.schedule", "cosine", "--optim.weight_decay", 0.1),
    ),
    "lora on a quantized base, half precision, kl, warm start": (
        *("--lora.rank", 2, "--lora.quantize", "nf4", "--algo.kl_coef", 0.1, "--sft.steps", 2, "--sft.batch", 4),
        *("--dtype", "bfloat16", "--engine.dtype", "bfloat16"),
    ),
    "rloo, kl in the reward to an average, recomputed": (
        *("--algo.recipe", "rloo", "--algo.reward_kl_coef", 0.1, "--algo.reference_ema", 0.9),
        "--train.activation_checkpointing",
    ),
    "gpt2, gspo, corrected, kl": (
        *("--algo.recipe", "gspo", "--algo.correction", "sequence_truncate"),
        *("--algo.kl", "k3", "--algo.kl_coef", 0.1, "--optim.weight_decay", 0.1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_with_a_worker_that_are_stopped_and_resumed_equal_runs_without_one(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    words = ("--train.steps", STEPS, "--save.every", 2, "--eval.every", 2, *VARIANTS[variant])
    if variant.startswith("gpt2"):
        words = (*words, "--model", gpt2_folder(small.folder / "gpt2"))
    assert small.train(*words) == 0
    with monkeypatch.context() as patch, pytest.raises(Stop):
        inject(patch, OnPolicySource, "next", 4, stop)
        small.train(*words, *SEPARATE, "--name", "apart")
    assert checkpoints.last(small.runs / "apart") == 2
    assert small.resume("apart") == 0
    small.same_run("small", "apart", STEPS)


def credited(algo: Algorithm) -> list[Group]:
    groups = make_groups(tiny_decoder(), seed=5)
    algo.credit(groups)
    return groups


def updaters(**settings: Any) -> tuple[Updater, SubprocessUpdater]:
    """One that works in this process, and one with a worker process."""
    one, other = tiny_decoder(), tiny_decoder()
    here = Updater(one, make_adamw(one, 1e-2), **settings)
    return here, SubprocessUpdater.of(Updater(other, make_adamw(other, 1e-2), **settings))


class LocalWorker:
    """Runs the worker's methods in this process; arguments and replies are pickled as they would be sent."""

    running = True

    def __init__(self) -> None:
        self.target = UpdateWorker()

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "begin":
            content, files, *rest = arguments
            arguments = (content, {name: (os.dup(fd), slots) for name, (fd, slots) in files.items()}, *rest)
        sent = reply(getattr(self.target, method), pickle.loads(pickle.dumps(arguments)))
        result, error, caught = pickle.loads(pickle.dumps(sent))
        for category, text in caught:
            warnings.warn(text, category, stacklevel=2)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self.running = False


@pytest.fixture
def local_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubprocessUpdater, "_new_worker", lambda self: LocalWorker())


@pytest.mark.usefixtures("local_workers")
def test_updates_equal_those_without_a_worker(recwarn: pytest.WarningsRecorder) -> None:
    """Weights, optimizer state, metrics, scores of tokens, faults and warnings are the same."""
    algo = make_algorithm("grpo", kl_coef=0.5, entropy_coef=0.01, updates=2)
    here, apart = updaters(reference=tiny_decoder(seed=9).requires_grad_(False), token_budget=40)
    for lr, faults in ((1e-2, 0), (3e-3, 1)):
        batches = [credited(algo), credited(algo)]
        if faults:
            for groups in batches:
                groups[1].rollouts[0].advantage = float("nan")  # the first of two steps is skipped
        before = weights_of(apart.policy)
        found = [one.update(groups, algo, lr) for one, groups in zip((here, apart), batches, strict=True)]
        assert token_scores(batches[0]) == token_scores(batches[1])
        assert repr(found[0]) == repr(found[1]) and found[0]["optim/non_finite"] == faults
        assert weights_of(here.policy).equal(weights_of(apart.policy)) and not weights_of(apart.policy).equal(before)
        left, right = (optimizer_tensors(one.policy.named_parameters(), one.optimizer) for one in (here, apart))
        assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)
        assert repr(here.faults) == repr(apart.faults) and len(apart.faults) == faults
    told = [str(one.message) for one in recwarn if "this update is skipped" in str(one.message)]
    assert len(told) == 2 and told[0] == told[1]
    assert apart.policy.lm_head.weight is apart.policy.model.embed_tokens.weight  # type: ignore[union-attr]
    assert apart.worker is None


@pytest.mark.usefixtures("local_workers")
def test_ref_logprobs_are_computed_in_the_worker() -> None:
    algo = make_algorithm("reinforce_pp", reward_kl_coef=0.1)
    here, apart = updaters(reference=tiny_decoder(seed=9).requires_grad_(False), token_budget=40)
    groups = make_groups(tiny_decoder(), seed=5)
    assert here.ref_logprobs(groups, algo) == apart.ref_logprobs(groups, algo)
    assert apart.ref_logprobs([], algo) == [] and apart.worker is None


def test_a_batch_without_rows_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubprocessUpdater, "_start", lambda *_: pytest.fail("started"))
    algo = make_algorithm("grpo")
    found = updaters()[1].update([], algo, 1e-2)
    assert found["optim/skipped"] == 1.0


def with_loss(small: SmallRuns, name: str) -> tuple[SubprocessUpdater, Algorithm]:
    policy = tiny_decoder()
    path = own_loss(small, name)
    algo = make_algorithm("grpo", policy_loss=path, load=load_object)
    return SubprocessUpdater.of(Updater(policy, make_adamw(policy, 1e-2))), algo


@pytest.mark.slow
def test_errors_and_warnings_of_the_worker_process_are_raised_in_the_caller(small: SmallRuns) -> None:
    apart, algo = with_loss(small, "mistaken")
    with pytest.warns(UserWarning, match="not go well"), pytest.raises(UserError) as raised:
        apart.update(credited(algo), algo, 1e-2)
    assert str(raised.value) == "fix your loss" and "losses.py" in raised.value.__notes__[0]  # with its traceback
    assert apart.worker is None and weights_of(apart.policy).equal(weights_of(tiny_decoder()))


@pytest.mark.slow
def test_a_killed_worker_is_reported_with_its_signal(small: SmallRuns) -> None:
    apart, algo = with_loss(small, "killed")
    with pytest.raises(UserError, match=r"killed by SIGKILL.*main memory.*train\.process = 'same'") as raised:
        apart.update(credited(algo), algo, 1e-2)
    assert "\n" not in str(raised.value) and apart.worker is None


@pytest.mark.usefixtures("local_workers")
def test_a_token_budget_that_was_halved_in_the_worker_stays_halved(small: SmallRuns) -> None:
    apart, algo = with_loss(small, "tight")
    before = apart.token_budget
    with pytest.warns(UserWarning, match="out of memory: continuing"):
        apart.update(credited(algo), algo, 1e-2)
    assert 0 < apart.token_budget < before
    here, _ = updaters()
    here.update(credited(algo), algo.replace(policy_loss="ppo_clip"), 1e-2)
    assert torch.allclose(weights_of(here.policy), weights_of(apart.policy), rtol=0, atol=1e-12)


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Without a time limit, which a loaded machine could exceed; but not for a process that has ended."""
    while not condition():
        assert process is None or process.poll() is None, "the process ended"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]], ids=["killed", "stopped twice"])
def test_the_worker_ends_with_the_process_that_started_it(small: SmallRuns, signals: list[int]) -> None:
    (small.folder / "runner").write_text(str(os.getpid()))
    run = small.process("train", small.config, *SEPARATE, "--algo.policy_loss", own_loss(small, "slow"))
    try:
        wait_for((small.folder / "pid").exists, run)
        trainer = int((small.folder / "pid").read_text())
        assert not gone(trainer)
        run.send_signal(signals[0])
        for asked in signals[1:]:
            # The run ignores a second signal within ECHO_S of handling the first one, which it reports.
            assert run.stdout is not None and any("finishing the step" in line for line in run.stdout)
            time.sleep(2 * ECHO_S)
            run.send_signal(asked)
    finally:
        said = run.communicate()[0]
    assert run.returncode == (-signal.SIGKILL if len(signals) == 1 else 128 + signal.SIGINT), said
    wait_for(lambda: gone(trainer))


def refuse(*_: Any, **__: Any) -> None:
    raise BlockingIOError("no more processes")


@pytest.mark.slow
def test_the_next_worker_is_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    algo, apart = make_algorithm("grpo"), updaters()[1]
    asked: list[RemoteWorker] = []
    call = RemoteWorker.call
    monkeypatch.setattr(RemoteWorker, "call", lambda self, *words: asked.append(self) or call(self, *words))
    apart.update(credited(algo), algo, 1e-2)
    (spare,) = apart.spares
    asked.clear()
    apart.update(credited(algo), algo, 1e-2)
    assert set(asked) == {spare} and gone(spare.process.pid)
    (after,) = apart.spares
    after.process.kill()  # as the kernel does when memory runs out
    after.process.wait()
    apart.update(credited(algo), algo, 1e-2)
    (last,) = apart.spares
    assert last is not after and after not in asked
    started = RemoteWorker.__init__
    monkeypatch.setattr(RemoteWorker, "__init__", refuse)  # the next one cannot be started
    asked.clear()
    before = weights_of(apart.policy)
    apart.update(credited(algo), algo, 1e-2)
    assert set(asked) == {last} and not apart.spares and not weights_of(apart.policy).equal(before)
    with pytest.raises(UserError, match="no training process can be started"):
        apart.update(credited(algo), algo, 1e-2)
    monkeypatch.setattr(RemoteWorker, "__init__", started)
    apart.expects_more = False
    apart.update(credited(algo), algo, 1e-2)
    assert not apart.spares  # no other update is expected
    apart.expects_more = True
    apart.update(credited(algo), algo, 1e-2)
    (last,) = apart.spares
    del apart
    wait_for(lambda: gone(last.process.pid))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(tp_size=2), "parallel.tp"),
        (SimpleNamespace(device="cpu", tp_size=1, world=2), "cannot shard a model"),
        (Mesh(torch.device("mps")), "for CUDA"),
    ],
)
def test_sharded_models_and_mps_are_refused(mesh: Any, message: str) -> None:
    cfg = TrainConfig(parallel={"mode": "fsdp"})
    assert policy_device(cfg, mesh) == mesh.device
    cfg.train.process = "separate"
    with pytest.raises(UserError, match=message):
        policy_device(cfg, mesh)


@pytest.mark.gpu
def test_a_worker_leaves_no_gpu_memory_in_use() -> None:
    device = torch.device("cuda")
    algo = make_algorithm("grpo", kl_coef=0.5)
    found = []
    for home in ("cuda", "cpu"):
        policy, reference = tiny_decoder().float().to(home), tiny_decoder(seed=9).float().requires_grad_(False)
        one = Updater(policy, make_adamw(policy, 1e-2), reference=reference.to(home), mesh=Mesh(device))
        if home == "cpu":
            one = SubprocessUpdater.of(one)
            torch.zeros(1, device=device)  # creates the CUDA context
            held = torch.cuda.memory_allocated()
        found.append([one.update(credited(algo), algo, 1e-2) for _ in range(2)])
    # The worker has ended, and holds no memory. (The free memory of the GPU also depends on other processes.)
    assert isinstance(one, SubprocessUpdater) and one.worker is None and torch.cuda.memory_allocated() == held
    assert policy.device.type == "cpu"
    for here, apart in zip(*found, strict=True):
        assert here == pytest.approx(apart, rel=1e-3, abs=1e-6) and here["optim/grad_norm"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("sleeps", ["false", "true"])
def test_a_gpu_run_with_a_worker_equals_one_without(small: SmallRuns, sleeps: str) -> None:
    from safetensors.torch import load_file

    words = (*WORDS, "--device", "cuda", "--engine.sleep_while_training", sleeps)
    words = (*words, "--dtype", "float32", "--engine.dtype", "float32")
    assert small.train(*words) == 0
    assert small.train(*words, *SEPARATE, "--name", "apart") == 0
    start, one, other = (
        load_file(small.checkpoint(step, name) / "model/model.safetensors")
        for step, name in ((0, "small"), (2, "small"), (2, "apart"))
    )
    way = sum(float((one[key] - start[key]).square().sum()) for key in one) ** 0.5
    away = sum(float((one[key] - other[key]).square().sum()) for key in one) ** 0.5
    assert way > 0 and away < 0.05 * way  # the order of summation on a GPU varies
    for name in ("loss/total", "optim/grad_norm", "policy/kl"):
        here, apart = ([row[name] for row in small.metrics(run) if name in row] for run in ("small", "apart"))
        assert len(here) == 2 and here == pytest.approx(apart, rel=0.02, abs=1e-5)


TENSORS = {
    "matrix": torch.arange(15, dtype=torch.float32).view(3, 5).T,  # not contiguous
    "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "double": torch.tensor([[1 / 3]], dtype=torch.float64),
}


def test_stored_tensors_keep_their_values_and_are_aligned() -> None:
    shared = SharedTensors()
    for stored in (shared.store(TENSORS), shared.tensors()):
        assert stored.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            found = stored[name]
            assert found.equal(tensor) and found.dtype == tensor.dtype and found.data_ptr() % ALIGNMENT == 0


def test_shared_memory_grows_and_keeps_earlier_tensors() -> None:
    shared = SharedTensors()
    first = shared.store({"a": torch.ones(3)})["a"]
    offset = shared.slots["a"].offset
    shared.store({"b": torch.full((5000,), 2.0)})
    assert shared.slots["a"].offset == offset and shared.tensors()["a"].equal(torch.ones(3))
    first.fill_(4.0)  # an earlier view is still valid
    assert shared.tensors()["a"].equal(torch.full((3,), 4.0)) and bool((shared.tensors()["b"] == 2.0).all())
    shared.store({"a": torch.zeros(3)})
    assert first.equal(torch.zeros(3))


def test_two_processes_with_the_file_share_memory() -> None:
    shared = SharedTensors()
    mine = shared.store({"a": torch.arange(1000.0)})["a"]
    other = SharedTensors(os.dup(shared.file.fileno()), shared.slots)  # as in a process that inherits the file
    other.tensors()["a"].mul_(2)
    stored = other.store({"b": torch.ones(3)})["b"]
    assert mine.equal(2 * torch.arange(1000.0)) and shared.tensors().keys() == {"a"}
    shared.slots = other.slots
    assert shared.tensors()["b"].equal(stored) and shared.tensors()["b"].data_ptr() != stored.data_ptr()


@pytest.fixture
def begin_arguments() -> tuple[Any, ...]:
    policy = tiny_decoder()
    updater = SubprocessUpdater.of(Updater(policy, make_adamw(policy, 1e-2)))
    content = updater._pickled(make_algorithm("grpo"), None)
    files = {name: (os.dup(shared.file.fileno()), shared.slots) for name, shared in updater.shared.items()}
    return content, files, torch.device("cpu"), torch.get_num_threads(), None, False


def test_weights_that_do_not_fit_on_the_device_are_reported(
    begin_arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: NameUnpickler, key: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NameUnpickler, "persistent_load", out_of_memory)
    with pytest.raises(UserError, match=r"do not fit.*sleep_while_training"):
        UpdateWorker().begin(*begin_arguments)
