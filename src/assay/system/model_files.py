"""Checks of a Hugging Face folder before its files are read, by every package that reads such folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.types import UserError, describe_error

MAX_LAYERS = 2000  # of a model: lists and modules are created for each layer before weights are read
LAYERS = re.compile(r"\w*layers?")  # num_hidden_layers, n_layer, ...: keys of a config with a number of layers


def check_model_files(folder: Path) -> None:
    """Raise a `UserError` for files that cannot be read to their end, and for an impossible number of layers."""
    try:
        special = [path for path in sorted(folder.iterdir()) if path.exists() and not (path.is_file() or path.is_dir())]
        config = folder / "config.json"
        content = config.read_bytes() if config.is_file() and not special else b"{}"
    except OSError as error:
        raise UserError(f"'{folder}' cannot be read ({describe_error(error)}): check its permissions") from error
    if special:
        raise UserError(f"'{special[0]}' is a pipe, socket or device: replace it with a file, or fetch the model again")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return  # reported by the reader
    for key, number in numbers_in(values):
        if LAYERS.fullmatch(key) and number > MAX_LAYERS:
            raise UserError(f"config.json in '{folder}': {key} must be at most {MAX_LAYERS:,}, not {number!r:.80}")


def numbers_in(values: Any) -> Iterator[tuple[str, int | float]]:
    """All numbers of a config with their keys, also of nested configs."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, int | float):
            yield key, value
        yield from numbers_in(value)
