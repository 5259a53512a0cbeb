"""Find out why a run does not learn, or what is wrong with a config before a run. Nothing is trained or changed.

  assay doctor my_run
  assay doctor configs/demo.toml --optim.lr 1e-5

The exit code is 1 if errors or warnings were found, the run has failed, or one of its files cannot be read. It is 0 if
there is nothing, or only notes.
Options override the settings of a config.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from assay.api.inspection import examine
from assay.config import TrainConfig
from assay.runs.files import print_json

SETTINGS = TrainConfig
UNLIMITED = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|CONFIG", help="name or folder of a run, or a TOML file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    runs_dir = Path(str(args.overrides.get("runs_dir", TrainConfig().runs_dir)))
    findings = examine(args.target, args.overrides, runs_dir)
    if args.json:
        print_json({"target": args.target, **findings.to_dict()})
    else:
        # In a pipe, each finding, example and remedy is one line.
        for line in findings.lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED):
            print(line)
    failed = findings.error or findings.unreadable or any(cause.severity != "note" for cause in findings)
    return int(bool(failed))
