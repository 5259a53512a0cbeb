"""Parquet files as rows: single files, and the shards that `datasets` writes. pyarrow is imported only here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from assay.types import UserError, missing_extra, plural

SUFFIX = ".parquet"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)")


def is_parquet(path: str | Path) -> bool:
    return Path(path).suffix.lower() == SUFFIX


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file as plain Python values; binary values that are not text are left out."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_extra(f"reading {path}", "parquet", "or convert it to JSONL") from None
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file")
    if not path.exists():
        raise UserError(f"there is no file {path}")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = file.read().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from None
    return [{name: plain_value(value) for name, value in row.items() if not _is_binary(value)} for row in rows]


def shards_of(folder: Path, stems: Sequence[str]) -> list[Path]:
    """Return the Parquet files of a split: STEM.parquet, STEM-00000-of-00002.parquet and the like, or STEM/*.parquet.

    They may also be in the subfolder data, as in many datasets of the Hugging Face hub.
    """
    for parent in (folder, folder / "data"):
        for stem in stems:
            if (single := parent / f"{stem}{SUFFIX}").is_file():
                return [single]
            if shards := sorted(parent.glob(f"{stem}-*-of-*{SUFFIX}")):
                return _complete(shards, stem)
            if inside := sorted((parent / stem).glob(f"*{SUFFIX}")):
                return inside
    return []


def _complete(shards: Sequence[Path], stem: str) -> list[Path]:
    """Return the shards of one split, in order; raise a UserError if some are missing."""
    matches = [(match, path) for path in shards if (match := _SHARD.fullmatch(path.stem)) and match["stem"] == stem]
    counts = {int(match["count"]) for match, _ in matches}
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise UserError(
            f"{shards[0].parent} has {stem} files of {numbers} shards: keep only those that belong together"
        )
    by_number = {int(match["number"]): path for match, path in matches}
    count = counts.pop() if counts else 0
    if missing := [number for number in range(count) if number not in by_number]:
        raise UserError(
            f"{shards[0].parent} has only {plural(len(by_number), 'shard')} of {count} of {stem}: "
            f"number {missing[0]} is missing"
        )
    return [by_number[number] for number in sorted(by_number)]


def plain_value(value: Any) -> Any:
    """Return a value that JSON can express: dates and decimal numbers become text."""
    if isinstance(value, Mapping):
        return {str(name): plain_value(one) for name, one in value.items() if not _is_binary(one)}
    if isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _is_binary(value: Any) -> bool:
    if not isinstance(value, bytes):
        return False
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
