"""GGUF files that we write: read back by us, and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from assay.models import Decoder, build_preset, load_model
from assay.models.base import LoadOptions
from assay.models.gguf import check_writable, greedy, save_gguf
from assay.models.load import load_fallback
from assay.types import UserError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}),
    ("llama", {"rope_parameters": LLAMA3, "head_dim": 32, "max_position_embeddings": 131072}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@torch.no_grad()
def test_spec_and_weights_come_back_within_the_rounding(
    family: str, changes: dict[str, Any], kind: str, make_hf: Any, tmp_path: Path
) -> None:
    make_hf(family, **changes).save_pretrained(tmp_path / "source")
    model = load_model(str(tmp_path / "source"))
    save_gguf(model, tmp_path / "m.gguf", kind, {})
    again = load_model(str(tmp_path / "m.gguf"))
    assert isinstance(model, Decoder) and isinstance(again, Decoder) and again.spec == model.spec
    weights = dict(again.weights())
    for name, exact in ((name, weight.detach()) for name, weight in model.weights()):
        # Steps of Q8_0 are a 127th of the largest value of 32; rows of other lengths stay in float16.
        relative = 1e-3 if kind == "f16" or exact.shape[-1] % 32 else 1 / 254 + 1e-3
        bound = 0.0 if exact.dim() == 1 else relative * float(exact.abs().max())
        error = float((weights[name] - exact).abs().max())
        assert error <= bound and (exact.dim() == 1 or error > 0), name


def test_transformers_reads_the_same_weights(make_hf: Any, logit_difference: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the extra gguf is not installed")
    make_hf("llama").save_pretrained(tmp_path / "source")
    save_gguf(load_model(str(tmp_path / "source")), tmp_path / "m.gguf", "f16", {})
    theirs = load_fallback(tmp_path, LoadOptions("cpu", torch.float32), "m.gguf")
    assert logit_difference(load_model(str(tmp_path / "m.gguf")), theirs.hf) < 1e-4


@pytest.mark.parametrize(
    ("family", "scaling", "changes", "message"),
    [
        ("olmo2", None, {}, "olmo2 cannot be written"),
        ("mistral", None, {"sliding_window": 9}, "mistral with a sliding window"),
        ("llama", "llama3", {}, "usual rope scaling"),  # trained with another original length
    ],
)
def test_models_that_the_format_cannot_express_are_refused(
    family: str, scaling: str | None, changes: dict[str, Any], message: str, make_hf: Any, tmp_path: Path
) -> None:
    make_hf(family, scaling, **changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{message}.*Hugging Face folder"):
        check_writable(load_model(str(tmp_path)))


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = build_preset("pico", vocab_size=30, max_length=64, seed=0)
    for value in (1e5, float("nan")):
        model.model.embed_tokens.weight.data[3, 4] = value
        with pytest.raises(UserError, match="not finite, or too large"):
            save_gguf(model, tmp_path / "m.gguf", "f16", {})


def test_greedy_tokens_of_another_model_are_counted_at_the_same_contexts() -> None:
    model, other = (build_preset("pico", vocab_size=30, max_length=24, seed=seed) for seed in (0, 1))
    expected = greedy(model, [[1, 2, 3], list(range(29))], new=5)  # the second prompt leaves no room, and is cut
    assert [len(sequence) for sequence in expected.sequences] == [8, 24] and expected.tokens == 10
    assert expected.compare(model) == (10, 0.0)
    equal, difference = expected.compare(other)
    assert equal < 10 and difference > 0.01
    # Each token is the most likely one after those before it.
    sequence = expected.sequences[0]
    with torch.no_grad():
        logits = model.unembed(model.hidden(torch.tensor(sequence), [8]))
    assert logits.argmax(-1)[2:-1].tolist() == sequence[3:]
