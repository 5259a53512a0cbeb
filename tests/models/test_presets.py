"""Presets: sizes as announced, the same weights for the same seed."""

from __future__ import annotations

import pytest
import torch

from assay.models import PRESETS, build_preset, fingerprint, preset
from assay.types import UserError

SIZES = {"nano": 0.25e6, "tiny": 0.9e6, "tiny-llama": 0.9e6, "small": 4e6, "base": 12e6, "medium": 30e6}


def test_every_preset_is_about_as_large_as_its_name_promises():
    assert SIZES.keys() == PRESETS.keys()
    for name, size in SIZES.items():
        assert preset(name, vocab_size=256, max_length=512).parameters == pytest.approx(size, rel=0.1), name


@pytest.mark.parametrize("name", ["nano", "tiny", "tiny-llama", "small"])
def test_the_count_of_the_spec_is_the_count_of_the_model(name):
    model = build_preset(name, vocab_size=77, max_length=64, seed=0)
    assert sum(weight.numel() for weight in model.parameters()) == model.spec.parameters
    assert (model.vocab_size, model.max_length) == (77, 64)


def test_weights_depend_on_the_seed_alone():
    prints = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(prints))
        prints.append(fingerprint(build_preset("nano", vocab_size=30, max_length=64, seed=seed).weights()))
    assert prints[0] == prints[1] != prints[2]


def test_a_fresh_model_guesses_evenly():
    model = build_preset("tiny", vocab_size=50, max_length=64, seed=0)
    with torch.no_grad():
        logits = model.unembed(model.hidden(torch.arange(50), [50]))
    surprise = torch.nn.functional.cross_entropy(logits[:-1], torch.arange(1, 50))
    assert abs(float(surprise) - torch.log(torch.tensor(50.0))) < 0.3


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'medium'"):
        preset("mediun", vocab_size=10, max_length=10)
    with pytest.raises(UserError, match="vocabulary"):
        preset("tiny", vocab_size=0, max_length=10)
