"""Blocks and commands of the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str | Path, language: str) -> list[str]:
    """The blocks of a page, or of a part of its text, in this language."""
    source = text.read_text() if isinstance(text, Path) else text
    return [code for kind, code in BLOCK.findall(source) if kind == language]


def block(page: str, language: str, text: str) -> str:
    """The only block of a page of docs/ in this language that contains the text."""
    (found,) = [code for code in blocks(ROOT / "docs" / page, language) if text in code]
    return found


def command_lines(text: str | Path) -> list[list[str]]:
    """The lines of the bash blocks as words, without comments."""
    lines = [line for code in blocks(text, "bash") for line in code.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]
