"""Python arguments -> dotted settings, for `assay.config.settings.load_settings`.

Objects of the program (functions, classes, rows) get a name with which settings can refer to them: code is registered
under a path (`assay.rewards.importing`), data and models are written to files in the folder of the runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from assay.config.settings import PYTHON, Resource, keys, load_settings, resource_of, section_at
from assay.rewards.functions import register_function
from assay.rewards.importing import OBJECT
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


# Error messages, which name objects and rows instead of the paths that stand for them, and arguments instead of options

_OBJECT_PATH = re.compile(rf"'?{OBJECT}[0-9a-f]{{12}}[:.](\w+)'?")
_RESUME = re.compile(r"assay train --resume (\S+)((?: --[\w.]+ [\w.-]+)*)")
_OPTION = re.compile(r"--(task|model|runs_dir|algo\.reference)\b(?: ([\w:@./-]+))?")
_written: dict[str, re.Pattern[str]] = {}  # by path, with which errors name its rows


def remember_rows(path: Path) -> None:
    """Errors call this file or folder `data`: the program has given its content as rows."""
    _written[str(path)] = re.compile(rf"'?{re.escape(str(path))}(?:/(\w+)\.jsonl)?'?(?::(\d+))?")


def in_python_words(text: str) -> str:
    for path, pattern in _written.items():
        if path in text:
            text = pattern.sub(_named, text)
    text = _RESUME.sub(lambda found: f"assay.train(resume={found[1]!r}{_arguments(found[2])})", text)
    text = _OPTION.sub(lambda found: f"{found[1]}={found[2]!r}" if found[2] else found[1], text)
    return _OBJECT_PATH.sub(r"\1", text)


def _arguments(options: str) -> str:
    """`--optim.lr 1e-5` as `, optim={'lr': 1e-5}`."""
    words = options.split()
    named = [(key.lstrip("-").rpartition("."), value) for key, value in zip(words[::2], words[1::2], strict=True)]
    return "".join(
        f", {section}={{{name!r}: {value}}}" if section else f", {name}={value}" for (section, _, name), value in named
    )


def _named(found: re.Match[str]) -> str:
    split, line = found.groups()
    data = f"data['{split}']" if split else "data"
    return f"row {int(line) - 1} of {data}" if line else data


@contextmanager
def python_errors() -> Iterator[None]:
    """Rewrite the errors of a block or of a decorated function, see `in_python_words`."""
    try:
        yield
    except UserError as error:
        if (text := in_python_words(str(error))) != str(error):
            error.args = (text,)
        raise
