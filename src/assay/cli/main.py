"""The command line: dispatch to the commands, whose modules are imported when they are called, and error messages."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from assay import __version__
from assay.runs.console import is_distributed, is_main, one_line, printable_output
from assay.types import UserError, unknown_name

COMMANDS = {
    "train": "train a model on a task by reinforcement learning, as described by a config file",
    "sft": "run only the warm start of a config: supervised fine-tuning on worked solutions",
    "eval": "evaluate one or several models, with intervals and a paired test",
    "chat": "talk to one or several models, and have answers graded",
    "serve": "serve a model over HTTP, with the interface of the OpenAI API",
    "score": "judge the completions in a JSONL file",
    "data": "prepare, show and check the problems of a task",
    "env": "check an environment, or play it interactively",
    "runs": "list and compare runs",
    "report": "write a run as one HTML file: summary, curves, findings, samples, settings",
    "view": "show runs in the browser: curves, prompts, rollouts token by token",
    "doctor": "find out why a run does not learn, or what is wrong with a config",
    "plan": "predict memory, seconds per step and the division of GPUs for a run that is planned",
    "export": "write a checkpoint as a Hugging Face folder or GGUF file, or upload it",
    "slurm": "train as a Slurm batch job that resumes by itself",
    "bench": "measure generation and training: tokens per second, seconds per step, memory",
    "info": "show versions, devices, memory, and which optional packages are installed",
    "completion": "print a script that completes commands, options and settings in a shell",
}

OUT_OF_MEMORY = (
    "out of GPU memory: check with nvidia-smi whether other processes use it, lower engine.kv_cache_gib or "
    "engine.max_batch, or use a smaller model; --debug shows where it happened"
)
MAX_LINE = 1_000  # characters of an error message: names in it may be of any length
FIRST_PROCESS_S = 20.0  # seconds that the first process of a node has to report an error that others have, too
WIDTH = 118
REGISTRIES = {  # settings with built-in names, and where those are; imported only for the help
    "task.name": "assay.tasks.registry:TASKS",
    "env.name": "assay.envs.builtin:ENVS",
    "algo.recipe": "assay.algos.recipes:RECIPES",
    "algo.advantage": "assay.algos.advantages:ADVANTAGES",
    "algo.policy_loss": "assay.algos.terms:LOSSES",
    "algo.aggregate": "assay.algos.component:AGGREGATES",
    "engine.name": "assay.config.sections:BUILT_IN_ENGINES",
}
GENERAL = "general"  # title of the settings without a section


def main(argv: Sequence[str] | None = None, command: Callable[[list[str]], int] | None = None) -> int:
    """Run a command line and return its exit code. `command` replaces the commands of `assay`, for scripts."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # answers may contain characters that the terminal cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Threads of OpenMP that spin while waiting slow everything down as soon as another process needs the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    own, client = split_client(words)
    words = [word for word in own if word != "--debug"] + client
    with printable_output():  # data, model output and file names are untrusted
        return run(command or dispatch, words, "--debug" in own, own_process=argv is None)


def run(command: Callable[[list[str]], int], words: list[str], debug: bool, own_process: bool) -> int:
    """Return the command's exit code. Errors that the user can fix are printed as one line."""
    if own_process:
        warnings.showwarning = lambda message, *_: show_warning(str(message))
    try:
        return command(words)
    except UserError as error:
        if debug:
            traceback.print_exc()
        keep_exit_code(own_process)  # first: SIGTERM must not prevent the message either
        if should_report():
            print(f"assay: {one_line(str(error), MAX_LINE)}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:  # e.g. `assay runs | head`
        silence_closed_streams()
        return 141
    except Exception as error:
        line = None if debug else explained(error)
        if line is None:
            raise
        print(f"assay: {one_line(line, MAX_LINE)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        with suppress(OSError):  # the terminal may be closed
            if is_main():
                print("assay: stopped", file=sys.stderr)
        silence_closed_streams()
        keep_exit_code(own_process)
        return 128 + getattr(stop, "signum", signal.SIGINT)  # the convention of shells


def should_report() -> bool:
    """Whether this process should print an error, because no other rank has printed one.

    Before the process group exists, all ranks read the same settings, and one message per node is enough: its first
    process prints it. The others wait, since the launcher would end the first process as soon as one has ended. When
    that one has ended, it ends them; if it does not, they have an error of their own.
    """
    mesh = sys.modules.get("assay.mesh")
    if mesh is not None and mesh.dist.is_initialized():
        return mesh.first_to_fail()
    return not is_distributed() or os.environ.get("LOCAL_RANK", "0") == "0" or not stopped_within(FIRST_PROCESS_S)


def stopped_within(seconds: float) -> bool:
    """Wait until SIGTERM arrives; whether it did."""
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: arrived.append(number))
    end = time.monotonic() + seconds
    while not arrived and time.monotonic() < end:
        time.sleep(0.05)
    signal.signal(signal.SIGTERM, before)
    return bool(arrived)


def keep_exit_code(own_process: bool) -> None:
    """Ignore SIGTERM from now on: the launcher sends it to all ranks as soon as one has ended."""
    if is_distributed() and own_process:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def show_warning(text: str) -> None:
    """Print one line, without the source location."""
    if is_main():
        print(f"warning: {one_line(text, MAX_LINE)}", file=sys.stderr, flush=True)


def silence_closed_streams() -> None:
    """Discard output to closed streams: Python would fail on it at exit and change the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a daemon may have none
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def explained(error: Exception) -> str | None:
    """One line for errors of the operating system and exhausted resources; None for all others."""
    from assay.runs.files import disk_error

    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be imported yet
        return OUT_OF_MEMORY
    if problem := disk_error(error):
        what, remedy = problem
        return f"{what} ({getattr(error, 'filename', None) or error}): {remedy} first"
    if isinstance(error, OSError):
        name = f" {error.filename}" if error.filename else ""
        return f"cannot read or write{name}: {error.strerror or error or type(error).__name__}"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; --debug shows where it happened"
    if isinstance(error, MemoryError):
        return "out of main memory; --debug shows where it happened"
    return None


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"assay {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    return run_command(importlib.import_module(f"assay.cli.{name}"), f"assay {name}", rest)


def run_command(module: ModuleType, program: str, words: list[str]) -> int:
    """Parse the words as the module declares them, and run it."""
    own = split_client(words)[0]
    asked = next((place for place, word in enumerate(own) if word in ("-h", "--help")), None)
    if hasattr(module, "SETTINGS") and asked is not None:
        if only := "".join(own[asked + 1 : asked + 2]).lstrip("-"):
            print(settings_help(module.SETTINGS, only))
        else:
            print(make_parser(module, program).format_help() + "\n" + settings_help(module.SETTINGS))
        return 0
    return module.run(parse(module, program, words))


def make_parser(module: ModuleType, program: str) -> Parser:
    parser = Parser(prog=program, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    return parser


def parse(module: ModuleType, program: str, words: list[str]) -> argparse.Namespace:
    """A command with SETTINGS takes any --section.key VALUE besides its own options.

    They become `overrides`, a dictionary, and `settings`, the words. An option that is short for a setting has its key
    as `dest`. A command that TAKES_CLIENT has the words after -- as `client`.
    """
    parser = make_parser(module, program)
    client: list[str] = []
    if hasattr(module, "TAKES_CLIENT"):
        words, client = split_client(words)
    if not hasattr(module, "SETTINGS"):
        return parser.parse_args(words)
    from assay.config.settings import literal, parse_overrides

    command_words, settings = split_words(words, parser, module.SETTINGS)
    args = parser.parse_args(command_words)
    short = {key: value for key, value in vars(args).items() if "." in key and value is not None}
    args.settings, args.client = settings, client
    args.overrides = parse_overrides(settings)
    args.overrides |= {key: literal(value) if isinstance(value, str) else value for key, value in short.items()}
    return args


def split_client(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before --, and the rest with it: the command line of another program."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end:]


def split_words(words: Sequence[str], parser: Parser, kind: type) -> tuple[list[str], list[str]]:
    """Separate the command's own arguments from settings, which are returned as --key=value."""
    from assay.config.settings import keys

    switches = {key for key, field in keys(kind) if field.annotation is bool}
    command_words: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, _ = word.partition("=")
        if not word.startswith("--") or key in parser.options:
            command_words.append(word)
            continue
        value_follows = not equals and bool(rest) and not rest[0].startswith("--")
        if value_follows and key[2:].replace("-", "_") in switches:
            value_follows = rest[0].lower() in ("true", "false")
        overrides.append(f"{word}={rest.pop(0)}" if value_follows else word)
    return command_words, overrides


class Parser(argparse.ArgumentParser):
    """Reports mistakes as UserError, in one line, instead of printing the usage."""

    def __init__(self, **settings: Any) -> None:
        self.options: set[str] = set()  # names of all options, except those of groups
        super().__init__(**settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        self.options.update(names)
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see {self.prog} --help)")


def settings_help(kind: type[Any], only: str = "") -> str:
    """The settings of a config class, grouped by section, for --help; `only` those of a section, or one key."""
    from assay.config.settings import keys, section_at  # they take longer to import than the rest

    groups: dict[str, list[str]] = {}
    for key, field in keys(kind):
        section = key.rpartition(".")[0]
        if not only or only in (key, section or GENERAL):
            groups.setdefault(section, []).append(entry(key, field))
    if not groups:
        sections = [GENERAL, *(name for name in kind.model_fields if section_at(kind, [name]))]
        raise unknown_name("section", only, [*sections, *(key for key, _ in keys(kind))], listed=sections)
    lines = ["settings (--section.key VALUE on the command line, or [section] key = value in a TOML file):"]
    for section, entries in groups.items():
        about = section_at(kind, [section]) if section else None
        title = (about.__doc__ or "").strip().splitlines()[0] if about else ""
        lines += ["", f"{section or GENERAL}: {title}".rstrip(), *entries]
    return "\n".join(lines)


def entry(key: str, field: Any) -> str:
    from assay.config.settings import toml_value

    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, "", [], {}) else f" [{toml_value(default)}]"
    names = accepted_names(key, field)
    accepted = f"; {'built in:' if key in REGISTRIES else 'one of'} {', '.join(names)}" if names else ""
    text = textwrap.wrap((field.description or "").strip() + accepted + shown, WIDTH - 32) or [""]
    return "\n".join([f"  --{key:<27} {text[0]}", *(f"{'':32}{line}" for line in text[1:])])


def accepted_names(key: str, field: Any) -> list[str]:
    """The names that a setting accepts, of a registry the built-in ones; empty if there is no fixed set."""
    from assay.config.settings import literals

    if key in REGISTRIES:
        module, _, registry = REGISTRIES[key].partition(":")
        return list(getattr(importlib.import_module(module), registry))
    return literals(field.annotation)


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "assay: teach language models to reason by reinforcement learning with verifiable rewards",
            "",
            "usage: assay COMMAND [...]        assay COMMAND --help shows its options",
            "                                  assay train --help SECTION shows one section of settings",
            "",
            *lines,
            "",
            "start here: assay train configs/demo.toml",
            "all commands take --debug, which shows the traceback of an error",
            "exit codes: 0 done; 1 problems were found (doctor, check); 2 an error; 128 + N stopped by signal N",
        ]
    )
