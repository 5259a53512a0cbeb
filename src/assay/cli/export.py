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

from assay.build.export import DTYPES, GGUF_TYPES, LORA, Export, export
from assay.cli.runs import add_runs_dir
from assay.runs.console import Console
from assay.runs.files import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="run:NAME@best (or @last, @STEP), a folder, hub id or GGUF file"
    )
    parser.add_argument("dest", metavar="DEST", type=Path, help="new or empty folder, or a new file NAME.gguf")
    parser.add_argument("--dtype", choices=DTYPES, help="of a Hugging Face folder [float32]")
    parser.add_argument("--gguf", choices=GGUF_TYPES, help="write GGUF with these weights [f16 for NAME.gguf]")
    text = "adapters of a run with LoRA: merge them into the weights, or keep them as a PEFT folder [merge]"
    parser.add_argument("--lora", choices=LORA, default=LORA[0], help=text)
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="with --push: a new repository is private")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_runs_dir(parser)


def run(args: argparse.Namespace) -> int:
    options = Export(args.source, args.dest, args.dir, args.dtype, args.gguf, args.lora, args.push, args.private)
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
