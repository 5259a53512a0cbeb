"""Python arguments -> dotted settings, for `assay.config.settings.load_settings`.

Objects of the program (functions, classes, rows) get a name with which settings can refer to them: code is registered
under a path (`assay.rewards.functions`), data and models are written to files in the folder of the runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from assay.config.sections import LoraConfig
from assay.config.settings import PYTHON, Resource, keys, load_settings, resource_of, section_at
from assay.rewards.functions import OBJECT, register_function
from assay.runs.files import atomic_write, make_folder, rename, sync_tree
from assay.tasks import Task
from assay.tasks.sources import SPLIT_STEMS, prepared_row, read_rows
from assay.types import Prompt, UserError, closest, plural

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
        convert: Callable[[Any], Any] = partial(_refuse, key)
        if field and resource_of(field) is Resource.CODE:
            convert = register_function
        if field is None and section_at(kind, full.split(".")) is None and "." not in full:
            convert = repr  # there is no such setting, which the settings report
            near = OF_TRL.get(full) or closest(full, [*short, *known])
            is_setting = any(key.rpartition(".")[2] == full for key in fields)  # in some section
            if near in (*short, *known) and not is_setting:
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


def _refuse(key: str, value: Any) -> Any:
    raise UserError(f"bad value for '{key}': it must be a number, a text, a list or a dict, not {value!r:.100}")


# Error messages, which name objects and rows instead of the paths that stand for them, and arguments instead of options

_OBJECT_PATH = re.compile(rf"'?{OBJECT}[0-9a-f]{{12}}[:.](\w+)'?")
_RESUME = re.compile(r"assay train --resume (\S+)((?: --[\w.]+ [\w.-]+)*)")
_OPTION = re.compile(r"--(task|model|runs_dir|algo\.reference)\b(?: ([\w:@./-]+))?")
_written: dict[str, re.Pattern[str]] = {}  # by path, with which errors name its rows


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


# Rows and models of a program are written to the folder of the runs, under a name that depends on their content only:
# the run can be resumed and evaluated later, also from the command line. The same content is written once.

TOKENIZER = "tokenizer is for a transformers model: leave it out, or pass model={'source': ..., 'tokenizer': 'FOLDER'}"
FOLDER = ".inputs"  # in the folder of the runs
COLUMNS = ("question", "answer", "solution")  # names that `columns` may map
# Fields of PEFT's LoraConfig that are used, or have no effect on training.
OF_PEFT = {"r", "lora_alpha", "target_modules", "peft_type", "task_type", "inference_mode", "auto_mapping"}
OF_PEFT |= {"peft_version", "base_model_name_or_path", "revision", "runtime_config"}
LARGEST_SHARE = 0.5  # of rows that may be held out
TOO_FEW = "data has too few rows to hold out some for validation and test: give at least 3, or pass eval_data"
HELD_OUT = 0.1, 500  # share and number of rows held out for the test, and as many for validation
descriptions: dict[str, str] = {}  # what rows of this program are used for, by the path of their file


def model_source(model: Any, tokenizer: Any = None, runs_dir: str | Path = "runs") -> str:
    """The model as a setting. A transformers model is saved as a folder, together with its tokenizer."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise UserError(TOKENIZER)
        return str(model)
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise UserError(
            f"model must be a path, a hub id, run:NAME@last or a transformers model, not {type(model).__name__}"
        )
    if hasattr(model, "peft_config"):
        raise UserError("model has PEFT adapters: pass model.merge_and_unload(), and new adapters as peft_config")
    if tokenizer is None or not hasattr(tokenizer, "save_pretrained"):
        raise UserError("a transformers model needs its tokenizer: pass tokenizer=AutoTokenizer.from_pretrained(...)")
    folder = Path(runs_dir) / FOLDER
    unfinished = folder / f".unfinished-{os.getpid()}"  # with several processes, each of them writes
    shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(unfinished)
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        return str(_content_addressed(unfinished, f"{type(model).__name__}"))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _content_addressed(unfinished: Path, name: str) -> Path:
    """Rename a folder after its content, unless there is one with the same content already."""
    digest = hashlib.sha256()
    for file in sorted(unfinished.rglob("*")):
        if file.is_file():
            digest.update(file.relative_to(unfinished).as_posix().encode())
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    path = unfinished.with_name(f"{name}-{digest.hexdigest()[:12]}")
    if not path.is_dir():
        sync_tree(unfinished)
        try:
            rename(unfinished, path)
        except OSError:
            if not path.is_dir():  # else another process was faster
                raise
    return path


def lora_settings(peft_config: Any) -> dict[str, Any]:
    """The settings of adapters, from PEFT's LoraConfig or our own."""
    if isinstance(peft_config, LoraConfig):
        peft_config = peft_config.model_dump()
    if isinstance(peft_config, Mapping):
        return {f"lora.{name}": value for name, value in peft_config.items()}
    kind = str(getattr(getattr(peft_config, "peft_type", ""), "value", getattr(peft_config, "peft_type", "")))
    if kind != "LORA":
        raise UserError(f"peft_config must be PEFT's LoraConfig, assay.LoraConfig or a dict, not {peft_config!r:.80}")
    for field in fields(peft_config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        given = getattr(peft_config, field.name)
        if field.name not in OF_PEFT and given != default:
            raise UserError(f"peft_config.{field.name} = {given!r:.80} is not supported: leave it at {default!r}")
    targets = peft_config.target_modules or ["all-linear"]
    values = {"rank": peft_config.r, "alpha": float(peft_config.lora_alpha)}
    return {f"lora.{name}": value for name, value in values.items()} | {
        "lora.targets": [targets] if isinstance(targets, str) else sorted(targets)
    }


def reward_settings(reward: Any) -> dict[str, Any]:
    """Settings of one reward function or judge, or of a list of them, alone or as pairs with their weights.

    "task" stands for the judge of the task, "judge" for the model of the section `judge`; other texts are paths.
    """
    if isinstance(reward, str) or callable(reward):
        return {"reward.function": _function(reward)} if reward != "task" else {}
    if not isinstance(reward, Sequence) or not reward:
        raise UserError(f"reward must be a function, a judge, or a list of them, not {reward!r:.80}")
    pairs = [entry if isinstance(entry, tuple) else (entry, 1.0) for entry in reward]
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[1], bool) or not isinstance(pair[1], int | float):
            raise UserError(f"a weighted reward is a pair (function, weight), not {pair!r:.80}")
    functions, weights = zip(*pairs, strict=True)
    return {"reward.functions": list(map(_function, functions)), "reward.weights": list(map(float, weights))}


def _function(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, type):
        raise UserError(f"a reward must be a function or a judge, not the class {value.__name__}: pass an object of it")
    if not callable(value):
        raise UserError(f"a reward must be a function or a judge, not {value!r:.80}")
    return register_function(value)


def task_settings(
    data: Any,
    eval_data: Any = None,
    columns: Mapping[str, str] | None = None,
    runs_dir: str | Path = "runs",
    task: str | None = None,
) -> dict[str, Any]:
    """The section `task` of the settings. `eval_data`: rows, or the share of `data` that is held out.

    `task`: name of the task that reads `data`; by default any rows with a question and an answer.
    """
    if not isinstance(columns, Mapping | None):
        raise UserError(f"columns must be a dict such as {{'question': 'problem'}}, not {columns!r:.80}")
    args: dict[str, Any] = {f"{name}_column": column for name, column in (columns or {}).items()}
    if unknown := set(columns or ()) - set(COLUMNS):
        raise UserError(f"columns maps {', '.join(COLUMNS)} to columns of the data, not '{min(unknown)}'")
    if data is None:
        if eval_data is not None:
            raise UserError("eval_data needs data to train on: pass data=...")
        return {f"task.args.{name}": column for name, column in args.items()}
    if isinstance(data, Task) or (isinstance(data, type) and issubclass(data, Task)):
        if eval_data is not None:
            raise UserError("eval_data is for rows: a Task has its own test split")
        return {"task": {"name": register_function(data), "args": args}}
    if isinstance(data, str | Path) and eval_data is None:
        return {"task": {"name": task or "jsonl", "path": str(data), "args": args}}
    if isinstance(eval_data, int):
        raise UserError(f"eval_data must be rows, a path, or a share of data such as 0.1, not {eval_data}")
    splits, share = _splits(data), eval_data if isinstance(eval_data, float) else None
    if set(splits) == {"train"} and (share is not None or eval_data is None):
        splits = {"all": splits["train"]}  # some of them are held out, as of a list
    if eval_data is not None and share is None:
        if len(splits) > 1:
            raise UserError("data has several splits already: leave out eval_data")
        splits = {"train": next(iter(splits.values())), "test": _rows(eval_data, "eval_data")}
    if share is not None and set(splits) != {"all"}:
        raise UserError("data has several splits already: a share cannot be held out of it; leave out eval_data")
    if "all" in splits:
        args["val_size"] = held_out(len(splits["all"]), share)
    path = str(_write_rows(splits, Path(runs_dir)))
    descriptions[path] = describe_rows(splits, args.get("val_size", 0))
    return {"task": {"name": task or "jsonl", "path": path, "args": args}}


def held_out(rows: int, share: float | None) -> int:
    """How many rows are held out for the test, and as many for validation."""
    if share is None:
        least, (default, most) = min(1, rows // 3), HELD_OUT
        return max(least, min(most, int(rows * default)))
    if not 0 < share < LARGEST_SHARE:
        raise UserError(f"eval_data as a share of the data must be between 0 and {LARGEST_SHARE}, not {share}")
    held = max(1, round(rows * share))
    if 2 * held >= rows:
        raise UserError(TOO_FEW)
    return held


def _splits(data: Any) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by split, under `all` if there is only one list of them."""
    if not isinstance(data, Mapping):
        return {"all": _rows(data, "data")}
    known = {alias: split for split, aliases in SPLIT_STEMS.items() for alias in aliases}
    if unknown := [name for name in data if name not in known]:
        raise UserError(f"data as a dict has rows by split (train, validation, test), not '{unknown[0]}'")
    return {known[name]: _rows(rows, f"data['{name}']") for name, rows in data.items()}


def _rows(data: Any, name: str) -> list[Mapping[str, Any]]:
    """Rows as dicts: of a list or another iterable, of a `datasets.Dataset`, or of a data frame."""
    if isinstance(data, str | Path):
        return [row.values for row in read_rows(data)]
    if hasattr(data, "to_dict") and hasattr(data, "columns") and not hasattr(data, "features"):
        data = data.to_dict("records") if hasattr(data, "iloc") else data.to_dicts()  # pandas, polars
    if not isinstance(data, Iterable):
        raise UserError(f"{name} must be rows (dicts), a path or a Task, not {type(data).__name__}")
    rows = [prepared_row(row, row.question) if isinstance(row, Prompt) else row for row in data]
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"{name} must have dicts as rows, but row {index} is {type(row).__name__}")
    if not rows:
        raise UserError(f"{name} has no rows")
    return rows


def _write_rows(splits: Mapping[str, Sequence[Mapping[str, Any]]], runs_dir: Path) -> Path:
    """Write rows as JSON lines: one file, or a folder with a file per split."""
    texts = {split: "".join(_line(row, index) for index, row in enumerate(rows)) for split, rows in splits.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:12]
    folder, whole = runs_dir / FOLDER, set(texts) == {"all"}
    path = folder / (f"rows-{digest}.jsonl" if whole else f"rows-{digest}")
    # Errors call this file or folder `data`: the program has given its content as rows.
    _written[str(path)] = re.compile(rf"'?{re.escape(str(path))}(?:/(\w+)\.jsonl)?'?(?::(\d+))?")
    make_folder(folder if whole else path)
    for split, text in texts.items():
        file = path if whole else path / f"{split}.jsonl"
        if not file.is_file():
            with atomic_write(file) as opened:
                opened.write(text.encode())
    return path


def _line(row: Mapping[str, Any], index: int) -> str:
    def convert(value: Any) -> Any:
        if hasattr(value, "tolist"):  # of numpy or torch
            return value.tolist()
        kind = type(value).__name__
        raise UserError(
            f"row {index} has a value of type {kind}, which JSON does not support: convert it to text or numbers"
        )

    try:
        return json.dumps(dict(row), default=convert) + "\n"
    except UserError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"row {index} cannot be written as JSON ({error})") from None


def describe_rows(splits: Mapping[str, Sequence[Any]], held: int) -> str:
    """What rows of a program are used for. `held`: rows for validation, and as many for the test."""
    if "all" in splits:
        rest = len(splits["all"]) - 2 * held
        return f"{plural(rest, 'row')} to train on; {held} each for validation and test, held out at random"
    sizes = ", ".join(f"{plural(len(rows), 'row')} in the {split} split" for split, rows in sorted(splits.items()))
    carved = "; validation: up to a tenth of train, held out at random"
    return sizes if "validation" in splits else sizes + carved
