"""Rollout files: text and verdicts as JSON lines, tokens and log-probabilities as arrays.

`rollouts/step-N.jsonl` has one line per rollout. `rollouts/step-N.npz` holds flat arrays in the same order; rollout i
has the tokens from `offsets[i]` to `offsets[i + 1]`. The .npz file is written first, so a step whose .jsonl file exists
is complete. Evaluations have lines only, in `evals/`. Batches of skipped updates are in `skipped/`, with a .json file
that gives the reason.

Every line, and every .npz file, carries the version of this schema; files without one have version 1. Version 2 added
`trainer_logprobs` and `ref_logprobs`, and leaves `kept_mass` and `entropy` out if the engine does not report them.
`entropies`, `baseline`, `bootstrap_ids` and `inserted` were added later without a new version, because readers can
ignore them.
"""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from assay.runs.files import atomic_write, from_json, json_line, json_lines, make_folder, remove_temporaries
from assay.types import (
    TASK_LABEL,
    Completion,
    Finish,
    Group,
    Prompt,
    Rollout,
    Status,
    Turn,
    UserError,
    Verdict,
    describe_error,
)

Kind = Literal["train", "eval", "skipped"]
SCHEMA = 2  # version of the files that are written here, and the newest one that can be read
_FOLDERS = {"train": "rollouts", "eval": "evals", "skipped": "skipped"}
_VERDICT = tuple(field.name for field in fields(Verdict))
# Arrays of a step that has computed them; NaN for other tokens.
COMPUTED = ("trainer_logprobs", "entropies", "ref_logprobs")
DAMAGE = (  # exceptions that wrong content causes
    *(ValueError, TypeError, AttributeError, LookupError, OverflowError, EOFError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
_STEP_NAME = re.compile(r"step-(\d+)(?:-.+)?\.(?:jsonl?|npz)")


def rollout_path(run_path: Path, step: int, kind: Kind = "train", split: str = "") -> Path:
    """Path of the lines of a step. `split` distinguishes evaluations of one step (`evals/step-000012-test.jsonl`)."""
    return run_path / _FOLDERS[kind] / f"step-{step:06d}{'-' + split if split else ''}.jsonl"


def write_rollouts(
    run_path: Path, step: int, groups: Sequence[Group], kind: Kind = "train", *, split: str = ""
) -> Path:
    """Write the groups of a step."""
    path = rollout_path(run_path, step, kind, split)
    make_folder(path.parent)
    if kind != "eval":
        with atomic_write(path.with_suffix(".npz")) as file:
            np.savez(file, **_arrays(groups))  # type: ignore[arg-type]  # its allow_pickle is a bool
    with atomic_write(path) as file:
        for index, group in enumerate(groups):
            lines = (_line(index, group.baseline, rollout, kind) for rollout in group.rollouts)
            file.writelines(json_line(line).encode() for line in lines)
    return path


def read_rollouts(run_path: Path, step: int, kind: Kind = "train") -> list[Group]:
    """The groups of a training step as they were written, without empty groups."""
    try:
        return _groups(read_lines(run_path, step, kind), read_arrays(run_path, step, kind))
    except UserError:
        raise
    except DAMAGE as error:
        path = rollout_path(run_path, step, kind)
        raise UserError(f"{path} and its .npz file are damaged ({describe_error(error)}): delete both") from error


def _groups(lines: Sequence[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Group]:
    offsets = arrays["offsets"].tolist()
    names = ("token_ids", "engine_logprobs", "sampling_logprobs", "token_advantages", *COMPUTED)
    flat = {name: arrays[name].tolist() for name in names if name in arrays}
    if len(offsets) != len(lines) + 1 or any(len(values) != offsets[-1] for values in flat.values()):
        raise ValueError("they do not match")
    groups: dict[int, Group] = {}
    for line, (start, end) in zip(lines, pairwise(offsets), strict=True):
        prompt = Prompt(line["prompt_id"], tuple(line["messages"]), line["answer"], line["solution"], line["fields"])
        group = groups.setdefault(line["group"], Group(prompt, [], from_json(line.get("baseline"))))
        prompt = group.prompt if prompt == group.prompt else prompt
        rollout = _read_rollout(line, prompt, flat, start)
        if start + sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in rollout.turns) != end:
            raise ValueError("an answer has another length than its tokens")
        group.rollouts.append(rollout)
    return list(groups.values())


def read_lines(run_path: Path, step: int, kind: Kind = "train", split: str = "") -> list[dict[str, Any]]:
    """The JSON lines of a step or evaluation, as dictionaries."""
    path = rollout_path(run_path, step, kind, split)
    try:
        with path.open("rb") as file:
            lines = list(json_lines(file))
    except FileNotFoundError as error:
        raise UserError(f"no rollouts at {path}: there are steps {rollout_steps(run_path, kind)}") from error
    values = [line.value for line in lines if line.value is not None]
    if len(values) < len(lines):
        number = next(line.number for line in lines if line.value is None)
        raise UserError(f"{path} is damaged (line {number} is not a JSON object): delete it")
    _check_schema(path, max((value.get("schema", 1) for value in values), default=1))
    return values


def read_arrays(run_path: Path, step: int, kind: Kind = "train") -> dict[str, np.ndarray]:
    """The arrays of a step by name: see docs/reference/run-folder.md."""
    path = rollout_path(run_path, step, kind).with_suffix(".npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: the tokens of step {step} were not kept") from error
    _check_schema(path, int(arrays.pop("schema", 1)))
    return arrays


def _check_schema(path: Path, version: int) -> None:
    if version > SCHEMA:
        raise UserError(newer_schema(path, version))


def newer_schema(file: object, version: int) -> str:
    return f"{file} has schema version {version}, newer than {SCHEMA}: read it with a newer assay"


def rollout_steps(run_path: Path, kind: Kind = "train") -> list[int]:
    """Steps with complete files."""
    return sorted({step for step, path in _step_files(run_path, kind) if path.suffix == ".jsonl"})


def prune(run_path: Path, keep: int) -> None:
    """Delete all but the last `keep` steps of training rollouts. Evaluations are kept."""
    kept = rollout_steps(run_path)[-keep:] if keep else []
    oldest = min(kept, default=math.inf)
    # By number, since a crash may have deleted the lines of a step and not its arrays.
    _delete(path for step, path in _step_files(run_path, "train") if step < oldest)


def truncate_after(run_path: Path, step: int) -> None:
    """Delete rollouts and evaluations later than `step`, and temporary files."""
    for kind in _FOLDERS:
        remove_temporaries(run_path / _FOLDERS[kind])
        _delete(path for later, path in _step_files(run_path, kind) if later > step)


def _step_files(run_path: Path, kind: str) -> list[tuple[int, Path]]:
    matches = [(_STEP_NAME.fullmatch(path.name), path) for path in (run_path / _FOLDERS[kind]).glob("step-*")]
    return [(int(match[1]), path) for match, path in matches if match]


def _delete(paths: Iterator[Path]) -> None:
    """Delete lines before arrays, so that a partly deleted step does not count as complete."""
    for path in sorted(paths, key=lambda path: path.suffix):
        path.unlink(missing_ok=True)


def _line(index: int, baseline: float | None, rollout: Rollout, kind: Kind) -> dict[str, Any]:
    prompt, verdict = rollout.prompt, rollout.verdict
    last = rollout.turns[-1].completion if rollout.turns else None
    line: dict[str, Any] = {
        "schema": SCHEMA,
        "group": index,
        "sample": rollout.sample,
        "prompt_id": prompt.id,
        "messages": [dict(message) for message in prompt.messages],
        "text": rollout.text,
        "answer": prompt.answer,
        "verdict": verdict and {name: getattr(verdict, name) for name in _VERDICT},
        "reward": rollout.reward,
        "length": rollout.length,
        "finish": last and last.finish.value,
        "truncated": last is not None and rollout.truncated,
        "version": last and last.version,
    }
    if TASK_LABEL in prompt.fields:
        line["task"] = prompt.fields[TASK_LABEL]
    if kind != "eval":
        line |= {
            "advantage": rollout.advantage,
            "masked": rollout.masked,
            "by_token": rollout.token_advantages is not None,
            "cut_off": rollout.cut_off,
            "solution": prompt.solution,
            "fields": prompt.fields,
            "turns": [_turn_line(turn) for turn in rollout.turns],
        }
        optional = {"baseline": baseline, "bootstrap_ids": rollout.bootstrap_ids}
        line |= {name: value for name, value in optional.items() if value is not None}
    return line


def _turn_line(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    line: dict[str, Any] = {
        "text": turn.text,
        "context_tokens": len(turn.context_ids),
        "tokens": len(completion.token_ids),
        "finish": completion.finish.value,
        "version": completion.version,
        "reward": turn.reward,
        "masked": turn.masked,
    }
    reported = {"kept_mass": completion.kept_mass, "entropy": completion.entropy}
    line |= {name: value for name, value in reported.items() if value is not None}
    if turn.inserted:
        line["inserted"] = turn.inserted
    if completion.version_spans:
        line["version_spans"] = completion.version_spans
    return line


def _arrays(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    lengths = [sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in r.turns) for r in rollouts]
    parts = [part for turn in turns for part in (turn.context_ids, turn.completion.token_ids)]
    sizes = np.fromiter(map(len, parts), np.int64)
    written = np.tile(np.array([0, 1], dtype=np.uint8), len(turns)).repeat(sizes)
    mask = np.array([mark for turn in turns for mark in (0, not turn.masked)], dtype=np.uint8).repeat(sizes)
    arrays: dict[str, np.ndarray] = {
        "schema": np.array(SCHEMA),
        "token_ids": np.fromiter(chain.from_iterable(parts), np.int32, len(mask)),
        "loss_mask": mask,
        "engine_logprobs": _aligned(_floats(turn.completion.engine_logprobs for turn in turns), written),
        "sampling_logprobs": _aligned(_floats(turn.completion.sampling_logprobs for turn in turns), written),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "advantages": _floats([[rollout.advantage for rollout in rollouts]]),
    }
    if any(rollout.token_advantages is not None for rollout in rollouts):
        values = [r.token_advantages or [r.advantage] * r.trained for r in rollouts]
        arrays["token_advantages"] = _aligned(_floats(values), mask)
    for name in COMPUTED:
        values = [getattr(rollout, name) for rollout in rollouts]
        if any(row is not None for row in values):
            arrays[name] = _aligned(_computed(values, rollouts), mask, math.nan)
    return arrays


def _computed(values: Sequence[Any], rollouts: Sequence[Rollout]) -> np.ndarray:
    """Values of the trained tokens; NaN for rollouts without them."""
    nan = np.array(np.nan, np.float32)
    parts = [nan.repeat(r.trained) if row is None else np.asarray(row) for row, r in zip(values, rollouts, strict=True)]
    return _shortened(np.concatenate(parts))


def _aligned(values: np.ndarray, mask: np.ndarray, other: float = 0.0) -> np.ndarray:
    """Values of the tokens in the mask, aligned with all token ids; `other` for the others."""
    aligned = np.full(len(mask), other, values.dtype)
    aligned[mask == 1] = values
    return aligned


def _floats(values: Iterable[Iterable[float]]) -> np.ndarray:
    """All values, in one array."""
    return _shortened(np.fromiter(chain.from_iterable(values), np.float64))


def _shortened(exact: np.ndarray) -> np.ndarray:
    """As float32 if that loses nothing, as with values of an engine in float32; else as it is."""
    if exact.dtype == np.float32:
        return exact
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    return short if np.array_equal(short, exact, equal_nan=True) else exact


def _read_rollout(line: dict[str, Any], prompt: Prompt, flat: dict[str, list[Any]], start: int) -> Rollout:
    turns: list[Turn] = []
    trained: dict[str, list[float]] = {name: [] for name in ("token_advantages", *COMPUTED) if name in flat}
    for turn in line["turns"]:
        written = start + turn["context_tokens"]
        end = written + turn["tokens"]
        completion = Completion(
            token_ids=flat["token_ids"][written:end],
            engine_logprobs=flat["engine_logprobs"][written:end],
            sampling_logprobs=flat["sampling_logprobs"][written:end],
            finish=Finish(turn["finish"]),
            version=turn["version"],
            kept_mass=from_json(turn.get("kept_mass")),
            entropy=from_json(turn.get("entropy")),
            version_spans=tuple((version, tokens) for version, tokens in turn.get("version_spans", ())),
        )
        reward, masked = _number(turn.get("reward", 0.0)), turn.get("masked", False)
        inserted = turn.get("inserted", "")
        turns.append(Turn(flat["token_ids"][start:written], completion, turn["text"], reward, masked, inserted))
        for name, values in trained.items():
            values += [] if masked else flat[name][written:end]
        start = end
    return Rollout(
        prompt=prompt,
        sample=line["sample"],
        turns=turns,
        verdict=line["verdict"] and _read_verdict(line["verdict"]),
        reward=_number(line["reward"]),
        advantage=_number(line["advantage"]),
        token_advantages=trained["token_advantages"] if line.get("by_token") else None,
        masked=line["masked"],
        cut_off=line.get("cut_off", False),
        bootstrap_ids=line.get("bootstrap_ids"),
        **{name: _unless_missing(trained.get(name)) for name in COMPUTED},  # type: ignore[arg-type]
    )


def _number(saved: Any) -> float:
    value = from_json(saved)
    if type(value) not in (int, float):
        raise TypeError(f"{str(saved)[:80]!r} is not a number")
    return float(value)


def _unless_missing(values: list[float] | None) -> list[float] | None:
    """None for a rollout whose values were not computed."""
    return values if values and not math.isnan(values[0]) else None


def _read_verdict(saved: dict[str, Any]) -> Verdict:
    parts = {name: _number(value) for name, value in saved["parts"].items()}
    return Verdict(_number(saved["reward"]), Status(saved["status"]), saved["parsed"], parts, saved["detail"])
