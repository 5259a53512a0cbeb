"""Folders without permissions. Root may read everything, so tests give up their privileges for a while."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that every user can read, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="assay-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def without_permission(*paths: Path) -> Iterator[None]:
    """The paths cannot be read, not even by root."""
    modes = {path: path.stat().st_mode for path in paths}
    is_root = os.geteuid() == 0
    for path in paths:
        path.chmod(0)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)
