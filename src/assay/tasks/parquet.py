"""Parquet files as rows: single files, and the shards that `datasets` writes. pyarrow is imported only here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from assay.system.memory import check_data_fits
from assay.types import UserError, missing_extra, plural

SUFFIX = ".parquet"
TEXT_TYPES = ("string", "large_string", "binary", "large_binary")
ROW_BYTES, VALUE_BYTES = 300, 8  # memory of a row and its origin, and of each value: at least
BATCH_ROWS, BATCH_BYTES = 1_000, 64 * 2**20  # decoded at a time: at most
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
    rows: list[dict[str, Any]] = []
    try:
        # A dictionary has equal texts only once. So a small file with one long text in each row stays small.
        texts = [field.name for field in pyarrow.parquet.read_schema(path) if str(field.type) in TEXT_TYPES]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            check_data_fits(path, file.metadata.num_rows, least_memory(file.metadata))
            for batch in file.iter_batches(batch_rows(file.metadata)):
                rows += batch_values(batch)
                check_data_fits(path, len(rows))
    except MemoryError:
        raise UserError(f"{path} does not fit into memory: use fewer rows or more memory") from None
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from None
    return rows


def least_memory(metadata: Any) -> int:
    """Bytes that the rows of a file need at least, as its footer says."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    values = sum(group.column(number).num_values for group in groups for number in range(group.num_columns))
    return ROW_BYTES * metadata.num_rows + VALUE_BYTES * values


def batch_rows(metadata: Any) -> int:
    """Number of rows to decode at a time."""
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return min(max(BATCH_BYTES * metadata.num_rows // max(size, 1), 1), BATCH_ROWS)


def batch_values(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch; equal texts of a column are the same object."""
    names = batch.schema.names
    rows = zip(*map(column_values, batch.columns), strict=True)
    return [
        {name: value for name, value in zip(names, row, strict=True) if not isinstance(value, bytes)} for row in rows
    ]


def column_values(column: Any) -> list[Any]:
    """Return the plain values of a column; binary values stay bytes."""
    if not hasattr(column, "dictionary"):
        return [plain_value(value) for value in column.to_pylist()]
    used = column.indices.unique().drop_null()
    values = map(plain_value, column.dictionary.take(used).to_pylist())
    by_index = dict(zip(used.to_pylist(), values, strict=True))
    return [by_index.get(index) for index in column.indices.to_pylist()]


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
    """Return a value that JSON can express: dates, decimal numbers and the like become text.

    Bytes that are not text stay bytes. They are left out of rows and objects; in a list they become text.
    """
    if isinstance(value, Mapping):
        fields = ((str(name), plain_value(field)) for name, field in value.items())
        return {name: field for name, field in fields if not isinstance(field, bytes)}
    if isinstance(value, list | tuple):
        items = map(plain_value, value)
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value if isinstance(value, str | int | float | None) else str(value)
