"""Write a run as one HTML file to send to others: summary, curves, findings, samples, settings.

The file needs no network and no other file, and has less than 3 MB. It contains prompts and answers of the run, its
settings, and the name of the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from assay.cli.runs import add_runs_dir
from assay.runs.files import reported, write_text
from assay.web.folder import find_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write [RUN-report.html]")
    add_runs_dir(parser)


def run(args: argparse.Namespace) -> int:
    from assay.web.report import write_report

    folder = find_folder(args.run, args.dir)
    path = args.output or Path(f"{folder.resolve().name}-report.html")
    if path.is_dir():
        path = path / f"{folder.resolve().name}-report.html"
    text, shortened = write_report(folder)
    with reported(path, "choose another file with -o FILE"):
        write_text(path, text)
    note = "; samples were shortened to keep it small" if shortened else ""
    print(f"{path} ({len(text.encode()) / 1e6:.2f} MB{note})")
    return 0
