"""The settings of a config class, in groups, for `--help`."""

from __future__ import annotations

import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from assay.settings import keys, section_at, toml_value

WIDTH = 118


def settings_help(kind: type[BaseModel]) -> str:
    groups: dict[str, list[str]] = {}
    for key, field in keys(kind):
        section = key.rpartition(".")[0]
        groups.setdefault(section, []).append(entry(key, field))
    lines = ["settings (--section.key VALUE on the command line, or [section] key = value in a TOML file):"]
    for section, entries in groups.items():
        about = section_at(kind, [section]) if section else None
        title = (about.__doc__ or "").strip().splitlines()[0] if about else ""
        lines += ["", f"{section}: {title}" if section else "general:", *entries]
    return "\n".join(lines)


def entry(key: str, field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, "", PydanticUndefined, [], {}) else f" [{toml_value(default)}]"
    text = textwrap.wrap((field.description or "").strip() + shown, WIDTH - 32) or [""]
    return "\n".join([f"  --{key:<27} {text[0]}", *(f"{'':32}{line}" for line in text[1:])])
