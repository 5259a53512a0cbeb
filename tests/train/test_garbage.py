"""How often Python looks for garbage."""

from __future__ import annotations

import gc

import pytest

from assay.train.garbage import SELDOM, seldom_collected


@pytest.mark.parametrize("own, meanwhile", [(700, SELDOM), (2 * SELDOM, 2 * SELDOM), (0, 0)])
def test_searches_are_rare_while_it_lasts_and_as_before_when_it_ends(own: int, meanwhile: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(own, 7, 9)
    try:
        with pytest.raises(ZeroDivisionError), seldom_collected():
            assert gc.get_threshold() == (meanwhile, 7, 9)
            _ = 1 / 0
        assert gc.get_threshold() == (own, 7, 9)
    finally:
        gc.set_threshold(*before)
