"""Rollout lines and arrays in the form in which the page shows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from assay.web.lines import cleaned, context_spans, skip_reason, token_columns, turns_of

TURNS = [
    {"text": "a", "context_tokens": 2, "tokens": 1, "masked": True},
    {"text": "b", "context_tokens": 1, "tokens": 2},
]
LINE: dict[str, Any] = {"turns": TURNS, "advantage": 0.5, "by_token": False}


def arrays(**changes: Any) -> dict[str, np.ndarray]:
    """Two rollouts; the second has two turns, the first of which is masked."""
    nan = float("nan")
    return {
        "offsets": np.array([0, 2, 8]),
        "token_ids": np.arange(8),
        "loss_mask": np.array([0, 1, 0, 0, 0, 0, 1, 1]),
        "engine_logprobs": np.array([0, -9, 0, 0, -1, 0, -2, -3], np.float32),
        "trainer_logprobs": np.array([nan, -9, nan, nan, nan, nan, -2.5, nan]),
        "ref_logprobs": np.full(8, nan),
        "token_advantages": np.array([0, 0, 0, 0, 0, 0, 0.1, 0.2]),
        **changes,
    }


def test_values_of_each_token() -> None:
    table = token_columns(arrays(), 1, LINE)
    assert table["ids"] == [2, 3, 4, 5, 6, 7]
    assert table["sampled"] == [0, 0, 1, 0, 1, 1] and table["mask"] == [0, 0, 0, 0, 1, 1]
    assert table["engine_logprobs"] == [None, None, -1, None, -2, -3]
    assert table["trainer_logprobs"] == [None, None, None, None, -2.5, None]
    assert table["ref_logprobs"] is None and table["entropies"] is None and table["sampling_logprobs"] is None
    assert table["advantages"] == [None, None, None, None, 0.5, 0.5]
    assert token_columns(arrays(), 1, {**LINE, "by_token": True})["advantages"] == [None, None, None, None, 0.1, 0.2]
    assert token_columns(arrays(), 1, {**LINE, "advantage": "NaN"})["advantages"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([0, 5, 2])},
        {"offsets": np.array([0, 2, 99])},
        {"offsets": np.array([0, 2])},
        {"offsets": np.array([0, -3, 8])},
        {"token_ids": np.arange(4)},
        {"loss_mask": np.ones(8)},
        {"engine_logprobs": np.zeros(3)},
        {"engine_logprobs": np.array(["x"] * 8)},
    ],
)
def test_arrays_that_do_not_match(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises((ValueError, IndexError)):
        token_columns(arrays(**changes), 1, LINE)


def test_turns() -> None:
    assert context_spans(LINE) == [(0, 2), (3, 4)]
    turns = turns_of(LINE, ["prompt", "tool says 3"])
    assert [(turn["role"], turn["text"], turn["tokens"]) for turn in turns] == [
        ("context", "prompt", 2),
        ("action", "a", 1),
        ("context", "tool says 3", 1),
        ("action", "b", 2),
    ]
    assert [turn["text"] for turn in turns_of(LINE, None)] == [None, "a", None, "b"]
    assert turns_of({"text": "only", "length": 3}, None)[0]["text"] == "only"  # an evaluation


def test_numbers_that_are_not_finite_are_none() -> None:
    line = cleaned(
        {
            "reward": "NaN",
            "advantage": "-Infinity",
            "verdict": {"reward": "Infinity", "parts": {"accuracy": "NaN", "format": 1.0}},
            "turns": [{"reward": "NaN", "entropy": 0.5}, 7],
            "text": "NaN",
        }
    )
    assert line["reward"] is None and line["advantage"] is None and line["text"] == "NaN"
    assert line["verdict"] == {"reward": None, "parts": {"accuracy": None, "format": 1.0}}
    assert line["turns"] == [{"reward": None, "entropy": 0.5}]
    assert cleaned({"verdict": None, "turns": 3})["turns"] == []


@pytest.mark.parametrize(
    ("updates", "told"),
    [
        ([{"loss": 1.0, "weights": ["layer.0"]}], "an update was skipped, because the weight layer.0 is not finite"),
        ([{"loss": "NaN"}, {}], "2 updates were skipped, because the loss is not finite"),
        ([{"loss": 0.5, "grad_norm": "Infinity"}], "an update was skipped, because the gradient is not finite"),
        (None, "its update was skipped"),
        (["x"], "its update was skipped"),
    ],
)
def test_why_an_update_was_skipped(updates: object, told: str) -> None:
    assert skip_reason({"updates": updates}) == told
