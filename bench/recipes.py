"""Train a config with several recipes and seeds, all from the same weights, and compare what they reach.

    python bench/recipes.py configs/compare-abacus.toml --recipes grpo,dapo --seeds 3 --json found.json --png found.png

All runs sample the same number of answers. An interrupted comparison resumes when it is started again. Any setting of
`assay train` can be changed with --section.key VALUE. `recipe_report.py` has the statistics, the table and the plot.
"""

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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from recipe_report import Outcome, compare_recipes, draw_recipes, markdown

from assay.algos import RECIPES
from assay.algos.component import require_name
from assay.bench.results import describe_machine, describe_versions
from assay.cli.main import main, run_command
from assay.config import AlgoConfig, TrainConfig
from assay.config.settings import load_settings, to_toml
from assay.runs.console import Console
from assay.runs.directory import as_name
from assay.runs.files import read_json, write_json, write_text
from assay.runs.resolve import differences
from assay.types import UserError

HELP = (
    "Train a config with several recipes and seeds, all from the same weights and with the same number of sampled "
    "answers, and compare the results. An interrupted comparison resumes when it is started again."
)
SETTINGS = TrainConfig
PROGRAM = "python bench/recipes.py"
DEFAULT_RECIPES = "reinforce,grpo,dr_grpo,dapo,rloo,simple"


@dataclass(frozen=True)
class PlannedRun:
    """A run of the comparison, which `assay COMMAND` creates unless it exists."""

    command: str  # train or sft
    cfg: TrainConfig

    @property
    def path(self) -> Path:
        return Path(self.cfg.runs_dir) / self.cfg.name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="TOML file, e.g. configs/compare-abacus.toml; its [algo] section is ignored")
    parser.add_argument("--recipes", default=DEFAULT_RECIPES, metavar="A,B,...", help=f"[{DEFAULT_RECIPES}]")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="number of seeds, from the config's on [1]")
    parser.add_argument("--against", default="grpo", metavar="RECIPE", help="the baseline of all comparisons [grpo]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row per run, and the comparisons")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the learning curves")
    parser.add_argument("--md", type=Path, metavar="FILE", help="write the table as Markdown")


def run(args: argparse.Namespace) -> int:
    console = Console()
    warnings.showwarning = lambda message, *_: console.warn(str(message))
    cfg = load_settings(TrainConfig, args.config, args.overrides)
    cfg.name = cfg.name or as_name(Path(args.config).stem)
    recipes = check(args, cfg)
    warm_start, runs = plan(cfg, recipes, args.seeds)
    for planned in filter(None, (warm_start, *(run for *_, run in runs))):
        check_same(planned)  # all of them, before hours are spent
    if warm_start is not None:
        make(warm_start, console, "warm start, shared by all runs")
    outcomes: list[Outcome] = []
    for number, (recipe, seed, planned) in enumerate(runs, 1):
        make(planned, console, f"run {number} of {len(runs)}: {recipe}, seed {seed}")
        outcomes.append(Outcome.read(planned.path, recipe, seed))
        report(args, outcomes, warm_start)
    print(report(args, outcomes, warm_start))
    return 0


def check(args: argparse.Namespace, cfg: TrainConfig) -> list[str]:
    """Return the recipes; mistakes are reported before anything is run."""
    recipes = list(dict.fromkeys(name.strip() for name in args.recipes.split(",") if name.strip()))
    for name in (*recipes, args.against):
        require_name("recipe", name, RECIPES)
    if args.against not in recipes:
        raise UserError(f"--against {args.against} is not one of --recipes {args.recipes}: add it, or name another")
    if args.seeds < 1:
        raise UserError("--seeds must be at least 1")
    if cfg.train.epochs and not cfg.train.budget:
        raise UserError("recipes are compared by sampled answers, not epochs: set train.budget or train.steps")
    for path in filter(None, (args.json, args.png, args.md)):
        if not path.parent.is_dir():
            raise UserError(f"cannot write {path}: the folder {path.parent} does not exist")
    return recipes


def plan(
    cfg: TrainConfig, recipes: Sequence[str], seeds: int
) -> tuple[PlannedRun | None, list[tuple[str, int, PlannedRun]]]:
    """The warm start, if there is one, and a run per recipe and seed, ordered by seed to allow early comparisons."""
    loop = cfg.train
    budget = loop.budget or loop.steps * loop.prompts * loop.samples
    warm_start = None
    if cfg.sft.steps:
        warm_start = PlannedRun("sft", cfg.model_copy(update={"name": f"{cfg.name}-sft"}, deep=True))
        warm_start.cfg.train = loop.model_copy(update={"steps": 0, "epochs": 0.0, "budget": 0})
    runs = []
    for seed in range(cfg.seed, cfg.seed + seeds):
        for recipe in recipes:
            own = cfg.model_copy(update={"name": f"{cfg.name}-{recipe}-{seed}", "seed": seed}, deep=True)
            own.algo = AlgoConfig(recipe=recipe)  # the recipe's own settings: the config's [algo] is for one recipe
            own.train.budget = budget
            if warm_start is not None:
                own.model.source, own.sft.steps = f"run:{warm_start.cfg.name}@last", 0
            runs.append((recipe, seed, PlannedRun("train", own)))
    return warm_start, runs


def check_same(planned: PlannedRun) -> None:
    """An existing run must have the planned settings."""
    stored = planned.path / "config.toml"
    if stored.is_file() and (keys := differences(load_settings(TrainConfig, stored, {}), planned.cfg)):
        raise UserError(
            f"{planned.path} was started with another {', '.join(keys[:3])}: "
            "delete it, or give another --name or --runs_dir"
        )


def make(planned: PlannedRun, console: Console, note: str) -> None:
    """Start a run, or resume one that was interrupted; a finished run is kept."""
    if read_json(planned.path / "summary.json"):
        console.note(f"{note}: already finished")
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
        raise UserError(f"{planned.path} did not finish (exit code {code}): start the comparison again to resume it")


def launch(words: Sequence[str]) -> int:
    """Run `assay` in a process of its own, so that each run starts with free memory. Signals are passed on."""
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


def report(args: argparse.Namespace, outcomes: Sequence[Outcome], warm_start: PlannedRun | None) -> str:
    """Write the requested files for the runs so far, and return the table."""
    comparisons = compare_recipes(outcomes, args.against)
    table = markdown(outcomes, comparisons, args.against)
    if args.json is not None:
        content: dict[str, Any] = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "command": " ".join((PROGRAM, shlex.join(command_words(args)))),
            "task": outcomes[0].summary["task"],
            "split": outcomes[0].summary["split"],
            "warm_start": warm_start and read_json(warm_start.path / "summary.json"),
            "rows": [outcome.row() for outcome in outcomes],
            "comparisons": comparisons,
        }
        write_json(args.json, content)
    if args.md is not None:
        write_text(args.md, table)
    if args.png is not None:
        draw_recipes(outcomes, args.png, f"{outcomes[0].summary['task']}: recipes from the same initial weights")
    return table


def command_words(args: argparse.Namespace) -> Iterator[str]:
    yield from (args.config, "--recipes", args.recipes, "--seeds", str(args.seeds))
    yield from ("--against", args.against, *args.settings)
    for option, path in (("--json", args.json), ("--png", args.png), ("--md", args.md)):
        if path is not None:
            yield from (option, str(path))


if __name__ == "__main__":
    raise SystemExit(main(command=partial(run_command, sys.modules[__name__], PROGRAM)))
