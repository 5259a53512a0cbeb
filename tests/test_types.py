"""Core data types: the errors for unknown names and missing packages."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

import pytest

from assay.types import (
    DISTRIBUTION,
    Completion,
    Finish,
    Group,
    Problem,
    Prompt,
    Rollout,
    Turn,
    UserError,
    closest,
    hide_credentials,
    missing_extra,
    plural,
    unknown_name,
)


def test_an_error_renders_its_problem_also_in_another_process() -> None:
    problem = Problem("the file is missing", "write it")
    error = pickle.loads(pickle.dumps(UserError(problem)))
    assert str(error) == "the file is missing: write it" and error.problem == problem
    assert UserError("plain text").problem == Problem("plain text")


def test_groups_and_rollouts_are_shown_in_one_line() -> None:
    prompt, tokens = Prompt("gsm8k/test/1", (), "4"), list(range(50_000))
    logprobs = [0.0] * len(tokens)
    rollout = Rollout(prompt, 1, [Turn([1], Completion(tokens, logprobs, logprobs, Finish.STOP), "so\n4")], reward=0.5)
    assert repr(rollout) == "Rollout('gsm8k/test/1', sample=1, reward=0.5, 50,000 tokens, 'so 4')"
    assert repr(Group(prompt, [rollout] * 2)) == "Group('gsm8k/test/1', 2 rollouts, rewards [0.5, 0.5])"


def test_a_noun_is_plural_unless_there_is_one() -> None:
    assert [plural(count, "step") for count in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]


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
        ("steps", KEYS, "train.steps"),  # without a section: the first of equally similar keys
        ("sft.stps", KEYS, "sft.steps"),
        ("sf.steps", KEYS, "sft.steps"),
        ("algo.lrr", KEYS, "optim.lr"),
        ("clip_hihg", KEYS, "algo.clip_high"),
        ("prompts", ["prompt", "train.prompts"], "train.prompts"),  # the same last part, before a similar name
        ("whatever", RECIPES, None),
        ("grpo", [], None),
    ],
)
def test_closest_name(name: str, known: list[str], expected: str | None) -> None:
    assert closest(name, known) == expected


def test_credentials_in_urls_are_hidden_and_the_rest_of_the_text_stays() -> None:
    shown = 'urls = ["http://***@a:1", "https://b/v1?***"] for a@b.c, http://c/d'
    assert hide_credentials('urls = ["http://u:p/@s@a:1", "https://b/v1?key=k"] for a@b.c, http://c/d') == shown


def test_missing_extra_says_how_to_install_it_from_the_index_and_in_a_checkout() -> None:
    error = missing_extra("reading a dataset", "hub", "or give a folder")
    assert isinstance(error, UserError) and "\n" not in str(error)
    for part in ("reading a dataset needs", "pip install 'assay-rl[hub]'", "pip install -e '.[hub]'", "give a folder"):
        assert part in str(error)
    assert str(missing_extra("TensorBoard", "tensorboard")).endswith("'assay-rl[tensorboard]'")


def test_the_distribution_of_the_message_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION and project["scripts"].keys() == {"assay"}


def test_unknown_name_suggests_and_lists_what_is_known() -> None:
    error = unknown_name("task", "gms8k", ["gsm8k", "math"], where="in run.toml", listed=["gsm8k", "math", "FILE.py:T"])
    assert isinstance(error, UserError)
    assert str(error) == "unknown task 'gms8k' in run.toml: did you mean 'gsm8k'? known: gsm8k, math, FILE.py:T"
    assert str(unknown_name("task", "x", ["gsm8k", "math"])) == "unknown task 'x'; known: gsm8k, math"
    assert str(unknown_name("argument", "x", [], where="of T")) == "unknown argument 'x' of T; known: none"
