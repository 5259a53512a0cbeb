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
from os.path import isdir, isfile
from pathlib import Path

from assay.api.inspection import examine_config, examine_run
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs.files import print_json
from assay.types import UserError
from assay.web.folder import find_folder

SETTINGS = TrainConfig
UNLIMITED = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|CONFIG", help="name or folder of a run, or a TOML file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    overrides = args.overrides
    path = Path(args.target).expanduser()
    if isfile(path):  # False for a name that is too long for a path, as of a folder below
        findings = examine_config(load_settings(TrainConfig, path, overrides), str(path))
    else:
        runs_dir = Path(str(overrides.pop("runs_dir", TrainConfig().runs_dir)))
        if overrides:
            raise UserError(f"--{next(iter(overrides))} changes a setting, which is for a config: {path} is a run")
        if path.suffix == ".toml" and not isdir(path) and not isdir(runs_dir / path):
            raise UserError(f"there is no file {args.target}: give an existing config, or the name of a run")
        findings = examine_run(find_folder(args.target, runs_dir))
    if args.json:
        print_json({"target": args.target, **findings.to_dict()})
    else:
        # In a pipe, each finding, example and remedy is one line.
        for line in findings.lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED):
            print(line)
    failed = findings.error or findings.unreadable or any(cause.severity != "note" for cause in findings)
    return int(bool(failed))
