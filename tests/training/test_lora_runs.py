"""Runs with LoRA, also on a base in 4 bits: files, the reference, and what a resumed run checks."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import SmallRuns, gpt2_folder, inject
from train_parts import make_adamw, make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.mesh import Mesh
from assay.models import (
    Lora,
    PolicyModel,
    build_preset,
    fingerprint,
    load_adapter,
    load_model,
    save_adapter,
    save_model,
)
from assay.runs import checkpoints
from assay.text import char_tokenizer
from assay.training.checkpoint import save_base
from assay.training.learner.low_memory import lower_precision
from assay.training.learner.pack import rows_of
from assay.training.learner.update import Updater
from assay.training.parallel import pick_mode
from assay.training.progress import Stopped
from assay.training.recorder import RunEvaluator

pytestmark = pytest.mark.usefixtures("no_curves")
LORA = ("--lora.rank", 2, "--lora.alpha", 4, "--algo.kl_coef", 0.1, "--optim.lr", 0.01)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    small = SmallRuns(tmp_path_factory.mktemp("lora"))
    assert small.train(*LORA) == 0
    return small


def print_of(folder: Path) -> str:
    return fingerprint(load_model(str(folder)).weights())


def test_the_base_of_adapters_is_saved_exactly(tmp_path: Path) -> None:
    """Its norms are in float32, also where its matrices are in bfloat16."""
    model = build_preset("pico", 64, 64, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn_like(weight)
    save_model(model, tmp_path / "model")
    (tmp_path / "run").mkdir()

    def adapted(folder: Path) -> PolicyModel:
        policy = load_model(str(folder))
        policy.add_lora(Lora(2, 4.0))
        lower_precision(policy, "bfloat16")
        return policy

    policy = adapted(tmp_path / "model")
    save_base(tmp_path / "run", policy, char_tokenizer())
    save_adapter(policy, tmp_path / "adapter")
    again = adapted(tmp_path / "run" / "base")
    load_adapter(again, tmp_path / "adapter")  # an error for any other base
    assert fingerprint(again.weights()) == fingerprint(policy.weights())


def check_adapters(small: SmallRuns, step: int, quantized: bool = False) -> None:
    """A checkpoint has the merged model, the adapters, and moments of the adapters alone."""
    policy, last = load_model(str(small.runs / "small" / "base")), small.checkpoint(step)
    if quantized:
        policy.quantize("cpu")
    policy.add_lora(Lora(2, 4.0))
    load_adapter(policy, last / "adapter")
    assert fingerprint(policy.weights()) == fingerprint(load_file(last / "model" / "model.safetensors").items())
    trained = {name.partition("|")[0] for name in load_file(last / "optimizer.safetensors")}
    assert trained == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert not (small.runs / "small" / "reference").exists()  # the base model is the reference


def test_a_checkpoint_holds_the_merged_model_and_the_adapters(finished: SmallRuns) -> None:
    base, last = finished.runs / "small" / "base", finished.checkpoint(2)
    assert print_of(finished.checkpoint(0) / "model") == print_of(base) != print_of(last / "model")
    check_adapters(finished, 2)


def test_other_commands_use_the_merged_model(finished: SmallRuns, stdout_of: Callable[..., str]) -> None:
    assert "run:small@last" in stdout_of(finished("eval", "run:small@0", "run:small@last", "--eval.final_examples", 3))
    assert finished.train("--model", "run:small@last", "--name", "next", "--train.steps", 0) == 0
    assert print_of(finished.checkpoint(0, "next") / "model") == print_of(finished.checkpoint(2) / "model")


@pytest.mark.slow
def test_the_reference_after_a_warm_start_is_kept_on_resuming(small: SmallRuns) -> None:
    """It was saved after the warm start; whether the settings still have a warm start does not matter."""
    words = (*LORA, "--sft.steps", 2, "--sft.batch", 4, "--save.every", 1)
    assert small.train(*words) == 0
    shutil.copytree(small.runs / "small", small.runs / "other")
    shutil.rmtree(small.checkpoint(2, "other"))
    assert small.resume("other", "--sft.steps", 0) == 0
    small.same_run("small", "other", 2)


def test_a_base_that_a_checkpoint_uses_is_not_written_again(small: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped in its first evaluation has a checkpoint, which a kill while rewriting would destroy."""
    with monkeypatch.context() as patch:
        inject(patch, RunEvaluator, "measure", 1, stop)
        assert small.train(*LORA) == 130
    weights = small.runs / "small" / "base" / "model.safetensors"
    before = weights.stat()
    assert small.checkpoint(0).is_dir() and small.resume("small") == 0
    assert weights.stat().st_mtime_ns == before.st_mtime_ns and weights.stat().st_ino == before.st_ino


def stop() -> None:
    raise Stopped(signal.SIGINT)


@pytest.mark.slow
def test_a_damaged_base_is_written_again_from_the_models_source(
    small: SmallRuns, stdout_of: Callable[..., str]
) -> None:
    assert small.train(*LORA, "--save.every", 1) == 0
    shutil.copytree(small.runs / "small", small.runs / "other")
    shutil.rmtree(small.checkpoint(2, "other"))
    base = small.runs / "other" / "base"
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (base / "model.safetensors").write_bytes(content)
    said = stdout_of(small.resume("other"))
    assert "model.safetensors is damaged" in said and "replacing it with preset:nano" in said
    assert checkpoints.problems(base) == []
    small.same_run("small", "other", 2)


@pytest.mark.slow
def test_another_base_model_is_refused_on_resuming(small: SmallRuns, stderr_of: Callable[..., str]) -> None:
    """The source has changed since, and so cannot replace a damaged base."""
    assert small.train("--name", "source") == 0
    assert small("export", "run:source@0", small.folder / "model") == 0
    assert small.train(*LORA, "--model", small.folder / "model") == 0
    (small.runs / "small" / "base" / "model.safetensors").write_bytes(b"damaged")
    shutil.rmtree(small.folder / "model")
    assert small("export", "run:source@2", small.folder / "model") == 0
    assert "other base weights" in stderr_of(small.resume("small", "--train.steps", 3))


@pytest.mark.slow
def test_adapters_of_a_transformers_model_are_trained_and_resumed(small: SmallRuns, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = gpt2_folder(tmp_path / "model")  # for its tokenizer
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}
    config = AutoConfig.for_model("gpt_neo", vocab_size=vocabulary, max_position_embeddings=96, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = ("--model", folder, *LORA, "--train.steps")
    assert small.train(*words, 3) == 0
    assert small.train(*words, 2, "--name", "longer") == 0
    assert small.resume("longer", "--train.steps", 3) == 0
    first, second = (small.checkpoint(3, name) for name in ("small", "longer"))
    for part in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        left, right = load_file(first / part), load_file(second / part)
        assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)
    assert print_of(first / "model") != print_of(small.runs / "small" / "base")


def adapted() -> PolicyModel:
    policy = tiny_decoder()
    policy.add_lora(Lora(2, 4.0))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (p for p in policy.parameters() if p.requires_grad):
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return policy


def test_the_policy_without_adapters_is_the_same_reference_as_a_copy_of_the_base() -> None:
    algo = make_algorithm("grpo", kl_coef=0.5)
    groups = make_groups(tiny_decoder(), seed=4)
    algo.credit(groups)
    found = {}
    for name in ("itself", "a copy", "another"):
        policy = adapted()
        reference = {"itself": policy, "a copy": tiny_decoder(), "another": tiny_decoder(seed=1)}[name]
        updater = Updater(policy, make_adamw(policy, 1e-2), reference=reference)
        sums = updater._accumulate(rows_of(groups, algo), algo)
        gradients = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        found[name] = torch.cat([sums.losses["loss/kl"].reshape(1), gradients])
    assert torch.allclose(found["itself"], found["a copy"], rtol=0, atol=1e-12)
    assert float((found["itself"] - found["another"]).abs().max()) > 1e-3


NF4 = ("--lora.quantize", "nf4", "--lora.rank", 2, "--lora.alpha", 4, "--algo.kl_coef", 0.1, "--optim.lr", 0.01)


def test_a_resumed_run_equals_one_without_interruption(small: SmallRuns) -> None:
    words = (*NF4, "--save.every", 1, "--train.steps", 3)
    assert small.train(*words) == 0
    shutil.copytree(small.runs / "small", small.runs / "other")
    shutil.rmtree(small.checkpoint(3, "other"))
    small.lose_summary("other")
    assert small.resume("other") == 0
    small.same_run("small", "other", 3)
    check_adapters(small, 3, quantized=True)


def test_a_quantized_model_is_not_sharded_by_itself() -> None:
    policy = tiny_decoder()
    policy.quantize("cpu")
    assert pick_mode("auto", policy, Mesh()) == "ddp"
