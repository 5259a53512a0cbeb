"""Problems of the package reasoning-gym, made again wherever they are judged, and scored by the package itself."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from assay.rewards.extract import check_extractor, extract
from assay.rewards.judge import graded, one_line
from assay.types import Status, UserError, Verdict

SEED, INDEX, SIZE = "dataset_seed", "dataset_index", "dataset_size"  # fields that say which problem it is


@lru_cache(maxsize=64)
def dataset(name: str, options: str, seed: int, size: int) -> Any:
    """The package's own object; `options` of its config as JSON."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(
            f'reasoning_gym:{name} needs the reasoning-gym extra: pip install "assay[reasoning-gym]" ({error})'
        ) from None
    if name not in DATASETS:
        close = get_close_matches(name, list(DATASETS), n=2, cutoff=0.5)
        known = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(DATASETS))}"
        raise UserError(f'reasoning-gym has no data set "{name}": {known}')
    given: dict[str, Any] = json.loads(options)
    takes = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in given:
        if key not in takes:
            raise UserError(f'reasoning_gym:{name} takes no argument "{key}"; its own are {", ".join(takes) or "none"}')
    try:
        return create_dataset(name, seed=seed, size=size, **given)
    except (AssertionError, TypeError, ValueError) as error:  # how its configs say no
        raise UserError(f"reasoning_gym:{name} does not take these arguments: {one_line(error)}") from None


@lru_cache(maxsize=1024)
def entry(name: str, options: str, seed: int, size: int, index: int) -> dict[str, Any]:
    """A problem: question, answer (None where the package has none of its own) and what its judge needs to know."""
    return dataset(name, options, seed, size)[index]


@dataclass(frozen=True)
class ReasoningGymJudge:
    """The score that the data set gives, partial ones too; only a full one is right."""

    name: str
    options: str = "{}"
    extract: str = "answer-tag"
    strict: bool = True

    def __post_init__(self) -> None:
        check_extractor(self.extract)

    def prepare(self) -> None:
        """The package takes seconds to import, which should not count as judging."""
        dataset(self.name, self.options, 0, 1)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        try:
            place = [int(fields[key]) for key in (SEED, SIZE, INDEX)]
        except (KeyError, TypeError, ValueError) as error:
            detail = f"a problem of reasoning-gym needs the fields {SEED}, {SIZE} and {INDEX}: {error!r}"
            return Verdict(0.0, Status.ERROR, detail=detail)
        found = extract(completion, self.extract, self.strict)
        form = float(found.found and found.form == self.extract)
        if not found.found:
            return graded(found.status, found.text or None, form, found.detail)
        source, problem = dataset(self.name, self.options, *place[:2]), entry(self.name, self.options, *place)
        try:
            score = float(source.score_answer(found.text, problem))
        except Exception as error:
            source.score_answer(problem["answer"], problem)  # if this fails too, it is not the answer's fault
            return graded(Status.UNPARSABLE, found.text, form, one_line(error))
        if not math.isfinite(score):
            return Verdict(0.0, Status.ERROR, found.text, detail=f"the data set gave the score {score}")
        status = Status.OK if score >= 1.0 else Status.WRONG
        return Verdict(score, status, found.text, {"accuracy": score, "format": form})
