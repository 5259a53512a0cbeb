"""Error messages for the Python interface: they name objects and rows instead of the paths that stand for them, and
arguments instead of commands and options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.rewards.importing import OBJECT
from assay.types import UserError

_OBJECT_PATH = re.compile(rf"'?{OBJECT}[0-9a-f]{{12}}[:.](\w+)'?")
_RESUME = re.compile(r"assay train --resume (\S+)((?: --[\w.]+ [\w.-]+)*)")
_OPTION = re.compile(r"--(task|model|runs_dir|algo\.reference)\b(?: ([\w:@./-]+))?")
_written: dict[str, re.Pattern[str]] = {}  # by path, with which errors name its rows


def remember_rows(path: Path) -> None:
    """Errors call this file or folder `data`: the program has given its content as rows."""
    _written[str(path)] = re.compile(rf"'?{re.escape(str(path))}(?:/(\w+)\.jsonl)?'?(?::(\d+))?")


def in_python_words(text: str) -> str:
    for path, pattern in _written.items():
        if path in text:
            text = pattern.sub(_named, text)
    text = _RESUME.sub(lambda found: f"assay.train(resume={found[1]!r}{_arguments(found[2])})", text)
    text = _OPTION.sub(lambda found: f"{found[1]}={found[2]!r}" if found[2] else found[1], text)
    return _OBJECT_PATH.sub(r"\1", text)


def _arguments(options: str) -> str:
    """`--optim.lr 1e-5` as `, optim={'lr': 1e-5}`."""
    words = options.split()
    named = [(key.lstrip("-").rpartition("."), value) for key, value in zip(words[::2], words[1::2], strict=True)]
    return "".join(
        f", {section}={{{name!r}: {value}}}" if section else f", {name}={value}" for (section, _, name), value in named
    )


def _named(found: re.Match[str]) -> str:
    split, line = found.groups()
    data = f"data['{split}']" if split else "data"
    return f"row {int(line) - 1} of {data}" if line else data


@contextmanager
def python_errors() -> Iterator[None]:
    """Rewrite the errors of a block or of a decorated function (see the module)."""
    try:
        yield
    except UserError as error:
        if (text := in_python_words(str(error))) != str(error):
            error.args = (text,)
        raise
