"""Write a checkpoint or another model as a Hugging Face folder with a model card, a GGUF file or a PEFT adapter.

For example:
  assay export run:demo@best my-model
  assay export run:demo@best my-model --push my-user/my-model
  assay export run:demo@best my-model.gguf --gguf q8_0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from assay.build.export import Export, check_destination, export, is_file, is_gguf
from assay.cli.runs import add_runs_dir
from assay.runs.console import Console
from assay.runs.files import print_json
from assay.runs.resolve import PREFIX
from assay.types import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="run:NAME@best (or @last, @STEP), a folder, hub id or GGUF file"
    )
    parser.add_argument("dest", metavar="DEST", type=Path, help="new or empty folder, or a new file NAME.gguf")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of a Hugging Face folder [float32]")
    parser.add_argument("--gguf", choices=("f16", "q8_0"), help="write GGUF with these weights [f16 for NAME.gguf]")
    text = "adapters of a run with LoRA: merge them into the weights, or keep them as a PEFT folder [merge]"
    parser.add_argument("--lora", choices=("merge", "keep"), default="merge", help=text)
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="with --push: a new repository is private")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_runs_dir(parser)


def run(args: argparse.Namespace) -> int:
    options = Export(args.source, args.dest, args.dir, args.dtype, args.gguf, args.lora, args.push, args.private)
    check_options(options)
    check_destination(args.dest)  # before a display is started
    with Console(sys.stderr) as console:
        facts = export(options, console)
    if args.json:
        print_json(facts)
        return 0
    for line in (f"{args.source} -> {args.dest} ({facts['format']})", *facts.get("notes", ())):
        print(line)
    if args.push:
        print(f"{args.dest} -> {facts['pushed']}")
    return 0


def check_options(options: Export) -> None:
    if options.dtype and (is_gguf(options) or options.lora == "keep"):
        raise UserError("--dtype is for Hugging Face folders: remove it, or remove --gguf and --lora keep")
    if options.lora == "keep" and is_gguf(options):
        raise UserError("a GGUF file has merged weights: remove --lora keep, or export to a folder without --gguf")
    if options.lora == "keep" and not options.source.startswith(PREFIX):
        raise UserError(f"--lora keep is for runs with LoRA (run:NAME@best), not for {options.source}")
    if options.push and is_file(options.dest):
        raise UserError(f"--push uploads a folder: give a folder and --gguf f16 or q8_0 instead of {options.dest}")
    if options.private and not options.push:
        raise UserError("--private is for --push OWNER/NAME: add it, or remove --private")
