"""Measure the structure of a source tree: files, code lines, longest functions, import cycles; and draw its packages.

    python dev/structure.py [ROOT] [--png FILE]

Code lines are lines with code: no comments, docstrings or blank lines. A package is drawn above all packages that it
imports. The width of a box grows with its code lines. An arrow is left out if a path of other arrows implies it.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import Any

IGNORED = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
Graph = dict[str, set[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", default=".", help="root of the repository [.]")
    parser.add_argument("--png", help="file to draw the packages to")
    args = parser.parse_args()
    source = Path(args.root) / "src"
    files = {module_name(file, source): file for file in sorted(source.rglob("*.py"))}
    lines = {name: code_lines(file.read_text()) for name, file in files.items()}
    graph = {name: imported_modules(file, files) for name, file in files.items()}
    print_packages(lines)
    print_longest_functions(files)
    cycles = find_cycles(graph)
    print(f"import cycles: {len(cycles)}", *("  " + " ".join(cycle) for cycle in cycles), sep="\n")
    if args.png:
        draw(lines, graph, Path(args.png))


def module_name(file: Path, source: Path) -> str:
    return ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def code_lines(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def imported_modules(file: Path, files: dict[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {node.module} if any(f"{node.module}.{alias.name}" not in files for alias in node.names) else set()
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & files.keys()


def print_packages(lines: dict[str, int]) -> None:
    packages: dict[str, list[int]] = defaultdict(list)
    for module, count in lines.items():
        packages[package_of(module)].append(count)
    print(f"{'package':12}{'files':>7}{'code lines':>12}")
    for package, counts in sorted(packages.items()):
        print(f"{package:12}{len(counts):7}{sum(counts):12,}")
    small = sum(0 < count < 70 for count in lines.values())
    print(f"{'all':12}{len(lines):7}{sum(lines.values()):12,}   modules below 70 code lines: {small}")


def print_longest_functions(files: dict[str, Path], number: int = 8) -> None:
    functions = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{module}.{node.name}")
        for module, file in files.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    print("longest functions (lines with docstrings):")
    for length, name in sorted(functions, reverse=True)[:number]:
        print(f"  {length:4}  {name}")


def find_cycles(graph: Graph) -> list[list[str]]:
    """Sets of modules that import each other: those that reach each other along imports."""
    reach = {name: reachable(graph, name) for name in graph}
    cycles = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]
    }
    return sorted(sorted(cycle) for cycle in cycles)


def reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        for other in graph[stack.pop()] - seen:
            seen.add(other)
            stack.append(other)
    return seen


def without_implied(graph: Graph) -> Graph:
    reach = {name: reachable(graph, name) for name in graph}
    return {
        name: {other for other in targets if not any(other in reach[between] for between in targets - {other})}
        for name, targets in graph.items()
    }


def draw(lines: dict[str, int], graph: Graph, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size: dict[str, int] = defaultdict(int)
    uses: Graph = defaultdict(set)
    for module, count in lines.items():
        package = package_of(module)
        size[package] += count
        uses[package] |= {package_of(other) for other in graph[module]} - {package, "__init__"}
    boxes = [name for name in size if size[name] > 5]
    direct = without_implied({name: uses[name] & set(boxes) for name in boxes})
    levels = level_of(boxes, uses)
    figure, axes = plt.subplots(figsize=(11, 11))
    centres: dict[str, tuple[float, float]] = {}
    for level in sorted(set(levels.values())):
        row = sorted(name for name in boxes if levels[name] == level)
        for index, name in enumerate(row):
            centres[name] = ((index + 1) / (len(row) + 1) * 10, level * 1.2)
    for name in boxes:
        for other in direct[name]:
            (x0, y0), (x1, y1) = centres[name], centres[other]
            back = levels[other] >= levels[name]
            style: dict[str, Any] = {"arrowstyle": "->", "color": "#c0392b" if back else "#9aa5b1", "lw": 0.8}
            axes.annotate("", xy=(x1, y1 + 0.2), xytext=(x0, y0 - 0.2), arrowprops=style)
    modules = {name: sum(package_of(module) == name for module in lines) for name in boxes}
    for name, (x, y) in centres.items():
        side = 0.25 + (size[name] ** 0.5) / 45
        axes.add_patch(plt.Rectangle((x - side / 2, y - 0.2), side, 0.4, facecolor="#dce6f2", edgecolor="#34495e"))
        axes.text(x, y, f"{name}\n{size[name]:,} / {modules[name]}", ha="center", va="center", fontsize=7)
    axes.set_xlim(0, 10)
    axes.set_ylim(-0.6, max(levels.values()) * 1.2 + 0.6)
    axes.axis("off")
    axes.set_title(
        "packages: code lines / modules; arrows point to imported packages (implied ones omitted)", fontsize=9
    )
    figure.savefig(file, dpi=130, bbox_inches="tight")


def level_of(boxes: list[str], uses: Graph) -> dict[str, int]:
    levels = dict.fromkeys(boxes, 0)
    for _ in boxes:
        for name in boxes:
            below = [levels[other] for other in uses[name] if other in levels]
            levels[name] = min(max(below, default=-1) + 1, len(boxes))
    return levels


if __name__ == "__main__":
    main()
