"""Reading JSONL: one clear sentence for whatever is wrong with a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.types import UserError


@dataclass(frozen=True, slots=True)
class DataRow:
    """One raw row, and where it was found, for messages and ids."""

    values: Mapping[str, Any]
    where: str  # e.g. "train.jsonl:17"
    key: str  # stable within its source, e.g. "16"

    def column(self, *names: str) -> Any:
        """The first of these columns that the row has."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        wanted = " or ".join(f'"{name}"' for name in names)
        raise UserError(f"{self.where} has no column {wanted}; it has {listed(self.values)}")

    def text(self, *names: str) -> str:
        """The same as text; a number is taken as it is written, a list or an object is an error."""
        value = self.column(*names)
        if not isinstance(value, str | int | float):
            wanted = " or ".join(f'"{name}"' for name in names)
            raise UserError(f"{self.where}: the column {wanted} must be text or a number, not {type(value).__name__}")
        return str(value)


def listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"


def read_text(path: Path) -> str:
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise UserError(f"{where} is not valid JSON: {reason}") from None
    if not isinstance(values, dict):
        raise UserError(f"{where} must be a JSON object, not {type(values).__name__}")
    return values


def read_jsonl(path: str | Path) -> list[DataRow]:
    """The rows of a JSONL file; blank lines are skipped, a file without rows is an error."""
    path = Path(path)
    rows: list[DataRow] = []
    # Not splitlines(): it would also break at U+2028 and its kin, which JSON strings may hold.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            rows.append(DataRow(parse_object(line, where), where, str(len(rows))))
    if not rows:
        raise UserError(f"{path} is empty: it needs at least one JSON object, one a line")
    return rows


def jsonl_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)  # ASCII escapes: lone surrogates survive
