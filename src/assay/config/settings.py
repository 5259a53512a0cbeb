"""Load and write settings: defaults < TOML file < dotted overrides from the command line, validated together.

Every error is one sentence with the key, its source and, for an unknown key, the nearest valid one or the key that
corresponds to it in another library.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, to_jsonable_python

from assay.types import UserError, closest, unknown_name

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Split = Literal["train", "validation", "test"]


class Resource(Enum):
    """What a setting names. In runs of other people, its use needs the user's consent (`build/trust.py`)."""

    CODE = "imports Python code"
    PROGRAM = "runs programs, or code that comes with a model"
    HOST = "sends data to hosts"
    VARIABLE = "passes on environment variables"
    FILE = "uses files outside of its folder"
    DATA = "reads data or models outside of its folder"  # alone, they need no consent: nothing leaves this machine


Code = Annotated[str, Resource.CODE]
Host = Annotated[str, Resource.HOST]
Variable = Annotated[str, Resource.VARIABLE]
FilePath = Annotated[str, Resource.FILE]
Data = Annotated[str, Resource.DATA]  # a path, or an id of the Hugging Face hub


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    def has_none(value: Any) -> bool:
        below = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return value is None or any(map(has_none, below))

    if has_none(table):
        raise PydanticCustomError("has_none", "should not contain None, which the run could not store: leave it out")
    return table


Table = Annotated[dict[str, Any], AfterValidator(without_none)]  # of any names and values
Args = Annotated[Table, Resource.CODE]  # arguments of a user's code, which may name other code


def resource_of(field: FieldInfo) -> Resource | None:
    return next((entry for entry in field.metadata if isinstance(entry, Resource)), None)


class Section(BaseModel):
    """A table of settings. Unknown keys are rejected. A string is accepted for a list with this one element.

    `short_form` is the key that a plain string sets, as in `model = "SOURCE"`. Of `alternatives`, one is in effect: one
    on the command line resets the alternatives in the file.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
    short_form: ClassVar[str] = ""
    alternatives: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, values: Any) -> Any:
        if isinstance(values, str) and cls.short_form:
            values = {cls.short_form: values}
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for key, field in cls.model_fields.items():
            if isinstance(values.get(key), str) and get_origin(field.annotation) is list:
                values[key] = [values[key]]
        return values


def literals(kind: Any) -> list[str]:
    """All strings but "" of the literal types in an annotation, e.g. of `Literal["k1", "k2"] | None`."""
    if get_origin(kind) is Literal:
        return [value for value in get_args(kind) if isinstance(value, str) and value]
    return [value for part in get_args(kind) for value in literals(part)]


Settings = TypeVar("Settings", bound=BaseModel)
RENAMED = {  # former names of settings
    "algo.rescore": "algo.recompute_logprobs",
    "engine.lend": "engine.sleep_while_training",
    "engine.memory": "engine.kv_cache_gib",
    "optim.final": "optim.min_lr_ratio",
    "optim.initial": "optim.lr_scale",
    "train.recompute": "train.activation_checkpointing",
}


@dataclass(frozen=True)
class Caller:
    """How messages speak of the overrides of settings."""

    where: str
    option: str  # how the user writes the setting {}

    def spelt(self, key: str) -> str:
        return self.option.format(key)


COMMAND_LINE, PYTHON = Caller("on the command line", "--{}"), Caller("in the arguments", "'{}'")


def load_settings(
    kind: type[Settings], file: str | Path | None, overrides: Mapping[str, Any], caller: Caller = COMMAND_LINE
) -> Settings:
    """Settings of one kind from an optional TOML file and dotted overrides such as {"optim.lr": 1e-4}."""
    tree = read_toml(Path(file)) if file is not None else {}
    fields = dict(keys(kind))
    # Sections first: --task NAME resets the path given in the file, never one given on the command line.
    for key, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        if value is True and key in fields and not is_flag(fields[key].annotation):
            names = literals(fields[key].annotation)
            raise UserError(f"{caller.spelt(key)} needs a value" + f": one of {', '.join(names)}" * bool(names))
        set_dotted(tree, key, deepcopy(value), kind, caller)  # later keys change its tables
    reset_alternatives(tree, overrides, kind, caller)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, kind, str(file or ""), overrides, caller)) from None


def reset_alternatives(
    tree: dict[str, Any], overrides: Mapping[str, Any], kind: type[BaseModel], caller: Caller = COMMAND_LINE
) -> None:
    """Remove settings of the file that an alternative on the command line replaces: --train.steps, train.epochs."""
    for name in kind.model_fields:
        section = section_at(kind, [name])
        keys = [key for key in getattr(section, "alternatives", ()) if f"{name}.{key}" in overrides]
        in_effect = [key for key in keys if overrides[f"{name}.{key}"]]
        if len(in_effect) > 1:
            first, second = (caller.spelt(f"{name}.{key}") for key in in_effect[:2])
            raise UserError(f"{first} and {second} exclude each other: give one of them")
        if keys and section is not None:
            for other in set(getattr(section, "alternatives", ())) - set(keys):
                tree[name].pop(other, None)


def is_flag(kind: Any) -> bool:
    """Whether a setting is boolean, so that it may be given on the command line without a value."""
    return bool in (kind, *get_args(kind))


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no config file at {file}: give the path of a TOML file, e.g. configs/demo.toml") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder: give the path of a TOML file, e.g. configs/demo.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{file} is nested too deeply for a config file") from None


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`--optim.lr 1e-4 --model=PATH --eval.strict` -> {"optim.lr": 1e-4, "model": "PATH", "eval.strict": True}"""
    overrides: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise UserError(f"unexpected argument '{word}': settings are changed by --section.key VALUE")
        key, equals, value = word[2:].partition("=")
        if not equals:
            # A following word is the value unless it is the next option; negative numbers are values.
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        overrides[key.replace("-", "_")] = literal(value)
    return overrides


def literal(text: str) -> Any:
    """The TOML value that the text spells, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def set_dotted(
    tree: dict[str, Any], key: str, value: Any, kind: type[BaseModel], caller: Caller = COMMAND_LINE
) -> None:
    *parents, last = key.split(".")
    table = tree
    for i, name in enumerate(parents):
        below = table.get(name, {})
        if isinstance(below, str):  # a short form such as model = "PATH" in the file
            below = short_form(kind, parents[: i + 1], below)
        if not isinstance(below, dict):
            parent = ".".join(parents[: i + 1])
            raise UserError(f"{caller.spelt(key)}: '{parent}' is a value and has no keys of its own")
        table[name] = below
        table = below
    old = table.get(last)
    short = getattr(section_at(kind, [*parents, last]), "short_form", "")
    if isinstance(old, dict) and isinstance(value, str) and short and last not in ("task", "env"):
        old.update(short_form(kind, [*parents, last], value))  # --model PATH changes a [model] table's source only
    else:
        table[last] = value


def short_form(kind: type[BaseModel], path: Sequence[str], value: str) -> dict[str, Any]:
    """The table that a plain string stands for, e.g. {"source": value} for the model."""
    return {getattr(section_at(kind, path), "short_form", ""): value}


def section_at(kind: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    for name in path:
        field = kind.model_fields.get(name)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        kind = field.annotation
    return kind


def keys(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its pydantic field."""
    for name, field in kind.model_fields.items():
        section = section_at(kind, [name])
        if section is None:
            yield prefix + name, field
        else:
            yield from keys(section, f"{prefix}{name}.")


def explain(
    error: ValidationError,
    kind: type[BaseModel],
    file: str,
    overrides: Mapping[str, Any],
    caller: Caller = COMMAND_LINE,
) -> str:
    former = [key for entry in error.errors() if (key := ".".join(map(str, entry["loc"]))) in RENAMED]
    if former:
        names = ", ".join(f"'{key}' is now '{RENAMED[key]}'" for key in former)
        return f"renamed settings {source_of(former[0], file, overrides, caller)}: {names}"
    # An engine that cannot train first: its section is then unknown, too. Then misspelt keys.
    urgent = ["cannot_train", "extra_forbidden"]
    problems = sorted(error.errors(), key=lambda entry: urgent.index(entry["type"]) if entry["type"] in urgent else 2)
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    while path and path[0].startswith("function-"):
        path = path[1:]
    key = ".".join(path)
    where = source_of(key, file, overrides, caller)
    if first["type"] == "extra_forbidden":
        text = unknown_key(key, first["input"], kind, where)
    else:
        text = (
            f"bad value for '{key}' {where}: {first['msg'][0].lower() + first['msg'][1:]}, not {first['input']!r:.200}"
        )
    more = len(problems) - 1
    return text + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def source_of(key: str, file: str, overrides: Mapping[str, Any], caller: Caller) -> str:
    given = any(f"{key}.".startswith(f"{o}.") or f"{o}.".startswith(f"{key}.") for o in overrides)
    return caller.where if given else f"in {file}" if file else "in the settings"


def unknown_key(key: str, value: Any, kind: type[BaseModel], where: str) -> str:
    """Explain an unknown key. A table may hold several of them, e.g. [actor_rollout_ref.rollout] n = 8."""
    valid = [name for name, _ in keys(kind)] + [name for name in kind.model_fields if section_at(kind, [name])]
    for name in leaves(key, value):
        if meaning := explain_foreign(name, valid):
            return f"unknown key '{name}' {where}: {meaning}"
    if SECTIONS.get(key.lower()) in kind.model_fields:
        return f"unknown key '{key}' {where}: did you mean '{SECTIONS[key.lower()]}'?"
    # Of equally similar keys, the first is suggested.
    valid.sort(key=lambda name: name.partition(".")[0] not in PRIMARY)
    if closest(key, valid) is None and (near := nearest_foreign(key)) and (meaning := explain_foreign(near, valid)):
        return f"unknown key '{key}' {where}: {meaning}"
    sections = [name for name in valid if "." not in name]
    if isinstance(value, Mapping) and closest(key, sections) is None:  # a section that does not exist
        for name in leaves(key, value):
            same = [other for other in valid if other.rpartition(".")[2] == name.rpartition(".")[2]]
            if 0 < len(same) <= 3:
                return f"unknown key '{name}' {where}: did you mean {' or '.join(map(repr, same))}?"
    return str(unknown_name("key", key, valid, where=where, listed=kind.model_fields))


def leaves(key: str, value: Any) -> Iterator[str]:
    """The dotted keys of all values in a table; the key itself for a value."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves(f"{key}.{name}", below)
    else:
        yield key


# Names of settings in other libraries (foreign.csv)


class Equivalent(NamedTuple):
    """The key for a setting of another library; empty if there is none. The remark says what differs."""

    library: str
    name: str
    key: str
    remark: str


@cache
def equivalents() -> list[Equivalent]:
    with (Path(__file__).parent / "foreign.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return [Equivalent(*row) for row in rows]


SECTIONS = {  # other names of sections
    "checkpoint": "save",
    "data": "task",
    "dataset": "task",
    "environment": "env",
    "evaluation": "eval",
    "generation": "sampling",
    "logging": "log",
    "optimiser": "optim",
    "optimizer": "optim",
    "rollout": "sampling",
    "trainer": "train",
}
PRIMARY = ("optim", "train", "sampling")  # sections that are meant if a key of several sections is given without one


def explain_foreign(key: str, known: Collection[str]) -> str | None:
    """Say what an unknown dotted key is called here, or None if it is not a setting of another library.

    Parts in front are ignored: a name of another library may be written into any of our sections. So are parts that
    are missing in front, as in `rollout.n`, unless the rest is also the name of one of our keys. An equivalent that
    is not among the `known` keys of the command does not count.
    """
    last_parts = {name.rpartition(".")[2] for name in known}
    parts = key.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        wanted = ".".join(parts[start:])
        exact = [row for row in equivalents() if row.name == wanted]
        partial = [row for row in equivalents() if row.name.endswith(f".{wanted}") and wanted not in last_parts]
        for row in (exact + partial)[:1]:
            return describe(row, parts[0] if start else "", known)
    return None


def nearest_foreign(key: str) -> str | None:
    """Return the name in another library that is nearly the last part of `key`."""
    names = [row.name for row in equivalents()]
    return next(iter(get_close_matches(key.lower().replace("-", "_").rpartition(".")[2], names, 1, cutoff=0.85)), None)


def describe(equivalent: Equivalent, section: str, known: Collection[str]) -> str | None:
    library, name, key, remark = equivalent
    if not key:
        return f"{library}'s {name} is {remark}"
    first, _, last = key.rpartition(".")
    # In a section with a key of this name, that key is meant: critic.learning_rate is critic.lr.
    given = f"{section}.{last}" if first in PRIMARY else key
    key = next((candidate for candidate in (given, key, f"eval.{last}", last) if candidate in known), "")
    if not key:
        return None
    text = f"did you mean '{key}'?" if name == last else f"{library}'s {name} is '{key}' here"
    return text + (f" ({remark})" if remark else "")


# Writing


def to_toml(settings: BaseModel) -> str:
    """The resolved settings as TOML; unset optional values are left out."""
    lines: list[str] = []
    write_table(settings.model_dump(exclude_none=True), "", lines)  # not as JSON, which has no infinity
    return "\n".join(lines).strip() + "\n"


def write_table(table: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
    for key, value in table.items():
        if not isinstance(value, Mapping) or not value:
            lines.append(f"{toml_key(key)} = {toml_value(value)}")
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            path = f"{prefix}{toml_key(key)}"
            lines += ["", f"[{path}]"]
            write_table(value, path + ".", lines)


def toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, int | float):
        return repr(float(value) if isinstance(value, float) else int(value))
    return toml_value(to_jsonable_python(value))  # a path, a date, a set
