"""Python arguments -> dotted settings, for `assay.config.settings.load_settings`.

Objects of the program (functions, classes, rows) get a name with which settings can refer to them: code is registered
under a path (`assay.rewards.importing`), data and models are written to files in the folder of the runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from assay.config.settings import PYTHON, Resource, keys, load_settings, resource_of, section_at
from assay.rewards.functions import register_function
from assay.types import UserError, closest

Settings = TypeVar("Settings", bound=BaseModel)
OF_TRL = {  # arguments of TRL's trainers
    "train_dataset": "data",
    "eval_dataset": "eval_data",
    "reward_funcs": "reward",
    "processing_class": "tokenizer",
}

SHORT = {  # names that need no section
    "recipe": "algo.recipe",
    "steps": "train.steps",
    "prompts": "train.prompts",
    "samples": "train.samples",
    "lr": "optim.lr",
    "max_new_tokens": "sampling.max_new_tokens",
}
# The same for functions that sample answers without training.
SHORT_FOR_EVAL = {
    name: f"eval.{name}" for name in ("samples", "temperature", "top_p", "top_k", "max_new_tokens", "stop")
}


def overrides_of(
    settings: Mapping[str, Any], kind: type[BaseModel], short: Mapping[str, str] = SHORT, known: Iterable[str] = ()
) -> dict[str, Any]:
    """Dotted settings from short names, dotted names and nested dicts; values of None are left out. A dotted name has
    precedence over the dict of its section.

    `known`: names of the function's other arguments, for suggestions.
    """
    fields, dotted = dict(keys(kind)), dict[str, Any]()
    given = {name for name, value in settings.items() if value is not None}
    if twice := [(name, full) for name, full in short.items() if {name, full} <= given]:
        raise UserError("'{}' and '{}' are the same setting: give one of them".format(*twice[0]))
    for key, value in sorted(_flat(settings, "", kind), key=lambda item: item[0] in settings):
        full = short.get(key, key)
        field = fields.get(full)
        convert = register_function if field and resource_of(field) is Resource.CODE else _not_allowed(key)
        if field is None and section_at(kind, full.split(".")) is None and "." not in full:
            convert = repr  # there is no such setting, which the settings report
            near = OF_TRL.get(full) or closest(full, [*short, *known])
            if near in (*short, *known) and not _is_better(full, fields):
                raise UserError(f"unknown argument '{full}': did you mean '{near}'?")
        dotted[full] = _plain(value, convert)
    return dotted


def settings_of(kind: type[Settings], config: str | Path | None, overrides: Mapping[str, Any]) -> Settings:
    if not isinstance(config, str | Path | None):
        raise UserError(
            f"config must be the path of a TOML file, not {type(config).__name__}: pass settings as arguments, e.g. "
            "assay.train(**settings)"
        )
    return load_settings(kind, config, overrides, PYTHON)


def _is_better(name: str, fields: Iterable[str]) -> bool:
    """Whether a setting in some section has exactly this name."""
    return any(field.rpartition(".")[2] == name for field in fields)


def _flat(settings: Mapping[str, Any], prefix: str, kind: type[BaseModel]) -> Iterable[tuple[str, Any]]:
    """Nested dicts of sections as dotted keys; an empty one, which resets its section, stays whole, as does a dict that
    is the value of a setting.
    """
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if value is None:
            continue
        if isinstance(value, Mapping) and value and section_at(kind, key.split(".")) is not None:
            yield from _flat(value, f"{key}.", kind)
        else:
            yield key, value


def _plain(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The value as TOML could have it; everything else is converted."""
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, convert) for key, inner in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(inner, convert) for inner in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return value.item()
    return convert(value)


def _not_allowed(key: str) -> Callable[[Any], Any]:
    def refuse(value: Any) -> Any:
        raise UserError(f"bad value for '{key}': it must be a number, a text, a list or a dict, not {value!r:.100}")

    return refuse
