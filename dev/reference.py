"""Write the generated pages of docs/reference: settings, commands and the Python interface, from the code.

    python dev/reference.py            # after a change of settings, commands or docstrings
    python dev/reference.py --check    # exit code 1 if a page differs

tests/test_docs.py compares the pages with the code.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.cli.main import COMMANDS, GENERAL, accepted_names, make_parser, overview
from assay.config import TrainConfig
from assay.config.settings import keys, section_at, toml_value

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- written by dev/reference.py: change the code, then run it -->\n"
COLUMNS = "100"  # width of help texts
# Modules whose exported names are the Python interface, the most used ones first.
MODULES = (
    *("assay", "assay.types", "assay.tasks", "assay.rewards", "assay.envs", "assay.algos"),
    *("assay.engine", "assay.models", "assay.runs", "assay.checks", "assay.testing.engine", "assay.testing.env"),
)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def settings_page() -> str:
    lines = [
        "# Settings",
        NOTE,
        "Every setting with its default. `assay train --help SECTION` prints a section. "
        "[Configuration](../guides/configuration.md) describes how values are set.",
        *settings_tables(TrainConfig),
    ]
    known = {key for key, _ in keys(TrainConfig)}
    for name in COMMANDS:
        module = importlib.import_module(f"assay.cli.{name}")
        more = {key for key, _ in keys(getattr(module, "SETTINGS", TrainConfig))} - known
        if more:
            lines += ["", f"## Only of assay {name}", *settings_tables(module.SETTINGS, more, level=3)]
            known |= more
    return "\n".join(lines) + "\n"


def settings_tables(kind: type[Any], only: set[str] | None = None, level: int = 2) -> Iterator[str]:
    """A heading and a table for each section."""
    sections: dict[str, list[str]] = {}
    for key, field in keys(kind):
        if only is None or key in only:
            default = field.get_default(call_default_factory=True)
            shown = "" if default in (None, "", [], {}) else f"`{toml_value(default)}`"
            names = accepted_names(key, field)
            about = f"{field.description or ''}; one of {', '.join(names)}" if names else field.description or ""
            row = f"| `{key}` | {shown} | {cell(about)} |"
            sections.setdefault(key.rpartition(".")[0], []).append(row)
    for section, rows in sections.items():
        about = section_at(kind, [section]) if section else None
        yield from ("", f"{'#' * level} {section or GENERAL}", "")
        if about and about.__doc__:
            yield from (inspect.cleandoc(about.__doc__).splitlines()[0], "")
        yield from ("| setting | default | meaning |", "|---|---|---|", *rows)


def commands_page() -> str:
    lines = ["# Commands", NOTE, "The help text of every command."]
    lines += ["", "```text", overview(), "```"]
    for name in COMMANDS:
        module = importlib.import_module(f"assay.cli.{name}")
        lines += ["", f"## assay {name}", ""]
        for text in help_texts(make_parser(module, f"assay {name}")):
            lines += ["```text", text.rstrip(), "```", ""]
        if hasattr(module, "SETTINGS"):
            sections = sorted({key.rpartition(".")[0] or GENERAL for key, _ in keys(module.SETTINGS)})
            lines += [f"Settings: {', '.join(f'`{section}`' for section in sections)} ([list](settings.md)).", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def help_texts(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Of a command, and of the commands below it."""
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from help_texts(below)


def api_page() -> str:
    lines = [
        "# Python interface",
        NOTE,
        "The exported names of each module, with their docstrings. [Python and notebooks](../guides/python.md) and "
        "[your own loop](../guides/own-loop.md) are guides to them.",
    ]
    described_in: dict[int, str] = {}  # the module, by the id of an object: several modules export the same
    for name in MODULES:
        module = importlib.import_module(name)
        exported = {export: getattr(module, export) for export in getattr(module, "__all__", None) or defined(module)}
        if not exported:
            continue
        lines += ["", f"## {name}", "", first_line(module)]
        for export, value in sorted(exported.items(), key=lambda item: (kind_of(item[1]), item[0].lower())):
            if id(value) in described_in:
                lines += ["", f"`{export}`: see `{described_in[id(value)]}`."]
            else:
                described_in[id(value)] = name
                lines += described(export, value)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def kind_of(value: Any) -> int:
    """Functions come first, then classes, then values."""
    return 1 if inspect.isclass(value) else 0 if inspect.isroutine(value) else 2


def defined(module: ModuleType) -> list[str]:
    """Public classes of a module without `__all__`."""
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return [name for name in own if not name.startswith("_") and inspect.isclass(getattr(module, name))]


def first_line(owner: Any) -> str:
    return (inspect.getdoc(owner) or "").split("\n\n")[0].replace("\n", " ")


def signature(value: Any) -> str:
    """Without annotations, whose text depends on the version of Python, and without defaults that are objects."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    shown = []
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        plain = parameter.replace(annotation=inspect.Parameter.empty)
        if isinstance(plain.default, (int, float, str, tuple, type(None))):
            shown.append(str(plain))
        else:
            empty = plain.default is inspect.Parameter.empty
            shown.append(str(plain) if empty else f"{plain.name}=...")
    return f"({', '.join(shown)})"


def described(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        abstract = issubclass(value, Enum) or getattr(value, "_is_protocol", False)
        call = "" if abstract else f"`{name}{signature(value)}`\n"
        lines = ["", f"### {name}", "", call, docstring(value)]
        for method, member in vars(value).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if method.startswith("_"):
                continue
            if isinstance(function, property):
                lines += [f"- `{method}`: {first_line(function.fget)}".removesuffix(": ")]
            elif inspect.isfunction(function):
                lines += [f"- `{method}{signature(function)}`: {first_line(function)}".removesuffix(": ")]
        if issubclass(value, Enum):
            lines += [f"- `{member.name}`" for member in value]
        return lines
    if callable(value):
        return ["", f"### {name}", "", f"`{name}{signature(value)}`", "", docstring(value)]
    if isinstance(value, dict | tuple | list | frozenset | set):
        names = ", ".join(f"`{key}`" for key in value) if len(value) < 60 else f"{len(value)} entries"
        return ["", f"### {name}", "", names]
    return ["", f"### {name}", "", "A type alias."]


def docstring(value: Any) -> str:
    """Its own one: builtin bases and generated ones of data classes say nothing."""
    text = inspect.cleandoc(vars(value).get("__doc__") or "") if inspect.isclass(value) else inspect.getdoc(value) or ""
    return "" if text.startswith(f"{value.__name__}(") else arguments_as_list(text).replace("<", "&lt;") + "\n"


def arguments_as_list(text: str) -> str:
    """The lines below `Args:` and the like as a Markdown list."""
    text = re.sub(r"^(Args|Returns|Raises|Attributes):\n", r"**\1**\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"\n {8}(?=\S)", " ", text)
    return re.sub(r"^ {4}(?:(\w+): )?", lambda item: f"- `{item[1]}`: " if item[1] else "- ", text, flags=re.MULTILINE)


PAGES = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "api.md": api_page,
}


def pages() -> dict[str, str]:
    os.environ["COLUMNS"] = COLUMNS
    return {name: page() for name, page in PAGES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    written = {file.name: file.read_text() for file in FOLDER.glob("*.md")}
    changed = {name: text for name, text in pages().items() if written.get(name) != text}
    for name, text in changed.items():
        print(f"docs/reference/{name} {'differs' if check else 'written'}")
        if not check:
            (FOLDER / name).write_text(text)
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
