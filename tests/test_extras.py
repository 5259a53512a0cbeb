"""The check of all extras, `make test-extras`."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_extra_has_smoke_tests_that_exist() -> None:
    script = runpy.run_path(str(ROOT / "dev" / "extras.py"))
    smoke, packages = script["SMOKE_TESTS"], script["requirements"]()
    assert smoke.keys() == packages.keys() - {"dev"}
    assert packages["serve"] == ["starlette", "uvicorn", "httptools", "httpx"]
    for words in map(shlex.split, smoke.values()):
        files = [ROOT / word for word in words if word.startswith("tests/")]
        assert files and all(file.is_file() for file in files)
        for name in words[words.index("-k") + 1 :] if "-k" in words else ():
            assert any(name in file.read_text() for file in files)
