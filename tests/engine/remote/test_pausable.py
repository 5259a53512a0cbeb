"""Engines whose servers are paused for updates. test_vllm_engine.py and test_sglang_engine.py interrupt requests."""

from __future__ import annotations

import pytest

from assay.engine.outputs import StopStrings
from assay.engine.remote.pausable import first_stop, merged, sample_seed, truncated


def decode(ids: object) -> str:
    return "".join(chr(ord("a") + token) for token in ids)  # type: ignore[attr-defined]


def test_version_spans_are_cut_with_the_tokens() -> None:
    assert truncated([(0, 3), (1, 2), (2, 4)], 4) == [(0, 3), (1, 1)]
    assert truncated([(0, 3)], 3) == [(0, 3)]


def test_neighboring_spans_of_the_same_version_are_one() -> None:
    assert merged([(0, 3), (0, 2), (1, 1), (0, 4)]) == [(0, 5), (1, 1), (0, 4)]
    assert merged([]) == []


@pytest.mark.parametrize(("stops", "expected"), [(("cd",), 4), (("d", "b"), 2), (("x",), 0)])
def test_the_first_stop_string_ends_the_tokens(stops: tuple[str, ...], expected: int) -> None:
    assert first_stop([0, 1, 2, 3, 4], stops, StopStrings(decode)) == expected


def test_seeds_of_samples_differ_and_fit_into_64_bits() -> None:
    seeds = {sample_seed(seed, sample, place) for seed in range(3) for sample in range(3) for place in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**63 for seed in seeds)
