"""Texts that are judged without a model: the settings, and what the judge gets from a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from assay.config import JudgeConfig, RewardConfig, Section, TaskConfig
from assay.rewards.pool import Item
from assay.tasks import Task
from assay.tasks.sources import DataRow, is_text_or_number
from assay.types import UserError


class ScoreConfig(Section):
    """Settings of a judge."""

    task: TaskConfig = Field(default_factory=TaskConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)


def from_rollout(row: DataRow) -> DataRow:
    """Rename the fields of a row of a run's rollouts, where the completion is called text."""
    values = row.values
    if "completion" in values or not {"text", "prompt_id"} <= set(values):
        return row
    return replace(row, values={**(values.get("fields") or {}), **values, "completion": values["text"]})


def as_item(row: DataRow, task: Task | None, optional_gold: bool = False) -> Item:
    """The judge's input: the completion, the gold answer, and all other fields."""
    completion = row.values.get("completion")
    if not isinstance(completion, str):
        problem = "is not a string" if "completion" in row.values else "is missing"
        raise UserError(f"{row.where}: the field 'completion' {problem}")
    gold = "" if optional_gold and not {"gold", "answer"} & set(row.values) else gold_answer(row, task)
    return completion, gold, {k: v for k, v in row.values.items() if k != "completion"}


def gold_answer(row: DataRow, task: Task | None) -> str:
    values: Mapping[str, Any] = row.values
    stated = values.get("gold", values.get("answer"))
    if task is not None and task.judge_kind == "countdown":
        missing = [name for name in ("nums", "target") if values.get(name) is None]
        if missing:
            raise UserError(f"{row.where}: the field '{missing[0]}' is missing; a countdown row needs nums and target")
        return str(values["target"])
    if task is not None and task.judge_kind == "code":
        if values.get("tests") is None:
            raise UserError(f"{row.where}: the field 'tests' is missing; a row of the task code needs tests")
        return ""
    if isinstance(stated, bool) or not (stated is None or is_text_or_number(stated)):
        kind = stated if isinstance(stated, float) else type(stated).__name__
        raise UserError(f"{row.where}: the gold answer must be a string or a number, not {kind}")
    if stated is None and (task is None or task.name != "math" or "solution" not in values):
        raise UserError(f"{row.where}: the row has neither 'gold' nor 'answer'")
    if task is None or (task.name == "gsm8k" and "####" not in str(stated)):
        return str(stated)  # already the bare answer
    try:
        return task.gold({**values, "answer": stated})
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
