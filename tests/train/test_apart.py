"""Training in a process of its own: the same result, the same errors, and nobody left behind."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import SmallRuns, gpt2_folder, inject
from train_parts import make_groups, tiny_decoder, weights_of

from assay.algos import Algorithm, make_algorithm
from assay.config import TrainConfig
from assay.mesh import Mesh
from assay.process.remote import RemoteWorker, reply
from assay.rewards.importing import load_object
from assay.runs import checkpoints
from assay.train.learner.optim import make_adamw, optimizer_tensors
from assay.train.learner.subprocess_updater import WORKER, SubprocessUpdater, policy_device
from assay.train.learner.update import Updater
from assay.train.sources import OnPolicySource
from assay.train.stopping import ECHO_S
from assay.types import Group, UserError

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")

# A fresh process finds none of these by its name alone: their module is a file that stands nowhere.
LOSSES = """
import os, signal, time, warnings
from pathlib import Path
from assay.algos.losses import ppo_clip
from assay.types import UserError

HERE = Path(__file__).parent

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

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
    raise UserError("mend your loss")

def odd(*_):
    raise Odd("this", "that")

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

calls = []

def tight(*tensors):
    calls.append(1)
    if len(calls) == 1:
        raise RuntimeError("can't allocate memory")
    return ppo_clip(*tensors)

def slow(*_):
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


def test_a_run_that_is_stopped_and_goes_on_in_the_same_process_is_the_same(small: SmallRuns) -> None:
    words = (*WORDS, "--algo.policy_loss", own_loss(small))
    assert small.train(*words) == 0
    # Ctrl-C reaches both processes, in the middle of a step, which is finished.
    (small.folder / "strike").write_text(str(os.getpid()))
    assert small.train(*words, *SEPARATE, "--name", "first-apart") == 128 + signal.SIGINT
    assert checkpoints.last(small.runs / "first-apart") == 1 and not (small.folder / "strike").exists()
    assert small.resume("first-apart", "--train.process", "same") == 0
    small.same_run("small", "first-apart", 2)


@pytest.mark.slow
def test_a_run_that_goes_on_in_a_process_of_its_own_is_the_same(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*WORDS, "--algo.policy_loss", own_loss(small))
    assert small.train(*words) == 0
    with monkeypatch.context() as patch, pytest.raises(Stop):
        inject(patch, OnPolicySource, "next", 2, stop)
        small.train(*words, "--name", "then-apart")
    assert small.resume("then-apart", *SEPARATE) == 0
    small.same_run("small", "then-apart", 2)


STEPS = 5
VARIANTS: dict[str, tuple[object, ...]] = {
    "adamw, cosine, decay": ("--optim.schedule", "cosine", "--optim.weight_decay", 0.1, "--algo.entropy_coef", 0.01),
    "muon, updates, passes": (
        *("--optim.name", "muon", "--optim.matrix_lr", 0.01, "--optim.embedding_lr", 0.02),
        *("--algo.updates", 3, "--train.passes", 2),
    ),
    "lora, kl": ("--lora.rank", 2, "--algo.kl_coef", 0.1),
    "lora, muon, kl, warm start": (
        *("--lora.rank", 2, "--lora.targets", "q_proj", "--algo.kl_coef", 0.1, "--sft.steps", 2, "--sft.batch", 4),
        *("--optim.name", "muon", "--optim.matrix_lr", 0.01),
    ),
    "half precision, kl": ("--dtype", "bfloat16", "--engine.dtype", "bfloat16", "--algo.kl_coef", 0.1),
    "dapo, recomputed": ("--algo.recipe", "dapo", "--train.recompute"),
    "gspo, corrected": ("--algo.recipe", "gspo", "--algo.correction", "sequence_truncate"),
    "reinforce_pp, kl": ("--algo.recipe", "reinforce_pp", "--algo.reward_kl_coef", 0.1, "--algo.updates", 2),
    "rloo, kl in the reward to an average": (
        *("--algo.recipe", "rloo", "--algo.reward_kl_coef", 0.1, "--algo.reference_ema", 0.9),
    ),
    "gpt2, kl": ("--algo.kl_coef", 0.1, "--optim.weight_decay", 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_runs_stopped_and_resumed_are_the_same_in_either_process(
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
    """The same in this process, and apart."""
    one, other = tiny_decoder(), tiny_decoder()
    here = Updater(one, make_adamw(one, 1e-2), **settings)
    return here, SubprocessUpdater.of(Updater(other, make_adamw(other, 1e-2), **settings))


def test_updates_give_the_same_weights_moments_metrics_faults_and_warnings(recwarn: pytest.WarningsRecorder) -> None:
    algo = make_algorithm("grpo", kl_coef=0.5, entropy_coef=0.01, updates=2)
    here, apart = updaters(reference=tiny_decoder(seed=9).requires_grad_(False), token_budget=40)
    for lr, faults in ((1e-2, 0), (3e-3, 1)):
        groups = credited(algo)
        if faults:
            groups[1].rollouts[0].advantage = float("nan")  # the first of two steps is skipped
        before = weights_of(apart.policy)
        found = [one.update(groups, algo, lr) for one in (here, apart)]
        assert repr(found[0]) == repr(found[1]) and found[0]["optim/non_finite"] == faults
        assert weights_of(here.policy).equal(weights_of(apart.policy)) and not weights_of(apart.policy).equal(before)
        left, right = (optimizer_tensors(one.policy.named_parameters(), one.optimizer) for one in (here, apart))
        assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)
        assert repr(here.faults) == repr(apart.faults) and len(apart.faults) == faults
    told = [str(one.message) for one in recwarn if "this update is skipped" in str(one.message)]
    assert len(told) == 2 and told[0] == told[1]
    assert apart.policy.lm_head.weight is apart.policy.model.embed_tokens.weight  # type: ignore[union-attr]
    assert apart.worker is None


def test_the_reference_is_asked_there_too() -> None:
    algo = make_algorithm("reinforce_pp", reward_kl_coef=0.1)
    here, apart = updaters(reference=tiny_decoder(seed=9).requires_grad_(False), token_budget=40)
    groups = make_groups(tiny_decoder(), seed=5)
    assert here.ref_logprobs(groups, algo) == apart.ref_logprobs(groups, algo)
    assert apart.ref_logprobs([], algo) == [] and apart.worker is None


def test_a_step_with_nothing_to_learn_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubprocessUpdater, "_start", lambda *_: pytest.fail("started"))
    algo = make_algorithm("grpo")
    found = updaters()[1].update([], algo, 1e-2)
    assert found["optim/skipped"] == 1.0


def with_loss(small: SmallRuns, name: str) -> tuple[SubprocessUpdater, Algorithm]:
    policy = tiny_decoder()
    path = own_loss(small, name)
    algo = make_algorithm("grpo", policy_loss=path, load=load_object)
    return SubprocessUpdater.of(Updater(policy, make_adamw(policy, 1e-2))), algo


def test_errors_and_warnings_of_the_other_process_are_raised_here(small: SmallRuns) -> None:
    apart, algo = with_loss(small, "mistaken")
    with pytest.warns(UserWarning, match="not go well"), pytest.raises(UserError) as raised:
        apart.update(credited(algo), algo, 1e-2)
    assert str(raised.value) == "mend your loss" and "losses.py" in raised.value.__notes__[0]  # where it struck
    assert apart.worker is None and weights_of(apart.policy).equal(weights_of(tiny_decoder()))


def test_an_error_that_cannot_travel_is_told_in_words(small: SmallRuns) -> None:
    answer, error, _ = reply(load_object(own_loss(small, "odd")), ())
    assert answer is None and isinstance(error, RuntimeError) and str(error) == "Odd: this and that"


def test_warnings_are_told_apart_from_errors() -> None:
    def work() -> int:
        warnings.warn("take care", FutureWarning, stacklevel=1)
        return 3

    assert reply(work, ()) == (3, None, [(FutureWarning, "take care")])


def test_a_process_that_is_killed_is_named_with_its_signal(small: SmallRuns) -> None:
    apart, algo = with_loss(small, "killed")
    with pytest.raises(UserError, match=r"killed by SIGKILL.*main memory.*train\.process = 'same'") as raised:
        apart.update(credited(algo), algo, 1e-2)
    assert "\n" not in str(raised.value) and apart.worker is None


@pytest.mark.slow
def test_a_budget_that_was_too_large_stays_smaller(small: SmallRuns) -> None:
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


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]], ids=["killed", "asked twice"])
def test_the_training_process_goes_with_the_one_that_started_it(small: SmallRuns, signals: list[int]) -> None:
    run = small.process("train", small.config, *SEPARATE, "--algo.policy_loss", own_loss(small, "slow"))
    try:
        wait_for((small.folder / "pid").exists)
        trainer = int((small.folder / "pid").read_text())
        assert not gone(trainer)
        run.send_signal(signals[0])
        for asked in signals[1:]:
            # The time between the two counts from when the first was handled, which a busy machine may put off.
            assert run.stdout is not None and any("finishing the step" in line for line in run.stdout)
            time.sleep(2 * ECHO_S)
            run.send_signal(asked)
    finally:
        said = run.communicate()[0]
    assert run.returncode == (-signal.SIGKILL if len(signals) == 1 else 128 + signal.SIGINT), said
    wait_for(lambda: gone(trainer))


def test_a_process_that_nobody_needs_any_more_goes() -> None:
    trainer = RemoteWorker(WORKER)
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()  # as the end of this process would
    assert trainer.process.wait() == 1
    trainer.close()


def refuse(*_: Any, **__: Any) -> None:
    raise BlockingIOError("no more processes")


def test_the_next_process_is_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
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
    after.process.kill()  # as a system without memory would
    after.process.wait()
    apart.update(credited(algo), algo, 1e-2)
    (last,) = apart.spares
    assert last is not after and after not in asked
    started = RemoteWorker.__init__
    monkeypatch.setattr(RemoteWorker, "__init__", refuse)  # the next one finds no memory
    asked.clear()
    before = weights_of(apart.policy)
    apart.update(credited(algo), algo, 1e-2)
    assert set(asked) == {last} and not apart.spares and not weights_of(apart.policy).equal(before)
    with pytest.raises(UserError, match="no training process can be started"):
        apart.update(credited(algo), algo, 1e-2)
    monkeypatch.setattr(RemoteWorker, "__init__", started)
    apart.expects_more = False
    apart.update(credited(algo), algo, 1e-2)
    assert not apart.spares  # nothing would use another one
    apart.expects_more = True
    apart.update(credited(algo), algo, 1e-2)
    (last,) = apart.spares
    del apart
    wait_for(lambda: gone(last.process.pid))


@pytest.mark.slow
def test_no_training_process_is_started_that_nothing_will_use(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start and two updates need three; each update but the last starts the next one's ahead."""
    started: list[RemoteWorker] = []
    start = RemoteWorker.__init__

    def counted(self: RemoteWorker, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        started.append(self)

    monkeypatch.setattr(RemoteWorker, "__init__", counted)
    assert small.train(*WORDS, *SEPARATE) == 0
    assert len(started) == 3


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "compiling": (("--train.compile", "on"), "would compile again in every step"),
    "another word": (("--train.process", "apart"), "train.process"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(small: SmallRuns, capsys: pytest.CaptureFixture[str], name: str) -> None:
    words, message = REFUSED[name]
    assert small.train(*SEPARATE, *words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not small.runs.exists()


class Two(Mesh):
    world = 2  # type: ignore[assignment]


@pytest.mark.parametrize(("mesh", "message"), [(Two(), "not for 2 processes"), (Mesh(torch.device("mps")), "for CUDA")])
def test_many_processes_and_shared_memory_are_refused(mesh: Mesh, message: str) -> None:
    cfg = TrainConfig()
    assert policy_device(cfg, mesh) == mesh.device
    cfg.train.process = "separate"
    with pytest.raises(UserError, match=message):
        policy_device(cfg, mesh)


@pytest.mark.slow
def test_a_run_on_many_processes_says_so_once(small: SmallRuns) -> None:
    run = small.launch(2, "train", small.config, *SEPARATE)
    said = run.communicate(timeout=300)[0]
    assert run.returncode != 0 and said.count("is for one GPU, not for 2 processes") == 1


@pytest.mark.gpu
def test_nothing_stays_on_the_gpu() -> None:
    device = torch.device("cuda")
    algo = make_algorithm("grpo", kl_coef=0.5)
    found = []
    for place in ("cuda", "cpu"):
        policy, reference = tiny_decoder().float().to(place), tiny_decoder(seed=9).float().requires_grad_(False)
        one = Updater(policy, make_adamw(policy, 1e-2), reference=reference.to(place), mesh=Mesh(device))
        if place == "cpu":
            one = SubprocessUpdater.of(one)
            torch.zeros(1, device=device)  # a context there is
            free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        found.append([one.update(credited(algo), algo, 1e-2) for _ in range(2)])
    assert torch.cuda.memory_allocated() == held and torch.cuda.mem_get_info()[0] >= free - 2**24
    assert policy.device.type == "cpu"
    for here, apart in zip(*found, strict=True):
        assert here == pytest.approx(apart, rel=1e-3, abs=1e-6) and here["optim/grad_norm"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("lend", ["false", "true"])
def test_a_run_on_the_gpu_is_the_same_in_either_process(small: SmallRuns, lend: str) -> None:
    from safetensors.torch import load_file

    words = (
        *WORDS,
        "--device",
        "cuda",
        "--dtype",
        "float32",
        "--engine.dtype",
        "float32",
        "--engine.sleep_while_training",
        lend,
    )
    assert small.train(*words) == 0
    assert small.train(*words, *SEPARATE, "--name", "apart") == 0
    start, one, other = (
        load_file(small.checkpoint(step, name) / "model/model.safetensors")
        for step, name in ((0, "small"), (2, "small"), (2, "apart"))
    )
    way = sum(float((one[key] - start[key]).square().sum()) for key in one) ** 0.5
    away = sum(float((one[key] - other[key]).square().sum()) for key in one) ** 0.5
    assert way > 0 and away < 0.05 * way  # sums on a GPU come in any order
    for name in ("loss/total", "optim/grad_norm", "policy/kl"):
        here, apart = ([row[name] for row in small.metrics(run) if name in row] for run in ("small", "apart"))
        assert len(here) == 2 and here == pytest.approx(apart, rel=0.02, abs=1e-5)
