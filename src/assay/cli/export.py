"""`assay export`: write a checkpoint, a model folder or a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from assay.cli.runs import add_runs_dir
from assay.runs.console import Console
from assay.runs.files import rename, sync_tree
from assay.runs.resolve import load_resolved
from assay.types import UserError

if TYPE_CHECKING:
    from assay.models import PolicyModel
    from assay.models.base import LoadReport
    from assay.text import Tokenizer

HELP = "Write a checkpoint or another model as a Hugging Face folder."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="run:NAME@best (or @last, @STEP), a folder, hub id or GGUF file"
    )
    parser.add_argument("dest", metavar="DEST", type=Path, help="output folder; must be new or empty")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default: float32")
    add_runs_dir(parser)


def run(args: argparse.Namespace) -> int:
    check_destination(args.dest)
    with Console(sys.stderr) as console:
        what = f"loading {args.source}"
        console.announce(what)
        report = partial(console.progress, what)
        model, tokenizer = load_resolved(args.source, args.dir, partial(load, report=report))
        console.announce(f"writing {args.dest}")
        write(model, tokenizer, args.dest, args.dtype)
    print(f"{args.source} -> {args.dest} ({args.dtype})")
    return 0


def write(model: PolicyModel, tokenizer: Tokenizer, dest: Path, dtype: str) -> None:
    """Write the folder under another name, which is changed when it is complete."""
    unfinished = dest.with_name(f".{dest.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save(model, tokenizer, unfinished, dtype)
        sync_tree(unfinished)
        rename(unfinished, dest)  # fails if the folder exists and is not empty
    except OSError as error:
        raise UserError(f"cannot write {dest} ({error.strerror or error}): choose another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_destination(dest: Path) -> None:
    if dest.is_dir() and any(dest.iterdir()):
        raise UserError(f"{dest} is not empty: choose a new folder")
    if dest.exists() and not dest.is_dir():
        raise UserError(f"{dest} is a file: choose a new folder")


def load(source: str, report: LoadReport) -> tuple[PolicyModel, Tokenizer]:
    """Load in float32, so that weights are rounded only once. `report`: see `load_model`."""
    import torch

    from assay.models import load_model
    from assay.text import load_tokenizer

    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, report=report)
    return model, load_tokenizer(source)


def save(model: PolicyModel, tokenizer: Tokenizer, folder: Path, dtype: str) -> None:
    import torch

    from assay.models import save_model

    target = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    save_model(model, folder, target, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id)
    tokenizer.save(folder)
