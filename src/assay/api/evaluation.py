"""Measure models and judge texts: `assay.evaluate` and `assay.score`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from assay.api.arguments import SHORT_FOR_EVAL, overrides_of, python_errors, reward_settings, settings_of, task_settings
from assay.api.models import Generation, LoadedModel, source_of
from assay.api.notebook import html_table, new_console
from assay.build.measure import (
    Measured,
    ScoreConfig,
    answer_rows,
    as_item,
    inherited_settings,
    measure_models,
    measure_settings,
    result_table,
)
from assay.config import MeasureConfig, TrainConfig
from assay.config.settings import PYTHON
from assay.rewards import check_verdicts
from assay.rewards.functions import register_function
from assay.runs.console import aligned, percent
from assay.tasks import make_task
from assay.tasks.registry import TASK_JUDGE, build_judge_pool, reward_functions
from assay.tasks.sources import DataRow, read_rows
from assay.types import Status, UserError, Verdict, plural

if TYPE_CHECKING:
    from assay.evals import Report
    from assay.types import Group

SHORT = {**SHORT_FOR_EVAL, "examples": "eval.final_examples"}
SHORT_FOR_SCORE = {
    name: f"reward.{name}" for name in ("extract", "strict", "correct", "wrong", "unparsable", "timeout_s", "workers")
}
SCORED = ("task.", "reward.", "judge.")  # settings of a config that `score` uses
NO_REWARD = {"reward.function": "", "reward.functions": [], "reward.weights": []}  # replaces the rewards of the config


class Evaluation:
    """One model's answers to problems, and how many of them are correct."""

    def __init__(self, measured: Measured) -> None:
        self.model = measured.model
        self.report: Report = measured.report
        self.groups: Sequence[Group] = measured.groups
        """the answers to each problem, with tokens and verdicts"""
        self._entry = measured.entry

    @property
    def accuracy(self) -> float:
        """Share of correct answers."""
        return self.report.accuracy

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % confidence interval of the accuracy."""
        low, high = self._entry["ci95"]
        return low, high

    @property
    def pass_at_k(self) -> dict[int, float]:
        """For each k up to the number of samples: the probability that one of k answers is correct."""
        return {int(k): value for k, value in self._entry.get("pass_at_k", {"1": self.accuracy}).items()}

    @property
    def paired(self) -> dict[str, Any] | None:
        """The comparison with the first model: p_value, gained, lost; None for the first model."""
        return self._entry.get("paired")

    @property
    def summary(self) -> dict[str, Any]:
        """All results and the settings that lead to them, as in the JSON file of `assay eval`."""
        return dict(self._entry)

    @cached_property
    def answers(self) -> list[dict[str, Any]]:
        """One row per answer: model, id, question, answer, completion, length, status, parsed, reward."""
        rewards = [rollout.reward for group in self.groups for rollout in group.rollouts]
        rows = answer_rows(self.model, self.groups)
        return [row | {"reward": reward} for row, reward in zip(rows, rewards, strict=True)]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The rows of `answers` that are not correct."""
        return [row for row in self.answers if row["status"] != Status.OK]

    def to_dict(self) -> dict[str, Any]:
        """`summary` and `answers`, as JSON values."""
        return {**self._entry, "answers": self.answers}

    def __repr__(self) -> str:
        low, high = (percent(bound).removesuffix(" %") for bound in self.ci95)
        return f"accuracy {percent(self.accuracy)} ({low} to {high}), {plural(self._entry['n'], 'problem')}"

    def _repr_html_(self) -> str:
        title, columns, rows = result_table([self._entry])
        return html_table(columns, rows, title)


class Evaluations(list[Evaluation]):
    """Several models on the same problems; each is compared with the first one (`Evaluation.paired`)."""

    def to_dict(self) -> list[dict[str, Any]]:
        return [evaluation.to_dict() for evaluation in self]

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        return result_table([evaluation.summary for evaluation in self])

    def __repr__(self) -> str:
        title, columns, rows = self._table()
        return "\n".join([title, *aligned([columns, *rows])])

    def _repr_html_(self) -> str:
        title, columns, rows = self._table()
        return html_table(columns, rows, title)


@overload
def evaluate(model: list[Any] | tuple[Any, ...], **arguments: Any) -> Evaluations: ...
@overload
def evaluate(
    model: Any,
    *,
    data: Any = None,
    reward: Any = None,
    env: Any = None,
    config: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    tokenizer: Any = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    trust: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Evaluation: ...
@python_errors()
def evaluate(
    model: Any,
    *,
    data: Any = None,
    reward: Any = None,
    env: Any = None,
    config: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    tokenizer: Any = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    trust: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Any:
    """Sample and judge answers of one or several models to the same problems, without training.

    Args:
        model: A folder, a hub id, a GGUF file, a checkpoint ("run:NAME@best"), a transformers model, or a
            `LoadedModel`. A list of these compares each with the first one.
        data: Problems: a file or folder, rows (dicts), a dataset, or a `Task`. Default: those of the run or `config`.
        reward: A reward function, a judge, a path to one, or a list of them, instead of the task's judge.
        env: The environment in which problems are answered: its name, or a class.
        config: A TOML file of a training run, whose task, environment, prompt and reward settings are used.
        columns: Which columns of the data are used, e.g. `{"question": "problem", "answer": "final"}`.
        split: Split of the data: train, validation, test or all. Default: all rows of one file or list, else test.
        tokenizer: The tokenizer of a transformers model.
        samples: Answers per problem. Default: 1.
        temperature: 0 takes the most likely token. Default: 0.
        max_new_tokens: Maximum length of an answer. Default: as in the run of a checkpoint, or 512.
        seed: The same seed gives the same answers.
        trust: Use code, files and hosts that the settings of a run name, even if it was started by someone else.
        quiet: Show no progress.
        settings: More settings, such as `task="gsm8k"`, `examples=200` (the first problems only), `device="cpu"`.

    Returns:
        An `Evaluation`; for a list of models `Evaluations`.
    """
    known = ("data", "reward", "env", "config", "columns", "split", "tokenizer", "trust", "quiet")
    given: dict[str, Any] = {"samples": samples, "temperature": temperature}
    given |= {"max_new_tokens": max_new_tokens, "seed": seed}
    given |= {"env": env} if isinstance(env, str | Mapping) else {"env.name": env}
    overrides = overrides_of({**settings, **given, "eval.final_split": split}, MeasureConfig, SHORT, known)
    several = isinstance(model, list | tuple)
    models = model if several else [model]
    if not models:
        raise UserError("model is an empty list: give at least one model")
    loaded = {entry.name: entry for entry in models if isinstance(entry, LoadedModel)}
    names = [source_of(entry, tokenizer, overrides) for entry in models]
    if loaded and len(set(names)) < len(names):  # results are by name
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{twice} is given twice, at least once as a loaded model: evaluate them one after the other")
    path = ""
    if data is not None or columns is not None:
        path, problems = _problems(data, columns, overrides.get("runs_dir", TrainConfig().runs_dir))
        overrides |= problems
    if reward is not None:
        overrides |= {**NO_REWARD, **reward_settings(reward)}
    if loaded and (unused := [key for key in overrides if key.startswith(("prompt", "model", "engine", "device"))]):
        raise UserError(f"'{unused[0]}' has no effect on a model that is loaded: pass it to assay.load")
    cfg = measure_settings(names, overrides, data=path, config=config, trust=trust, caller=PYTHON)
    parts = {name: entry._opened() for name, entry in loaded.items()}
    with new_console(quiet) as console:
        measured = measure_models(names, cfg, console, data=path, loaded=parts, caller=PYTHON)
        results = [Evaluation(entry) for entry in measured]
    return Evaluations(results) if several else results[0]


def _problems(data: Any, columns: Mapping[str, str] | None, runs_dir: str) -> tuple[str, dict[str, Any]]:
    """The path of the problems, if they are in files, and further settings."""
    settings = task_settings(data, None, columns, runs_dir)
    section = settings.get("task", {})
    path = section.get("path", "")
    if not path:
        return "", settings
    if not Path(path).exists():
        raise UserError(f"data: there is no file or folder {path}")
    # The task of the run, if it reads such files; nothing is held out.
    return path, {f"task.args.{name}": value for name, value in section["args"].items() if name != "val_size"}


@python_errors()
def score(
    completions: Any,
    answers: Any = None,
    *,
    task: Any = None,
    reward: Any = None,
    data: Any = None,
    fields: Any = None,
    config: str | Path | None = None,
    **settings: Any,
) -> list[Verdict]:
    """Judge texts, in processes of their own with a time limit per text.

    Args:
        completions: A text or a `Generation`, a list of these, rows (dicts with `completion` and `answer`), or the
            `Path` of a file with such rows.
        answers: The correct answer of each completion; a single one applies to all.
        task: The task that judges: its name, or a `Task`.
        reward: A reward function, a judge, a path to one, or a list of them, instead of the task's judge.
        data: The problem of each completion: rows with the answer and further columns, instead of `answers`.
        fields: Further values that the judge gets for each completion (dicts); a single dict applies to all.
        config: A TOML file of a training run, whose task and reward settings are used.
        settings: More settings of the section `reward`, such as `strict=False` (accept other answer formats),
            `extract="boxed"`, `timeout_s=1.0`, `workers=0`.
    """
    known = ("answers", "task", "reward", "data", "fields", "config")
    named = task if task is None or isinstance(task, str | Mapping) else {"name": register_function(task)}
    overrides = overrides_of({**settings, "task": named}, ScoreConfig, SHORT_FOR_SCORE, known)
    if reward is not None:
        overrides |= {**NO_REWARD, **reward_settings(reward)}
    inherited = inherited_settings((), overrides, False, lambda key: key.startswith(SCORED), config, PYTHON)
    cfg = settings_of(ScoreConfig, None, {**inherited, **overrides})
    functions, _ = reward_functions(cfg.reward)
    if TASK_JUDGE in functions and not cfg.task.name:
        raise UserError("no judge: pass task (gsm8k, math, countdown, abacus, code, or a Task) or reward (a function)")
    judged_by = make_task(cfg.task.name, cfg.task.path or None, **cfg.task.args) if cfg.task.name else None
    rows = _rows_to_judge(completions, answers, data, fields)
    items = [as_item(row, judged_by, optional_gold=TASK_JUDGE not in functions) for row in rows]
    with build_judge_pool(cfg.reward, judged_by, cfg.judge) as judging:
        verdicts = judging.judge(items)
    check_verdicts(verdicts)
    return verdicts


def _rows_to_judge(completions: Any, answers: Any, data: Any, fields: Any) -> list[DataRow]:
    if isinstance(completions, Path):
        return read_rows(completions)
    single = isinstance(completions, str | Generation | Mapping)
    given = [completions] if single else _entries("completions", completions)
    rows = [entry if isinstance(entry, Mapping) else {"completion": _text(entry)} for entry in given]
    if isinstance(data, str | Path):
        data = [row.values for row in read_rows(data)]
    if answers is not None:
        one = isinstance(answers, str) or not isinstance(answers, Iterable)
        answers = {"answer": answers} if one else [{"answer": answer} for answer in answers]
    for name, values in (("data", data), ("fields", fields), ("answers", answers)):
        if values is None:
            continue
        columns = [values] * len(rows) if isinstance(values, Mapping) else _entries(name, values)
        if len(columns) != len(rows):
            raise UserError(
                f"{name} has {len(columns)} entries for {plural(len(rows), 'completion')}: give one for each"
            )
        if not all(isinstance(column, Mapping) for column in columns):
            raise UserError(f"{name} must be dicts, one for each completion")
        rows = [{**row, **column} for row, column in zip(rows, columns, strict=True)]
    return [DataRow(row, f"completion {index + 1}", str(index)) for index, row in enumerate(rows)]


def _entries(name: str, values: Any) -> list[Any]:
    if not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list, not {values!r:.80}")
    return list(values)


def _text(completion: Any) -> Any:
    return completion.text if isinstance(completion, Generation) else completion
