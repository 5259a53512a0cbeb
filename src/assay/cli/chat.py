"""Talk to one or several models. /help in the chat lists its commands, e.g. /task, which grades the answers.

Several models answer the same questions side by side, each with its own history. A checkpoint of a run uses the
task, environment, prompt and length settings of the run; with --config, all models use the settings of a training
config. What the environment inserts, such as a calculator's results, is dimmed. The same questions with the same
--seed give the same answers.
  assay chat run:demo@0 run:demo@last
  assay chat Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 3 + 4?" --temperature 0
  assay chat run:demo@best --samples 8 --prompt "/task abacus 17"
Questions can also be piped in, one per line. As with --prompt, the exit code is then 2 if one was not answered.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pydantic import Field

from assay.build.measure import inherited_settings
from assay.cli.eval import add_config, add_trust
from assay.config import Count, EvalConfig, MeasureConfig, NonNegative
from assay.config.settings import load_settings
from assay.runs.console import Console
from assay.runs.resolve import PREFIX
from assay.types import UserError

if TYPE_CHECKING:
    from assay.cli.chat_screen import ChatModel
    from assay.cli.chat_session import TaskQuestions


class ChatSampling(EvalConfig):
    """How answers are sampled."""

    temperature: NonNegative = 0.7
    """0 always takes the most likely token, 1 samples from the unchanged distribution"""
    max_new_tokens: Count = 0
    """maximum tokens per answer; 0: as in the run of a checkpoint, or 512"""


class ChatConfig(MeasureConfig):
    """A conversation with trained models."""

    eval: ChatSampling = Field(default_factory=ChatSampling)


SETTINGS = ChatConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, hub id, GGUF file or run:NAME@STEP")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this and exit; may be repeated")
    parser.add_argument(
        "--temperature", dest="eval.temperature", metavar="T", help="short for --eval.temperature [0.7]"
    )
    parser.add_argument("--samples", dest="eval.samples", metavar="N", help="short for --eval.samples [1]")
    parser.add_argument("--max", dest="eval.max_new_tokens", metavar="N", help="short for --eval.max_new_tokens")
    add_config(parser)
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    cfg = settings_of(args.models, args.overrides, args.trust, args.config)
    for stream in (sys.stdin, sys.stdout):  # invalid bytes in a pipe must not end the conversation
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with Console(sys.stderr) as console:  # answers on stdout may be piped to another program
        console.announce(f"loading {args.models[0]}")  # the imports below take seconds
        from assay.cli.chat_screen import Screen
        from assay.cli.chat_session import ChatSession, TaskQuestions, answer_all, converse
        from assay.rollout import sampling_params

        questions = TaskQuestions(cfg, load_settings(ChatConfig, None, args.overrides))
        if {"task", "task.name"} & set(args.overrides):
            questions.task(cfg.task.name)  # report a mistake in it now, not at the first question
        try:
            models = [load_chat_model(model, args, questions, console) for model in args.models]
            console.stop()
            session = ChatSession(models, questions, sampling_params(cfg.eval, cfg.eval.samples), cfg.seed, Screen())
            if args.prompt:
                return answer_all(session, [text.encode("utf-8", "replace").decode("utf-8") for text in args.prompt])
            return converse(session) if sys.stdin.isatty() else answer_all(session, sys.stdin)
        finally:
            questions.close()


def settings_of(
    models: list[str], overrides: dict[str, Any], trust: bool = False, config: str | None = None
) -> ChatConfig:
    """The settings of a config file or of the first model that is a run's checkpoint (of [eval] only length and stops),
    then overrides.
    """
    dropped = {"task", "reward"} if {"task", "task.name"} & set(overrides) else set()
    if {"env", "env.name"} & set(overrides):
        dropped.add("env")

    def is_used(key: str) -> bool:
        return key.partition(".")[0] not in {"eval", *dropped} or key in ("eval.max_new_tokens", "eval.stop")

    inherited = inherited_settings(models, overrides, trust, is_used, config)
    return load_settings(ChatConfig, None, {**inherited, **overrides})


def load_chat_model(model: str, args: argparse.Namespace, questions: TaskQuestions, console: Console) -> ChatModel:
    """Without a config file, a checkpoint uses the settings of its own run; other models use the settings of the first
    checkpoint, to be comparable.
    """
    from assay.build.models import build_server, episode_limits
    from assay.cli.chat_screen import ChatModel, Played
    from assay.cli.chat_session import answers_any_question

    cfg = settings_of([model] if model.startswith(PREFIX) else args.models, args.overrides, args.trust, args.config)
    needs_task = cfg.env.name or (cfg.prompt.few_shot and not cfg.prompt.few_shot_file and cfg.task.name)
    try:
        problems = questions.problems(cfg.task, cfg.env) if needs_task else None
        renderer, engine = build_server(model, cfg, problems, console)
    except UserError as error:
        raise UserError(str(error) if model in str(error) else f"{model}: {error}") from error
    chat_model = ChatModel(model, renderer, engine)
    if answers_any_question(problems):
        chat_model.played = Played(problems, episode_limits(cfg.env))
    return chat_model
