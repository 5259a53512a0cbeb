"""`assay env`: check an environment, or play it yourself."""

from __future__ import annotations

import argparse
import random

from assay.cli.data import add_task_arguments, task_arguments
from assay.envs import ENVS, Env, make_env
from assay.envs.base import Observation, as_messages, safe_reset, safe_step
from assay.envs.check import EPISODES, SECONDS, findings
from assay.tasks import make_task
from assay.types import UserError

HELP = """Environments: check that one keeps its promises, or play the policy yourself.

  assay env check examples/my_env.py:Backwards
  assay env play guess --arg tries=4"""

MAX_SECONDS = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="env_command", required=True, metavar="COMMAND")
    for name, text in (("check", "is it seeded, does it end, does a perfect policy score full"), ("play", "play it")):
        command = commands.add_parser(name, help=text)
        command.add_argument("name", help=f"{', '.join(ENVS)}, or a dotted path such as my_file.py:MyEnv")
        command.add_argument("--task", help="what it is about, where it is about a task, e.g. abacus")
        add_task_arguments(command)
        command.add_argument("--task-arg", action="append", default=[], metavar="NAME=VALUE", help="one of the task")
        if name == "check":
            command.add_argument("-n", type=int, default=EPISODES, help=f"episodes to play [{EPISODES}]")
            command.add_argument("--seconds", type=float, default=SECONDS, help=f"limit of one check [{SECONDS:g}]")
        else:
            command.add_argument("--seed", type=int, help="of the first episode [random]")


def run(args: argparse.Namespace) -> int:
    task = make_task(args.task, **task_arguments(args.task_arg)) if args.task else None
    env = make_env(args.name, args.path, task, **task_arguments(args.arg))
    try:
        return check(env, args.n, args.seconds) if args.env_command == "check" else play(env, args.seed)
    finally:
        env.close()


def check(env: Env, episodes: int, seconds: float) -> int:
    if episodes < 2:
        raise UserError("-n must be at least 2")
    if not 0 < seconds <= MAX_SECONDS:
        raise UserError(f"--seconds must be above 0, and at most {MAX_SECONDS:,}")
    sound = True
    for finding in findings(env, episodes, seconds):
        sound &= finding.ok
        told = "" if finding.ok else f": {finding.problem}"
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}{told}", flush=True)
    return 0 if sound else 1


def play(env: Env, seed: int | None) -> int:
    """Episode after episode, until the person has enough."""
    print("You are the policy. An empty line ends an action of several lines; Ctrl-D leaves.")
    seed = random.randrange(2**31) if seed is None else seed
    try:
        while True:
            print(f"--- episode {seed}")
            total = play_one(env.copy(), seed)
            print(f"--- over: {total:g} of {env.max_return:g}")
            seed += 1
    except EOFError:
        print()
        return 0


def play_one(episode: Env, seed: int) -> float:
    observation, _ = safe_reset(episode, seed)
    show(episode, observation)
    total, terminated, truncated, steps = 0.0, False, False, 0
    while not (terminated or truncated) and steps < episode.max_steps:
        observation, reward, terminated, truncated, info = safe_step(episode, ask(episode))
        total, steps = total + reward, steps + 1
        if observation:
            show(episode, observation)
        said = info.get("verdict")
        print(f"[reward {reward:g}{f', {said.status}: {said.detail}' if said and said.detail else ''}]")
    return total


def show(episode: Env, observation: Observation) -> None:
    for message in as_messages(observation, "tool" if episode.inline else episode.role):
        print(f"[{message['role']}] {message['content']}")


def ask(episode: Env) -> str:
    """Lines up to an empty one, or up to a stop string, where an action would end too."""
    lines: list[str] = []
    while line := input("> "):
        lines.append(line)
        if any(stop.strip("\n") and stop in line for stop in episode.stop):
            return "\n".join(lines)
        if "\n" in episode.stop:
            return line + "\n"
    return "\n".join(lines)
