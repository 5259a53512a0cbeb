"""`train.deterministic` on a CPU: operators are strict during the run only; what cannot be repeated is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_parts import MODES, engine_for, mixed_prompts, model_of, requests_for
from small_run import SmallRuns, mostly_slow
from torch.utils._python_dispatch import TorchDispatchMode

import assay
from assay.algos.recipes import RECIPES
from assay.build import models as build_models
from assay.build.models import check_capabilities, choose_token_budget, prepare_policy
from assay.checks.settings import check_settings
from assay.config import LoopConfig, TrainConfig
from assay.engine import SamplingParams, generate
from assay.engine.base import Request
from assay.engine.native.engine import NativeEngine
from assay.engine.sampler import LOG_STEPS
from assay.mesh import Mesh
from assay.models import Decoder, ModelSpec, build_preset
from assay.models.device import deterministic, is_deterministic
from assay.runs.console import Console
from assay.training.learner.learner import Learner
from assay.types import UserError

STRICT = ("--train.deterministic", "true")
LOSS = """
import torch
from assay.algos.terms import ppo_clip

def loss(logprobs, behaviour, advantages, low, high):
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return ppo_clip(logprobs, behaviour, advantages, low, high)
"""


def state() -> tuple[Any, ...]:
    """What a run must leave as it was."""
    filling: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        filling.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        is_deterministic(),
    )


@pytest.mark.parametrize("process", ["same", pytest.param("separate", marks=pytest.mark.slow)])
def test_operators_are_strict_while_the_run_trains(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], process: str
) -> None:
    (small.folder / "loss.py").write_text(LOSS)
    path, before = f"{small.folder}/loss.py:loss", state()
    assert small.train(*STRICT, "--train.process", process, "--algo.policy_loss", path, "--reward.workers", 0) == 0
    assert state() == before
    assert small.summary()["deterministic"] is True
    assert small.train("--algo.policy_loss", path, "--name", "other") != 0  # without the setting
    assert "the loss function failed: AssertionError" in capsys.readouterr().err


def test_a_program_has_its_own_state_after_a_run_and_after_a_failed_one(small: SmallRuns) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    try:
        before, within = state(), []
        settings: Any = {"runs_dir": str(small.runs), "train": {"deterministic": True}, "quiet": True}
        run = assay.train(small.config, callbacks=[lambda *_: within.append(state())], **settings)
        assert within == [(True, False, False, False, True)] * 2 and run.summary["deterministic"]
        assert state() == before
        with pytest.raises(UserError, match=r"the callback .* failed"):
            assay.train(small.config, callbacks=[fail], **settings)
        assert state() == before
        with pytest.raises(UserError, match=r"sampling\.max_new_tokens"):  # while it is built
            assay.train(small.config, max_new_tokens=10_000, **settings)
        assert state() == before
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": {"name": "async"}}, "asynchronous training, .*: set source.max_staleness = 0"),
        ({"engine": "vllm"}, "engine.name = 'vllm', .*: set it to 'auto'"),
        ({"engine": "sglang"}, "engine.name = 'sglang', .*: set it to 'auto'"),
        ({"engine": "assay"}, "engine.name = 'assay', .*: set it to 'auto'"),
        ({"reference": {"url": "http://127.0.0.1:1"}}, "reference.url, .*: set algo.reference"),
        ({"env": {"name": "guess", "max_seconds": 3.0}}, "env.max_seconds, .*: set env.max_steps"),
    ],
)
def test_what_depends_on_time_is_refused(settings: dict[str, Any], message: str) -> None:
    check_settings(TrainConfig.model_validate(settings))
    with pytest.raises(UserError, match=f"^train.deterministic = true cannot be combined with {message}"):
        check_settings(TrainConfig.model_validate({**settings, "train": {"deterministic": True}}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"source": {"name": "async", "max_staleness": 0}},
        {"engine": "hf", "device": "cpu"},
        {"cluster": {"kind": "ray", "learners": 2}, "reward": {"pool": "ray"}, "env": {"name": "guess", "pool": "ray"}},
    ],
)
def test_what_can_be_repeated_is_allowed(settings: dict[str, Any]) -> None:
    check_settings(TrainConfig.model_validate({**settings, "train": {"deterministic": True}}))


def test_an_engine_without_exact_seeds_is_refused() -> None:
    engine = engine_for(model_of("llama"))
    engine.info = replace(engine.info, capabilities=replace(engine.info.capabilities, exact_seeds=False))
    cfg = TrainConfig()
    check_capabilities(cfg, engine, False, "fingerprint", Console())
    cfg.train.deterministic = True
    with pytest.raises(UserError, match=r"no exact seeds \(exact_seeds\), which train.deterministic = true needs"):
        check_capabilities(cfg, engine, False, "fingerprint", Console())


def test_a_token_budget_that_depends_on_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        large = Decoder(ModelSpec("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192))
    monkeypatch.setattr(build_models, "free_memory", lambda device: 8 * 2**30)
    assert choose_token_budget(large, torch.float32, Mesh()) == 1024
    with deterministic(True, "cpu"):
        with pytest.raises(UserError, match=r"set train.token_budget, e.g. to 1024$"):
            choose_token_budget(large, torch.float32, Mesh())
        monkeypatch.setattr(build_models, "free_memory", lambda device: 800 * 2**30)
        assert choose_token_budget(large, torch.float32, Mesh()) == 16384


# Operators that torch.use_deterministic_algorithms refuses on CUDA, and that a loss could use.
REFUSED = {
    *("put_", "histc", "bincount", "kthvalue", "median", "nanmedian", "mode", "nll_loss2d_forward", "_embedding_bag"),
    *("scatter_reduce_", "scatter_reduce", "index_reduce", "index_reduce_", "_ctc_loss_backward"),
}


class Operators(TorchDispatchMode):
    """Collects the operators that run, and those that have no deterministic form on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.refused: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.add(name)
        if name in REFUSED or (name in ("cumsum", "cumsum_", "cumprod") and args[0].is_floating_point()):
            self.refused.add(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def observed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """The operators of advantages and updates."""
    operators = Operators()
    with monkeypatch.context() as patch:
        for name in ("credit", "update"):
            method = getattr(Learner, name)

            def observing(self: Learner, *args: Any, method: Any = method) -> Any:
                with operators:
                    return method(self, *args)

            patch.setattr(Learner, name, observing)
        yield operators


@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, quick=["dapo", "ppo"]))
def test_every_recipe_trains_with_operators_that_are_deterministic_on_a_gpu(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    more: tuple[object, ...] = ("--algo.entropy_coef", 0.01, "--algo.updates", 2) if recipe == "grpo" else ()
    with observed(monkeypatch) as operators:
        assert small.train(*STRICT, *more, "--algo.recipe", recipe) == 0
    assert operators.seen >= {"embedding_dense_backward", "index_select", "mm"}
    assert operators.refused == set()


@pytest.mark.slow
@pytest.mark.parametrize("cov", ["clip_cov", "kl_cov"])
def test_covariance_control_is_deterministic_on_a_gpu(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch, cov: str
) -> None:
    words = ("--algo.cov", cov, "--algo.updates", 2, "--algo.correction", "sequence_truncate", "--algo.kl_coef", 0.1)
    with observed(monkeypatch) as operators:
        assert small.train(*STRICT, *words) == 0
    assert operators.seen and operators.refused == set()


def windows(monkeypatch: pytest.MonkeyPatch, engine: NativeEngine, requests: list[Request]) -> list[tuple[int, int]]:
    """Rows and steps of each window of decoding steps."""
    made: list[tuple[int, int]] = []
    decode = engine.runner.decode
    with monkeypatch.context() as patch:
        patch.setattr(
            engine.runner, "decode", lambda size, steps, span: made.append((size, steps)) or decode(size, steps, span)
        )
        generate(engine, requests)
    return made


def test_an_engine_decodes_in_the_windows_of_a_new_one_after_its_prefix_cache_was_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed run has a new engine. On a GPU, windows decide which rows are computed together."""
    requests = requests_for(mixed_prompts(), SamplingParams(n=3, max_new_tokens=40))
    used, new = (engine_for(model_of("llama"), MODES["windows"]) for _ in range(2))
    expected = windows(monkeypatch, new, requests)
    generate(used, requests_for(mixed_prompts(seed=1), SamplingParams(max_new_tokens=7)))
    assert used.scheduler.step % LOG_STEPS
    used.reset_prefix_cache()
    assert windows(monkeypatch, used, requests) == expected


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_are_compiled_with_the_same_numbers_of_tokens_in_every_run(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more once the run has begun: later numbers of tokens differ between a run and a resumed one."""
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    stopped, sizes = [], []
    monkeypatch.setattr("torch._dynamo.run", lambda function: stopped.append(len(sizes)) or function)
    model = build_preset("nano", vocab_size=20, max_length=64, seed=0)
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *layout: sizes.append(len(ids)) or hidden(ids, *layout))
    settings = LoopConfig(compile="on", activation_checkpointing=recompute)
    prepare_policy(model, settings)
    assert sizes == stopped == [] and not any("deterministic" in options["options"] for options in compiled)
    compiled.clear()
    with deterministic(True, "cpu"):
        prepare_policy(model, settings)
    assert set(sizes) == {build_models.WARM_UP_TOKENS}
    # What lies between two attentions; or what comes before and after each one, if layers are recomputed.
    assert stopped == [len(sizes)] * (2 * model.spec.layers if recompute else 1)
    assert len(compiled) == len(stopped) and all(options["options"]["deterministic"] for options in compiled)
    assert all(weight.grad is None for weight in model.parameters())
