from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def gsm8k_folder() -> str:
    folder = Path(os.environ.get("ASSAY_GSM8K", REPO / "../shared/data/gsm8k"))
    if not (folder / "train.jsonl").is_file():
        pytest.skip("GSM8K is not here: set ASSAY_GSM8K to a folder with train.jsonl and test.jsonl")
    return str(folder)
