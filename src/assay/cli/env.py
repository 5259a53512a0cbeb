"""Check that an environment follows the interface, or play it interactively in place of the policy.

For example:
  assay env check examples/my_env.py:Backwards
  assay env play guess --arg tries=4
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict

from assay.cli.data import task_arguments
from assay.envs import ENVS, Env, make_env
from assay.envs.base import Observation, as_messages, safe_reset, safe_step, up_to_stop
from assay.runs.files import print_json
from assay.system.awaiting import resolve
from assay.tasks import make_task
from assay.testing.env import EPISODES, SECONDS, findings
from assay.types import UserError

MAX_SECONDS = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="env_command", required=True, metavar="COMMAND")
    for name, text in (("check", "check seeding, termination and rewards"), ("play", "play it interactively")):
        command = commands.add_parser(name, help=text)
        command.add_argument("name", help=f"{', '.join(ENVS)}, or a dotted path such as my_file.py:MyEnv")
        command.add_argument("--task", help="the task of an environment that needs one, e.g. abacus")
        command.add_argument("--path", help="local file or folder of the task (without --task: of the environment)")
        for option, owner, example in (("--arg", "environment", "tries=4"), ("--task-arg", "task", "style=plain")):
            text = f"an argument of the {owner}, e.g. {option} {example}"
            command.add_argument(option, action="append", default=[], metavar="NAME=VALUE", help=text)
        if name == "check":
            command.add_argument("-n", type=int, default=EPISODES, help=f"episodes to play [{EPISODES}]")
            command.add_argument("--seconds", type=float, default=SECONDS, help=f"time limit per check [{SECONDS:g}]")
            command.add_argument("--json", action="store_true", help="print JSON")
        else:
            command.add_argument("--seed", type=int, help="seed of the first episode [random]")


def run(args: argparse.Namespace) -> int:
    task = make_task(args.task, args.path, **task_arguments(args.task_arg)) if args.task else None
    env = make_env(args.name, None if task else args.path, task, **task_arguments(args.arg))
    try:
        return check(env, args.n, args.seconds, args.json) if args.env_command == "check" else play(env, args.seed)
    finally:
        resolve(env.close())


def check(env: Env, episodes: int, seconds: float, as_json: bool) -> int:
    if episodes < 2:
        raise UserError("-n must be at least 2")
    if not 0 < seconds <= MAX_SECONDS:
        raise UserError(f"--seconds must be above 0, and at most {MAX_SECONDS:,}")
    found = []
    for finding in findings(env, episodes, seconds):
        found.append(finding)
        if not as_json:
            problem = "" if finding.ok else f": {finding.problem}"
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}{problem}", flush=True)
    passed = all(finding.ok for finding in found)
    if as_json:
        print_json({"ok": passed, "checks": [asdict(finding) for finding in found]})
    return 0 if passed else 1


def play(env: Env, seed: int | None) -> int:
    """Play episodes until the user exits."""
    print("You are the policy. Enter sends your text (a line that ends with \\ continues on the next); Ctrl-D exits.")
    seed = random.randrange(2**31) if seed is None else seed
    try:
        while True:
            print(f"--- episode {seed}")
            total = play_one(env.copy(), seed)
            print(f"--- return: {total:g} of {env.max_return:g}")
            seed += 1
    except EOFError:
        print()
        return 0


def play_one(episode: Env, seed: int) -> float:
    observation, _ = resolve(safe_reset(episode, seed))
    show(episode, observation)
    total, terminated, truncated, steps, text = 0.0, False, False, 0, ""
    while not (terminated or truncated) and steps < episode.max_steps:
        text = text or read_text(episode)
        action = up_to_stop(text, episode.stop)  # the rest of the text is the next action
        text = text.removeprefix(action)
        observation, reward, terminated, truncated, info = resolve(safe_step(episode, action))
        total, steps = total + reward, steps + 1
        if observation:
            show(episode, observation)
        verdict = info.get("verdict")
        detail = f", {verdict.status}: {verdict.detail}" if verdict and verdict.detail else ""
        print(f"[reward {reward:g}{detail}]")
    return total


def show(episode: Env, observation: Observation) -> None:
    for message in as_messages(observation, "tool" if episode.inline else episode.role):
        print(f"[{message['role']}] {message['content']}")


def read_text(episode: Env) -> str:
    """Read a line, or several if all but the last one end with a backslash. Empty lines are skipped.

    Enter ends a line of an environment that stops at newlines, unless the text already ends with a stop string.
    """
    lines: list[str] = []
    while not lines or lines[-1].endswith("\\"):
        if line := input("> " if not lines else "  "):
            lines.append(line)
    text = "\n".join(line.removesuffix("\\") for line in lines)
    return text + "\n" if "\n" in episode.stop and not text.endswith(tuple(episode.stop)) else text
