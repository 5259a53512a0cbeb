"""The settings of a command, as a part of its --help."""

from __future__ import annotations

import importlib
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from assay.config.settings import keys, literals, section_at, toml_value
from assay.types import unknown_name

WIDTH = 118
REGISTRIES = {  # settings with built-in names, and where those are; imported only for the help
    "task.name": "assay.tasks.registry:TASKS",
    "env.name": "assay.envs.registry:ENVS",
    "algo.recipe": "assay.algos.recipes:RECIPES",
    "algo.advantage": "assay.algos.advantages:ADVANTAGES",
    "algo.policy_loss": "assay.algos.terms:LOSSES",
    "algo.aggregate": "assay.algos.batch:AGGREGATES",
    "engine.name": "assay.config.sections:BUILT_IN_ENGINES",
}
GENERAL = "general"  # title of the settings without a section


def settings_help(kind: type[BaseModel], only: str = "") -> str:
    """The settings of a config class, grouped by section, for --help; `only` those of a section, or one key."""
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
    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, "", PydanticUndefined, [], {}) else f" [{toml_value(default)}]"
    text = textwrap.wrap((field.description or "").strip() + accepted_names(key, field) + shown, WIDTH - 32) or [""]
    return "\n".join([f"  --{key:<27} {text[0]}", *(f"{'':32}{line}" for line in text[1:])])


def accepted_names(key: str, field: Any) -> str:
    """The names that a setting accepts, as a part of its help; empty if there is no fixed set."""
    if key in REGISTRIES:
        module, _, registry = REGISTRIES[key].partition(":")
        return f"; built in: {', '.join(getattr(importlib.import_module(module), registry))}"
    names = literals(field.annotation)
    return f"; one of {', '.join(names)}" if names else ""
