"""Tables that compare runs."""

from __future__ import annotations

from assay.web.comparison import blocks


def test_blocks_are_means_on_the_scale_of_all_runs() -> None:
    assert blocks([0.0, 1.0], (0.0, 1.0)) == "▁█ " and blocks([0.5] * 100, (0.0, 1.0)) == "▅" * 16 + " "
    assert blocks([3.0, 3.0], (3.0, 3.0)) == "▁▁ " and blocks([1.0], (0.0, 1.0)) == ""
