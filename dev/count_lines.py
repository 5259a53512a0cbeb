"""Count code lines of Python files, without blank lines, comments and docstrings.

python dev/count_lines.py src/assay            # of all files, by package
python dev/count_lines.py src/assay/rollout src/assay/engine/client.py
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main(places: list[str]) -> None:
    counts: Counter[str] = Counter()
    files = 0
    for place in map(Path, places):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            parts = file.relative_to(place).parts if place.is_dir() else ()
            counts[f"{place}/{parts[0]}" if len(parts) > 1 else str(place)] += code_lines(file.read_text("utf-8"))
            files += 1
    for name, count in sorted(counts.items()):
        print(f"{count:7,}  {name}")
    print(f"{sum(counts.values()):7,}  in {files:,} files")


if __name__ == "__main__":
    main(sys.argv[1:])
