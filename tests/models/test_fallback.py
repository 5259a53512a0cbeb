"""Any causal LM of transformers through the packed interface; progress of downloads and of loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hub_server import hub

from assay.models import HFModel, build_preset, load_model, save_model
from assay.models.base import NO_LIMIT
from assay.models.load import reported_bars, reporting_bar

MODELS = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48},
    "gpt_neo": {
        **{"hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 8, "max_position_embeddings": 48},
        "attention_types": [[["global", "local"], 1]],
    },
    "gemma2": {
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 48, "sliding_window": 8},
        **{"final_logit_softcapping": 3.0, "pad_token_id": 0},
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
}


def build(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=61, **MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_packed_logits_equal_its_own_and_gradients_reach_every_weight(name, randomise, logit_difference):
    hf = randomise(build(name))
    model = HFModel(hf)
    assert logit_difference(model, hf) < 1e-4
    assert model.max_length == (NO_LIMIT if name == "bloom" else 48) and model.vocab_size == 61
    logits = model.unembed(model.hidden(torch.arange(30), [9, 21]))
    logits.log_softmax(-1)[torch.arange(29), torch.arange(1, 30)].sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for _, weight in model.weights())
    assert sum(float(weight.grad.abs().sum()) > 0 for _, weight in model.weights()) > 5


def test_training_mode_leaves_dropout_off(randomise):
    model = HFModel(randomise(build("gpt2")))
    model.eval()
    ids = torch.arange(20)
    expected = model.hidden(ids, [20])
    model.train()
    assert model.training and torch.equal(model.hidden(ids, [20]), expected)


def test_weights_have_their_own_names_and_tied_ones_are_listed_once():
    names = [name for name, _ in HFModel(build("gpt2")).weights()]
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))


Counts = list[tuple[int, int, str]]


def test_a_download_from_the_hub_reports_bytes_and_then_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build_preset("nano", vocab_size=30, max_length=64, seed=0)
    save_model(model, tmp_path / "model")
    size = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    counts: Counts = []
    with hub(tmp_path / "model", "org/name") as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        loaded = load_model("org/name", cache_dir=tmp_path / "cache", report=lambda *count: counts.append(count))
    assert {name: weight.shape for name, weight in loaded.weights()} == {n: w.shape for n, w in model.weights()}
    downloaded = [count for count in counts if count[2] == "bytes"]
    assert downloaded == sorted(downloaded) and downloaded[-1][:2] == (size, size)
    assert counts[: len(downloaded)] == downloaded and counts[-1][2] == "parameters"
    assert capfd.readouterr().err == ""


def test_a_model_of_transformers_reports_its_tensors_and_draws_no_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(tmp_path)
    shown = logging.is_progress_bar_enabled()
    capfd.readouterr()
    counts: Counts = []
    model = load_model(str(tmp_path), report=lambda *count: counts.append(count))
    assert isinstance(model, HFModel) and len(counts) > 5
    assert {unit for *_, unit in counts} == {"tensors"} and counts == sorted(counts) and counts[-1][0] == counts[-1][1]
    assert capfd.readouterr().err == "" and logging.is_progress_bar_enabled() == shown


def test_bars_of_transformers_are_restored() -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    before = gguf.tqdm
    with pytest.raises(ValueError, match="damaged"), reported_bars(None):
        assert gguf.tqdm is not before
        raise ValueError("damaged")
    assert gguf.tqdm is before and logging.set_tqdm_hook(None) is None


def test_of_several_bars_of_bytes_the_largest_count_is_reported() -> None:
    counts: Counts = []
    bar = reporting_bar(lambda *count: counts.append(count), "bytes", only="B")
    files, received, written = bar(total=2), bar(total=8, unit="B"), bar(total=8, unit="B")
    for one in (files, received, received, written, written, written):
        one.update(2)
    assert counts == [(2, 8, "bytes"), (4, 8, "bytes"), (6, 8, "bytes")]
    assert list(bar("abc")) == ["a", "b", "c"]
