"""`assay bench recipes`: one config under several recipes and seeds, from the same weights, for as many answers."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from assay.config import AlgoConfig, TrainConfig
from assay.config.settings import load_settings, parse_overrides, to_toml
from assay.runs.console import Console
from assay.runs.directory import as_name
from assay.runs.files import read_json, write_json, write_text
from assay.runs.resolve import differences
from assay.types import UserError

if TYPE_CHECKING:
    from assay.bench.recipes import Outcome

HELP = (
    "Train a config with several recipes and seeds, all from the same weights and for as many sampled answers, and say "
    "what differs. Stopped and called again, it goes on with what is missing."
)
SETTINGS = TrainConfig
USUAL = "reinforce,grpo,dr_grpo,dapo,rloo,simple"


@dataclass(frozen=True)
class Planned:
    """A run of the comparison: `command` makes it if it is not there yet."""

    command: str  # train or sft
    cfg: TrainConfig

    @property
    def path(self) -> Path:
        return Path(self.cfg.runs_dir) / self.cfg.name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="TOML file, e.g. configs/compare-abacus.toml; of its [algo] nothing is used")
    parser.add_argument("--recipes", default=USUAL, metavar="A,B,...", help=f"[{USUAL}]")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seed, seed + 1, ... of the config [1]")
    parser.add_argument("--against", default="grpo", metavar="RECIPE", help="what the others are compared with [grpo]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row a run, and the comparisons")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the learning curves")
    parser.add_argument("--md", type=Path, metavar="FILE", help="write the table as Markdown")


def run(args: argparse.Namespace) -> int:
    console = Console()
    warnings.showwarning = lambda message, *_: console.warn(str(message))
    cfg = load_settings(TrainConfig, args.config, parse_overrides(args.overrides))
    cfg.name = cfg.name or as_name(Path(args.config).stem)
    recipes = check(args, cfg)
    warm, runs = plan(cfg, recipes, args.seeds)
    for planned in filter(None, (warm, *(run for *_, run in runs))):
        check_same(planned)  # before hours are spent
    if warm is not None:
        make(warm, console, "the warm start, for all of them")
    from assay.bench.recipes import Outcome

    outcomes: list[Outcome] = []
    for number, (recipe, seed, planned) in enumerate(runs, 1):
        make(planned, console, f"run {number} of {len(runs)}: {recipe}, seed {seed}")
        outcomes.append(Outcome.read(planned.path, recipe, seed))
        report(args, outcomes, warm)
    print(report(args, outcomes, warm))
    return 0


def check(args: argparse.Namespace, cfg: TrainConfig) -> list[str]:
    """The recipes; whatever cannot work is said before anything is run."""
    from assay.algos import RECIPES
    from assay.algos.component import require_name

    recipes = list(dict.fromkeys(name.strip() for name in args.recipes.split(",") if name.strip()))
    for name in (*recipes, args.against):
        require_name("recipe", name, RECIPES)
    if args.against not in recipes:
        raise UserError(f"{args.against} is not among --recipes {args.recipes}: add it, or name another with --against")
    if args.seeds < 1:
        raise UserError("--seeds must be at least 1")
    if cfg.train.epochs and not cfg.train.budget:
        raise UserError("recipes are compared by answers sampled, not by epochs: set train.budget, or train.steps")
    for path in filter(None, (args.json, args.png, args.md)):
        if not path.parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    return recipes


def plan(cfg: TrainConfig, recipes: Sequence[str], seeds: int) -> tuple[Planned | None, list[tuple[str, int, Planned]]]:
    """The warm start, if there is one, and a run for each recipe and seed: seed by seed, so that some compare early."""
    loop = cfg.train
    budget = loop.budget or loop.steps * loop.prompts * loop.samples
    warm = None
    if cfg.sft.steps:
        warm = Planned("sft", cfg.model_copy(update={"name": f"{cfg.name}-sft"}, deep=True))
        warm.cfg.train = loop.model_copy(update={"steps": 0, "epochs": 0.0, "budget": 0})
    runs = []
    for seed in range(cfg.seed, cfg.seed + seeds):
        for recipe in recipes:
            own = cfg.model_copy(update={"name": f"{cfg.name}-{recipe}-{seed}", "seed": seed}, deep=True)
            own.algo = AlgoConfig(recipe=recipe)  # each as it is published here: a config's changes are for one of them
            own.train.budget = budget
            if warm is not None:
                own.model.source, own.sft.steps = f"run:{warm.cfg.name}@last", 0
            runs.append((recipe, seed, Planned("train", own)))
    return warm, runs


def check_same(planned: Planned) -> None:
    """A run that is there already has to be the one that is asked for."""
    stored = planned.path / "config.toml"
    if stored.is_file() and (keys := differences(load_settings(TrainConfig, stored, {}), planned.cfg)):
        raise UserError(
            f"{planned.path} was begun with another {', '.join(keys[:3])}: "
            "delete it, or give another --name or --runs_dir"
        )


def make(planned: Planned, console: Console, note: str) -> None:
    """Begin a run, go on with one that was stopped, or find it finished."""
    if read_json(planned.path / "summary.json"):
        console.note(f"{note}: done already")
        return
    console.note(note)
    if (planned.path / "config.toml").is_file():
        code = launch(["train", "--resume", str(planned.path), "--trust"])  # its settings are those of this command
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.toml"
            write_text(file, to_toml(planned.cfg))
            code = launch([planned.command, str(file), "--name", planned.cfg.name])
    if code or not read_json(planned.path / "summary.json"):
        raise UserError(f"{planned.path} did not finish (exit code {code}): call again to go on with it")


def launch(words: Sequence[str]) -> int:
    """Each run in a process of its own, so that none finds the memory of another; one signal to us is one to it."""
    process = subprocess.Popen([sys.executable, "-m", "assay", *words], start_new_session=True)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def report(args: argparse.Namespace, outcomes: Sequence[Outcome], warm: Planned | None) -> str:
    """Write what was asked for, of the runs there are so far; gives the table."""
    from assay.bench.recipes import compare_recipes, markdown
    from assay.bench.recipes_picture import draw_recipes
    from assay.bench.results import describe_machine, describe_versions

    comparisons = compare_recipes(outcomes, args.against)
    table = markdown(outcomes, comparisons, args.against)
    if args.json is not None:
        facts: dict[str, Any] = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "command": shlex.join(command_words(args)),
            "task": outcomes[0].summary["task"],
            "split": outcomes[0].summary["split"],
            "warm_start": warm and read_json(warm.path / "summary.json"),
            "rows": [outcome.row() for outcome in outcomes],
            "comparisons": comparisons,
        }
        write_json(args.json, facts)
    if args.md is not None:
        write_text(args.md, table)
    if args.png is not None:
        draw_recipes(outcomes, args.png, f"{outcomes[0].summary['task']}: recipes, from one start")
    return table


def command_words(args: argparse.Namespace) -> Iterator[str]:
    yield from ("assay", "bench", "recipes", args.config, "--recipes", args.recipes, "--seeds", str(args.seeds))
    yield from ("--against", args.against, *args.overrides)
    for option, path in (("--json", args.json), ("--png", args.png), ("--md", args.md)):
        if path is not None:
            yield from (option, str(path))
