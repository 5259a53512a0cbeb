"""`assay chat`: talk to one or several models, in a terminal or from a script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from assay.cli.inherit import add_trust, inherited_settings
from assay.config import Count, EvalConfig, MeasureConfig, NonNegative
from assay.runs.resolve import PREFIX
from assay.settings import load_settings, parse_overrides
from assay.types import UserError

if TYPE_CHECKING:
    from assay.cli.chat_model import Speaker
    from assay.cli.chat_screen import Screen
    from assay.cli.chat_session import ChatSession
    from assay.cli.chat_task import TaskDesk

HELP = """Talk to one or several models. /help in the chat lists its commands; /task asks a task's question and grades.

Several models answer the same questions side by side, each with its own history. A run's checkpoint brings the run's
task, prompt and length settings along. The same questions with the same --seed give the same answers.
  assay chat run:demo@0 run:demo@last
  assay chat Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 3 + 4?" --temperature 0
  assay chat run:demo@best --samples 8 --prompt "/task abacus 17"
Questions also come from a pipe, one a line. Then, as with --prompt, the exit code is 2 if one could not be answered."""
DEFAULT_LENGTH = 512
PROMPT = "> "


class ChatSampling(EvalConfig):
    """How answers are sampled."""

    temperature: NonNegative = 0.7
    """0 always takes the likeliest token, 1 samples from the model as it is"""
    max_new_tokens: Count = 0
    """answers are cut off here; 0: as in the run of a checkpoint, or else 512"""


class ChatConfig(MeasureConfig):
    """A conversation with finished models."""

    eval: ChatSampling = Field(default_factory=ChatSampling)


SETTINGS = ChatConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, hub id, GGUF file or run:NAME@STEP")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this and leave; may be repeated")
    parser.add_argument("--temperature", metavar="T", help="short for --eval.temperature [0.7]")
    parser.add_argument("--samples", metavar="N", help="short for --eval.samples [1]")
    parser.add_argument("--max", metavar="N", help="short for --eval.max_new_tokens")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    overrides = chosen(args)
    cfg = settings_of(args.models, overrides, args.trust)
    tolerate_any_text()
    from assay.cli.chat_screen import Screen
    from assay.cli.chat_session import ChatSession
    from assay.cli.chat_task import TaskDesk
    from assay.engine.base import SamplingParams

    params = SamplingParams(
        n=cfg.eval.samples,
        temperature=cfg.eval.temperature,
        top_k=cfg.eval.top_k,
        top_p=cfg.eval.top_p,
        min_p=cfg.eval.min_p,
        max_new_tokens=cfg.eval.max_new_tokens or DEFAULT_LENGTH,
        stop=tuple(cfg.eval.stop),
    )
    screen = Screen()
    desk = TaskDesk(cfg, load_settings(ChatConfig, None, overrides))
    if {"task", "task.name"} & set(overrides):
        desk.task(cfg.task.name)  # a mistake in it should not wait for the first question
    try:
        speakers = [load_speaker(model, args.models, overrides, desk, args.trust) for model in args.models]
        session = ChatSession(speakers, desk, params, cfg.seed, screen)
        if args.prompt:
            return answer_all(session, [valid(text) for text in args.prompt])
        if not sys.stdin.isatty():
            return answer_all(session, sys.stdin)
        welcome(speakers, session, screen)
        return converse(session)
    finally:
        desk.close()


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """What the person asked for, as dotted overrides."""
    short = {"temperature": args.temperature, "samples": args.samples, "max_new_tokens": args.max}
    words = [word for key, value in short.items() if value is not None for word in (f"--eval.{key}", value)]
    return parse_overrides([*args.overrides, *words])


def settings_of(models: list[str], overrides: dict[str, Any], trust: bool = False) -> ChatConfig:
    """The options over the settings of the first model that is a run's checkpoint; not over how it was measured."""
    runs_dir = Path(str(overrides.get("runs_dir", ChatConfig().runs_dir)))
    dropped = {"task", "reward"} if {"task", "task.name"} & set(overrides) else set()
    inherited = {
        key: value
        for key, value in inherited_settings(models, runs_dir, overrides, trust).items()
        if key.partition(".")[0] not in {"eval", *dropped} or key in ("eval.max_new_tokens", "eval.stop")
    }
    return load_settings(ChatConfig, None, {**inherited, **overrides})


def load_speaker(
    model: str, models: list[str], overrides: dict[str, Any], desk: TaskDesk, trust: bool = False
) -> Speaker:
    """A checkpoint is asked as its own run asked it; any other model as the first checkpoint, so that they compare."""
    from assay.cli.chat_model import Speaker
    from assay.train import components

    cfg = settings_of([model] if model.startswith(PREFIX) else models, overrides, trust)
    needs_task = cfg.prompt.few_shot and not cfg.prompt.few_shot_file and cfg.task.name
    try:
        renderer, engine = components.build_server(model, cfg, desk.task(cfg.task.name) if needs_task else None)
    except UserError as error:
        raise UserError(str(error) if model in str(error) else f"{model}: {error}") from error
    return Speaker(model, renderer, engine)


def answer_all(session: ChatSession, lines: Iterable[str]) -> int:
    """Without a person at the keyboard: every line is taken, and what went wrong shows in the exit code."""
    code = 0
    for line in lines:
        try:
            if not session.take(line):
                break
        except UserError as error:
            session.screen.complain(str(error))
            code = 2
    return code


def converse(session: ChatSession) -> int:
    interrupts = 0  # in a row: the first stops an answer or asks, the second leaves
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            interrupts += 1
            if interrupts > 1:
                return 130
            session.screen.note("Ctrl-C once more leaves, as do Ctrl-D and /quit")
            continue
        interrupts = 0
        try:
            if not session.take(line):
                return 0
        except UserError as error:
            session.screen.complain(str(error))
        except KeyboardInterrupt:
            interrupts = 1
            session.screen.note("stopped; Ctrl-C once more leaves")


def welcome(speakers: list[Speaker], session: ChatSession, screen: Screen) -> None:
    import importlib.util

    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # arrows and earlier lines in `input`
    for speaker in speakers:
        context = speaker.engine.info.max_length
        screen.note(f"{speaker.name}: {speaker.renderer.style} style, context of {context} tokens")
    task = f"/task asks a question of {session.desk.default_task}, " if session.desk.default_task else ""
    screen.note(f"temperature {session.params.temperature:g}; {task}/help lists all commands, /quit leaves")


def valid(text: str) -> str:
    """Bytes of an argument that are not UTF-8 become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def tolerate_any_text() -> None:
    """Neither a stray byte in a pipe nor a letter that the terminal lacks should end a conversation."""
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
