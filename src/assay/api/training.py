"""`assay.train` and `assay.sft`: a run from arguments, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.api.errors import python_errors
from assay.api.notebook import in_notebook
from assay.api.saved import SavedRun
from assay.api.session import console_warnings, open_training, resume_call, show_findings

if TYPE_CHECKING:  # torch is imported when a run is built
    from assay.training.callbacks import Hook


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
    from assay.build.execute import carried_out, check_updates
    from assay.models.device import release_memory
    from assay.training.loop import train as run_loop

    path, stopping = training.path, training.stopping
    try:
        with held, console_warnings(console), carried_out(training, console, resume_call):
            summary = run_loop(training)
        training.mesh.close()
        if summary:
            check_updates(training)
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
