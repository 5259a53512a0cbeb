"""Supervised fine-tuning on a task's worked solutions ([sft] section), evaluated before and after; no RL steps."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from assay.cli.train import start
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs.console import make_console
from assay.runs.directory import as_name
from assay.types import UserError

SETTINGS = TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="TOML file, e.g. configs/demo.toml; or give all settings as options")
    parser.add_argument("--dry-run", action="store_true", help="check everything and estimate memory; train nothing")


def run(args: argparse.Namespace) -> int:
    with make_console() as console:
        warnings.showwarning = lambda message, *_: console.warn(str(message))
        cfg = load_settings(TrainConfig, args.config, args.overrides)
        if not cfg.sft.steps:
            raise UserError("nothing to do: set sft.steps, e.g. --sft.steps 200")
        stem = cfg.name or (as_name(Path(args.config).stem) if args.config else "")
        if "name" not in args.overrides:  # the config's name is the name of the whole run
            cfg.name = f"{stem}-sft" if stem else "sft"
        cfg.train.steps, cfg.train.epochs, cfg.train.budget = 0, 0.0, 0
        return start(cfg, console, args.dry_run)
