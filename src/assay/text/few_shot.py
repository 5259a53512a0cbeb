"""Worked examples to put before a question, and prompts kept in files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from assay.types import Prompt, UserError

Shot = tuple[str, str]  # a question and its worked solution

COLUMNS = (("question", "solution"), ("prompt", "completion"), ("question", "answer"))
SEARCHED = 1_000  # prompts without a solution that are passed over before giving up: generated tasks do not end


def read_text_file(path: str | Path) -> str:
    """A prompt kept in a file; the newline that editors put at the end is not part of it."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig").removesuffix("\n")
    except FileNotFoundError as error:
        raise UserError(f'there is no file "{path}"') from error
    except UnicodeDecodeError as error:
        raise UserError(f'"{path}" is not a UTF-8 text file') from error
    except OSError as error:
        raise UserError(f'cannot read "{path}": {error.strerror}') from error


def load_few_shot(path: str | Path, n: int | None = None) -> list[Shot]:
    """The first n pairs of a JSONL file: question and solution (or answer), or prompt and completion."""
    shots: list[Shot] = []
    # split("\n") and not splitlines(): JSON strings may hold other line separators
    for number, line in enumerate(read_text_file(path).split("\n"), start=1):
        if n is not None and len(shots) >= n:
            break
        if line.strip():
            shots.append(_shot_of_line(line, f"{path}, line {number}"))
    if not shots if n is None else len(shots) < n:
        wanted = "any few-shot example" if n is None else f"{n} few-shot examples"
        raise UserError(f'"{path}" does not hold {wanted}: it has {len(shots)}')
    return shots


def few_shot_from_prompts(prompts: Iterable[Prompt], n: int) -> list[Shot]:
    """The first n prompts that have a worked solution."""
    worked = ((p.question, p.solution) for p in islice(prompts, n + SEARCHED) if p.solution is not None)
    shots = list(islice(worked, n))
    if len(shots) < n:
        raise UserError(f"{n} few-shot examples were asked for, but only {len(shots)} prompts have a worked solution")
    return shots


def _shot_of_line(line: str, where: str) -> Shot:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    if isinstance(row, Mapping):
        for question, solution in COLUMNS:
            if isinstance(row.get(question), str) and isinstance(row.get(solution), str):
                return row[question], row[solution]
    raise UserError(f"{where}: a few-shot example needs text columns question and solution, or prompt and completion")
