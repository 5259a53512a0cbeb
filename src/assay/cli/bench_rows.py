"""What the benchmark commands share: one thing measured after the other, each written before the next is begun."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from assay.runs.console import Console
from assay.types import UserError

Rows = list[dict[str, Any]]
Job = tuple[str, Callable[[], Rows]]  # what to say, and what to measure then


def add_output(parser: argparse.ArgumentParser, peers: str) -> argparse._ArgumentGroup:
    output = parser.add_argument_group("output")
    add_file(output)
    output.add_argument("--peer-rows", type=Path, metavar="FILE", help=peers)
    return output


def add_file(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--json", type=Path, metavar="FILE", help="write the figures, or add them to those in FILE")


def measured(args: argparse.Namespace, peers: Rows, jobs: Sequence[Job], words: Sequence[str], smaller: str) -> Rows:
    """All rows; `words` are the command's own, `smaller` the options that need less memory."""
    import torch

    from assay.bench.results import describe_machine, describe_versions, earlier_rows, save, with_ratios

    console = Console()
    machine, versions = describe_machine(), describe_versions()
    if args.json is not None:
        earlier_rows(args.json, machine, versions)  # a file that cannot be added to is found out first
    rows = list(peers)
    for note, job in jobs:
        console.note(note)
        try:
            rows += job()
        except torch.OutOfMemoryError:
            raise UserError(f"the GPU's memory is full: choose a smaller {smaller}") from None
        if args.json is not None:
            save(args.json, machine, versions, command(args, words), rows)
    return with_ratios(rows)


def command(args: argparse.Namespace, words: Sequence[str]) -> str:
    files = [("--peer-rows", getattr(args, "peer_rows", None)), ("--json", args.json)]
    named = [word for option, path in files if path is not None for word in (option, str(path))]
    return shlex.join(["assay", "bench", args.bench_command, *words, *named])


def ratios_text(row: dict[str, Any]) -> str:
    found = [(name.removeprefix("ratio_to_"), value) for name, value in row.items() if name.startswith("ratio_to_")]
    return ", ".join(f"{value:.2f} x {name}" for name, value in found)


def print_table(cells: Sequence[dict[str, str]], console: Console) -> None:
    """Columns in which nothing stands are left out."""
    used = [name for name in cells[0] if any(cell[name] for cell in cells)]
    console.table("Figures", used, [[cell[name] for name in used] for cell in cells])
