"""`assay.train` and `assay.sft`: a run from arguments, in one call; and a run on the disk, which they return."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from assay.api.arguments import python_errors
from assay.api.notebook import Picture, html_paragraph, html_table, in_notebook, new_console
from assay.api.session import console_warnings, open_training, resume_call, show_findings
from assay.runs import Run, checkpoints
from assay.runs.console import FINAL_LABELS, Console, percent
from assay.runs.directory import RunFiles
from assay.runs.resolve import PREFIX, find_run, resolve_model
from assay.runs.rollouts import read_rollouts, rollout_steps
from assay.types import Group, Rollout, UserError, plural

if TYPE_CHECKING:  # torch is imported when a run is built
    from assay.api.evaluation import Evaluation
    from assay.api.inspection import Findings
    from assay.api.models import Generation, LoadedModel, Question
    from assay.runs.trackers import Hook


def train(
    config: str | Path | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    columns: Mapping[str, str] | None = None,
    reward: Any = None,
    env: Any = None,
    recipe: str | None = None,
    steps: int | None = None,
    prompts: int | None = None,
    samples: int | None = None,
    lr: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    peft_config: Any = None,
    callbacks: Iterable[Hook] = (),
    resume: str | Path | None = None,
    trust: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> SavedRun:
    """Train a model by reinforcement learning with verifiable rewards, and evaluate it before and after.

    Args:
        config: TOML file whose settings the arguments change.
        model: folder, hub id, GGUF file, "run:NAME@last", "preset:NAME", or a transformers model.
        tokenizer: of a transformers model.
        data: rows as dicts with `question` and `answer` (a list, another iterable, a `datasets.Dataset`, a data frame,
            or a dict of these by split), a path, or a `Task`.
        eval_data: rows to test on, or the share of `data` that is held out for the test (default: a tenth, at most
            500 rows; validation gets as many).
        columns: names of the columns of `data`, e.g. {"question": "problem", "answer": "target"}.
        reward: function, judge, path "file.py:function", or a list of these, also as pairs (reward, weight). Functions
            may be async, and have the signature f(completion, answer, **fields), TRL's or verl's. They run in worker
            processes, as copies: what they change is not seen here.
        env: name of an environment, or an `Env` class or instance.
        recipe: algorithm, e.g. "grpo", "dr_grpo", "dapo", "rloo", "ppo".
        steps: training steps.
        prompts: prompts per step.
        samples: answers per prompt.
        lr: learning rate.
        max_new_tokens: longest answer in tokens.
        seed: of data order and sampling.
        name: of the run.
        peft_config: PEFT's `LoraConfig` (without `target_modules`: all linear layers), or a dict with the settings of
            the section `lora`.
        callbacks: `assay.Callback` objects, or functions f(run, step, metrics) called after each step.
        resume: name of a run to continue from its last checkpoint. Objects such as reward functions are given again.
        trust: with `resume`, use code and files that the settings of another person's run name.
        quiet: print warnings only.
        settings: any other setting, as a dict of its section or with a dotted name: optim={"warmup": 5}.

    Returns:
        The run on the disk, which shows its results, curves and rollouts.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("config", "settings")}
    return _run(config, **arguments, **settings)


def sft(
    config: str | Path | None = None, *, steps: int | None = None, lr: float | None = None, **arguments: Any
) -> SavedRun:
    """Supervised fine-tuning on the worked solutions of the data (column `solution`), evaluated before and after.

    `steps`, `lr`: of the fine-tuning. Other arguments: as in `assay.train`.
    """
    return _run(config, sft_only=True, **{"sft.steps": steps, "sft.lr": lr}, **arguments)


@python_errors()
def _run(config: str | Path | None, **arguments: Any) -> SavedRun:
    training, console, held = open_training(config, **arguments)
    from assay.build.run import carried_out
    from assay.models.device import release_memory
    from assay.training.loop import train as run_loop

    path, stopping = training.path, training.stopping
    try:
        with held, console_warnings(console), carried_out(training, console, resume_call):
            run_loop(training)
    except KeyboardInterrupt:
        # The program continues in a notebook, or if a callback requested the stop.
        if not (in_notebook() or stopping.by_program):
            raise
    finally:
        del training, held
        release_memory()
    run = SavedRun(path)
    run.report(console)
    show_findings(run.summary, console)
    return run


# A run on the disk: its results, curves, rollouts and checkpoints

SHOWN_ROLLOUTS = 8  # in HTML


def load_run(name: str | Path, runs_dir: str | Path = "runs") -> SavedRun:
    """A run by its name in `runs_dir`, or by its path."""
    return SavedRun(find_run(str(name), Path(runs_dir)))


class SavedRun:
    """What `assay.train` returns. Files are read when they are asked for, so a run in progress can be watched."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the program may change its folder
        self._files = RunFiles(self.path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def state(self) -> str:
        """running, finished, stopped (on request), failed or interrupted (killed)."""
        return Run(self.path).state

    @property
    def summary(self) -> dict[str, Any]:
        """Results of the finished run: accuracy before and after with intervals, the paired test, times, findings."""
        return self._files.document("summary.json")

    @property
    def config(self) -> dict[str, Any]:
        """All settings of the run."""
        return self._files.config()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of every step and evaluation; `pandas.DataFrame(run.metrics)` makes a table of them."""
        return self._files.readable_metrics()

    @property
    def steps(self) -> list[int]:
        """Training steps whose rollouts are kept."""
        return rollout_steps(self.path, "train")

    @property
    def checkpoints(self) -> list[int]:
        """Steps whose weights are kept."""
        return checkpoints.all_steps(self.path)

    def rollouts(self, step: int | None = None) -> Rollouts:
        """The groups of rollouts of a training step; by default of the last one."""
        steps = self.steps
        if not steps:
            raise UserError(f"run {self.name} has no rollouts yet")
        return Rollouts(read_rollouts(self.path, steps[-1] if step is None else step), self)

    def plot(self) -> Picture:
        """Draw the curves of the run, in curves.png; a notebook shows them."""
        from assay.runs.metrics import draw_curves

        path = draw_curves(self.path)
        if path is None:
            raise UserError(f"run {self.name} has nothing to plot yet")
        return Picture(path)

    def model(self, at: str | int = "last") -> str:
        """The name of a checkpoint: of a step, "last" or "best"."""
        return f"{PREFIX}{self.path}@{at}"

    def load(self, at: str | int = "last", **settings: Any) -> LoadedModel:
        """The model of a checkpoint, to generate with."""
        from assay.api.models import load

        return load(self.model(at), **settings)

    @overload
    def generate(
        self, prompts: Question, at: str | int = "last", *, samples: Literal[1] = 1, **options: Any
    ) -> Generation: ...
    @overload
    def generate(
        self, prompts: Question, at: str | int = "last", *, samples: int, **options: Any
    ) -> list[Generation]: ...
    @overload
    def generate(
        self, prompts: Iterable[Question], at: str | int = "last", *, samples: Literal[1] = 1, **options: Any
    ) -> list[Generation]: ...
    @overload
    def generate(
        self, prompts: Iterable[Question], at: str | int = "last", *, samples: int, **options: Any
    ) -> list[list[Generation]]: ...
    def generate(self, prompts: Any, at: str | int = "last", **options: Any) -> Any:
        """Answers of a checkpoint; options as of `assay.generate`. Loads the model: for many calls, use `load`."""
        from assay.api.models import generate

        return generate(self.model(at), prompts, **options)

    def evaluate(self, at: str | int = "last", **options: Any) -> Evaluation:
        """Evaluate a checkpoint; options as of `assay.evaluate`."""
        from assay.api.evaluation import evaluate

        return evaluate(self.model(at), **options)

    def save_pretrained(
        self,
        dest: str | Path,
        at: str | int = "last",
        *,
        dtype: Literal["float32", "bfloat16"] | None = None,
        gguf: Literal["f16", "q8_0"] | None = None,
        lora: Literal["merge", "keep"] = "merge",
        push: str | None = None,
        private: bool = False,
    ) -> dict[str, Any]:
        """Write the model of a checkpoint as a Hugging Face folder with a model card; returns facts about it.

        Args:
            dest: New folder, or new file NAME.gguf.
            at: Step of the checkpoint, "last" or "best".
            dtype: Of the weights in a folder. Default: float32.
            gguf: Write GGUF with these weights instead.
            lora: Merge the adapters of a run with LoRA into the weights, or keep them as a PEFT folder.
            push: OWNER/NAME on the Hugging Face hub to upload the folder to.
            private: A new repository on the hub is private.
        """
        from assay.build.export import Export, export

        source = self.model(at)
        with new_console(quiet=True) as console, python_errors():
            return export(Export(source, Path(dest), Path(), dtype, gguf, lora, push, private), console)

    def doctor(self) -> Findings:
        """What has kept the run from learning, or harmed it."""
        from assay.api.inspection import doctor

        return doctor(self.path)

    def report(self, console: Console) -> None:
        """Print the results and where they are."""
        console.note(repr(self))
        console.note(f"saved in {os.path.relpath(self.path)} (summary.json, curves.png, metrics.jsonl, ...)")

    def _accuracies(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        summary = self.summary
        measured = {
            "start": summary.get("sft", {}).get("before"),
            **{name: summary.get(name) for name in FINAL_LABELS[1:]},
        }
        yield from ((name, report) for name, report in measured.items() if report)

    def _facts(self) -> str:
        """State, length and gain in one line."""
        summary, parts = self.summary, [self.state]
        if summary:
            steps = summary["sft"]["steps"] if summary.get("algorithm") == "sft" else summary["steps"]
            parts.append(plural(steps, "step"))
        elif rows := self.metrics:
            total = self._files.document("status.json").get("total_steps", "?")
            parts.append(f"step {rows[-1]['step']} of {total}")
        accuracies = [percent(report["accuracy"]) for _, report in self._accuracies()]
        if accuracies:
            parts.append(f"accuracy {' -> '.join(accuracies)}")
        if paired := summary.get("paired"):
            parts.append(f"paired p = {paired['p_value']:.2g}")
        if error := self._files.document("status.json").get("error"):
            parts.append(str(error))
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"run {self.name}: {self._facts()}"

    def _repr_html_(self) -> str:
        rows = [
            (name, percent(report["accuracy"]), "{} to {}".format(*map(percent, report["ci95"])), report["n"])
            for name, report in self._accuracies()
        ]
        parts = [html_paragraph(f"Run {self.name}", bold=True), html_paragraph(self._facts())]
        if rows:
            parts.append(html_table(("", "accuracy", "95 % interval", "problems"), rows))
        parts += [html_paragraph(f"{c['evidence']}: {c['remedy']}") for c in self.summary.get("diagnosis", ())]
        picture = self.path / "curves.png"
        return "".join(parts) + (Picture(picture).html() if picture.is_file() else "")


class Rollouts(list[Group]):
    """The groups of a step: answers to one prompt each, with verdicts, rewards and advantages."""

    def __init__(self, groups: Sequence[Group], run: SavedRun) -> None:
        super().__init__(groups)
        self._run = run

    def __repr__(self) -> str:
        rewards = [rollout.reward for group in self for rollout in group.rollouts]
        mean = sum(rewards) / (len(rewards) or 1)
        return f"{plural(len(self), 'group')} with {plural(len(rewards), 'rollout')}, mean reward {mean:.3f}"

    def tokens(self, group: int = 0, sample: int = 0) -> Tokens:
        """One rollout token by token."""
        return Tokens(self[group].rollouts[sample], self._run)

    def _repr_html_(self) -> str:
        rows = [
            (
                group.prompt.question,
                group.prompt.answer,
                r.text,
                r.verdict and r.verdict.status,
                f"{r.reward:g}",
                f"{r.advantage:.2f}",
            )
            for group in self
            for r in group.rollouts
        ]
        head = ("question", "answer", "completion", "status", "reward", "advantage")
        more = f", of which {SHOWN_ROLLOUTS} are shown" if len(rows) > SHOWN_ROLLOUTS else ""
        return html_table(head, rows[:SHOWN_ROLLOUTS], repr(self) + more)


class Tokens(list[dict[str, Any]]):
    """The tokens of a rollout: text, id, whether it is trained, log-probabilities of engine and trainer, advantage."""

    def __init__(self, rollout: Rollout, run: SavedRun) -> None:
        self.rollout = rollout
        super().__init__(token_rows(rollout, run))

    def __repr__(self) -> str:
        return f"{plural(len(self), 'token')}, {sum(self.rollout.loss_mask)} of them trained"

    def _repr_html_(self) -> str:
        names = ("text", "id", "trained", "logprob", "trainer_logprob", "advantage")
        rows = [[_cell(row.get(name)) for name in names] for row in self]
        return html_table(names, rows, repr(self))


def token_rows(rollout: Rollout, run: SavedRun) -> Iterator[dict[str, Any]]:
    from assay.text import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(run.model(), run.path.parent))
    trained, advantages = count(), rollout.token_advantages
    of_trainer = None if rollout.trainer_logprobs is None else list(map(float, rollout.trainer_logprobs))
    for token, in_loss, logprob in zip(rollout.token_ids, rollout.loss_mask, rollout.engine_logprobs, strict=True):
        row: dict[str, Any] = {"text": tokenizer.token_text(token), "id": token, "trained": bool(in_loss)}
        if in_loss:
            place = next(trained)
            row["logprob"] = logprob
            row["trainer_logprob"] = None if of_trainer is None else of_trainer[place]
            row["advantage"] = rollout.advantage if advantages is None else advantages[place]
        yield row


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
