"""Core data types: the error for unknown names."""

from __future__ import annotations

import pytest

from assay.types import UserError, closest, unknown_name

RECIPES = ["grpo", "gspo", "gpg", "ppo", "dr_grpo"]
KEYS = ["optim.lr", "train.steps", "sft.steps", "algo.clip_high", "optim"]


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("gpro", RECIPES, "grpo"),  # gspo has as many letters in common: swapped letters are more likely
        ("GRPO", RECIPES, "grpo"),
        ("optim.lrr", KEYS, "optim.lr"),
        ("algo.lr", KEYS, "optim.lr"),  # the right key in the wrong section
        ("train.stpes", KEYS, "train.steps"),
        ("whatever", RECIPES, None),
        ("grpo", [], None),
    ],
)
def test_closest_name(name: str, known: list[str], expected: str | None) -> None:
    assert closest(name, known) == expected


def test_unknown_name_suggests_and_lists_what_is_known() -> None:
    error = unknown_name("task", "gms8k", ["gsm8k", "math"], where="in run.toml", listed=["gsm8k", "math", "FILE.py:T"])
    assert isinstance(error, UserError)
    assert str(error) == "unknown task 'gms8k' in run.toml: did you mean 'gsm8k'? known: gsm8k, math, FILE.py:T"
    assert str(unknown_name("task", "x", ["gsm8k", "math"])) == "unknown task 'x'; known: gsm8k, math"
    assert str(unknown_name("argument", "x", [], where="of T")) == "unknown argument 'x' of T; known: none"


def test_unknown_name_leaves_a_long_list_out_if_it_has_a_suggestion() -> None:
    names = [f"name{number}" for number in range(21)]
    assert str(unknown_name("name", "nmae20", names)).endswith("did you mean 'name20'?")
    assert str(unknown_name("name", "x", names)).endswith(", name20")
