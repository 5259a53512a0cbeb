"""Runs in tests do not plot their curves."""

from __future__ import annotations

import pytest
from transformers.utils import logging as transformers_logging

transformers_logging.get_logger()  # its handler keeps the stderr of this moment, which is not closed after a test


@pytest.fixture(scope="package", autouse=True)
def without_curves(no_curves: None) -> None:
    """For all tests of this folder."""
