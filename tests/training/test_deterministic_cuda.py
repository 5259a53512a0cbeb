"""With `train.deterministic`, runs on a GPU in several processes end with the same weights, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from small_run import SmallRuns, abacus_words

from assay.models import save_model
from assay.models.decoder import Decoder
from assay.models.spec import ModelSpec
from assay.text import word_tokenizer

pytestmark = pytest.mark.gpu
STEPS = 4
SETTINGS = (
    *("--device", "cuda", "--train.deterministic", "true", "--train.steps", STEPS, "--save.every", 2, "--save.keep", 0),
    *("--train.prompts", 16, "--train.samples", 8, "--sampling.max_new_tokens", 40, "--prompt.few_shot", 12),
    *("--eval.every", 1, "--train.token_budget", 4096, "--engine.kv_cache_gib", 1),
)
VARIANTS: dict[str, tuple[object, ...]] = {
    "plain": ("--algo.kl_coef", 0.1, "--train.compile", "off"),
    "compiled": ("--train.compile", "on"),
    "compiled-lora": ("--train.compile", "on", "--lora.rank", 4, "--algo.kl_coef", 0.1),
    "8bit": ("--optim.precision", "8bit", "--train.compile", "on", "--algo.updates", 2),
}


def model_folder(folder: Path) -> Path:
    """A random model of 3M parameters, whose attention runs as in large ones."""
    tokenizer = word_tokenizer(abacus_words())
    sizes = {"hidden": 256, "intermediate": 768, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64}
    spec = ModelSpec(family="qwen2", vocab_size=tokenizer.vocab_size, max_length=1024, qkv_bias=True, **sizes)
    model = Decoder(spec)
    model.initialise(0)
    save_model(model, folder, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    tokenizer.save(folder)
    return folder


def wait_for(processes: list[subprocess.Popen[str]]) -> None:
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


def weights(folder: Path) -> dict[str, bytes]:
    """Weights and optimizer state of a checkpoint."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    """Each variant twice, both with an empty compile cache; then from the middle of the first, with its cache."""
    folder = tmp_path_factory.mktemp("deterministic")
    small, model = SmallRuns(folder), model_folder(folder / "model")

    def start(variant: str, cache: str, *words: object) -> subprocess.Popen[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / f"cache-{variant}-{cache}"))
            patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
            return small.process("train", *words)

    wait_for(
        [
            start(variant, name, small.config, "--model", model, *SETTINGS, *words, "--name", f"{variant}-{name}")
            for variant, words in VARIANTS.items()
            for name in ("first", "second")
        ]
    )
    for variant in VARIANTS:
        resumed = small.runs / f"{variant}-resumed"
        shutil.copytree(small.runs / f"{variant}-first", resumed)
        shutil.rmtree(small.checkpoint(STEPS, resumed.name))
        small.lose_summary(resumed.name)
    wait_for([start(variant, "first", "--resume", f"{variant}-resumed", "--trust") for variant in VARIANTS])
    return small


@pytest.mark.parametrize("other", ["second", "resumed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_have_equal_weights(trained: SmallRuns, variant: str, other: str) -> None:
    before, first, second = (
        weights(trained.checkpoint(step, f"{variant}-{name}"))
        for step, name in ((0, "first"), (STEPS, "first"), (STEPS, other))
    )
    assert first.keys() == second.keys() and any(first[name] != before.get(name) for name in first)
    assert [name for name in first if first[name] != second[name]] == []
    steps = [[row for row in trained.timeless(f"{variant}-{name}") if "step" in row] for name in ("first", other)]
    assert steps[0] == steps[1]
    assert trained.summary(f"{variant}-{other}")["deterministic"] is True
