"""Print a script that completes commands, options and settings. To install it:

  bash: assay completion bash > ~/.local/share/bash-completion/completions/assay
  zsh:  assay completion zsh > _assay, in a folder of $fpath
  fish: assay completion fish > ~/.config/fish/completions/assay.fish

Repeat this after an update of assay.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass, field

from assay.cli.main import COMMANDS, accepted_names, make_parser
from assay.config.settings import keys

# The script contains all words, so that completion does not start Python. argcomplete starts it for every completion,
# and neither it nor shtab knows the settings.


@dataclass
class Words:
    """What can follow a command. `values`: of options and settings that accept a fixed set."""

    options: dict[str, str] = field(default_factory=dict)  # with their help, also subcommands
    values: dict[str, list[str]] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SCRIPTS)


def run(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell]({name: words_of(name) for name in COMMANDS}))
    return 0


def words_of(command: str) -> Words:
    module = importlib.import_module(f"assay.cli.{command}")
    words = Words()
    add_options(words, make_parser(module, f"assay {command}"))
    if hasattr(module, "SETTINGS"):
        for key, setting in keys(module.SETTINGS):
            words.options[f"--{key}"] = (setting.description or "").strip()
            if values := accepted_names(key, setting):
                words.values[f"--{key}"] = values
    return words


def add_options(words: Words, parser: argparse.ArgumentParser) -> None:
    """Options of a parser and of its subcommands, subcommands and the choices of other arguments."""
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        words.options |= dict.fromkeys(action.option_strings or choices, action.help or "")
        if choices:
            words.values |= dict.fromkeys(action.option_strings, choices)
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                add_options(words, subparser)


def bash(commands: dict[str, Words]) -> str:
    return f"""_assay() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=""
  if (( COMP_CWORD == 1 )); then
    words="{" ".join(COMMANDS)}"
  else
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases(commands, '      "{} {}") words="{}" ;;')}
      *) case "$command" in
{options(commands, '        {}) words="{}" ;;')}
      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _assay assay"""


def zsh(commands: dict[str, Words]) -> str:
    return f"""#compdef assay
_assay() {{
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(COMMANDS)}
    return
  fi
  case "$words[2] $words[CURRENT-1]" in
{cases(commands, '    "{} {}") compadd -- {}; return ;;')}
  esac
  case "$words[2]" in
{options(commands, "    {}) compadd -- {} ;;")}
  esac
  _files
}}
if [ "$funcstack[1]" = "_assay" ]; then
  _assay "$@"
else
  compdef _assay assay
fi"""


def cases(commands: dict[str, Words], form: str) -> str:
    return "\n".join(
        form.format(command, option, " ".join(values))
        for command, words in commands.items()
        for option, values in words.values.items()
    )


def options(commands: dict[str, Words], form: str) -> str:
    return "\n".join(form.format(command, " ".join(words.options)) for command, words in commands.items())


def fish(commands: dict[str, Words]) -> str:
    lines = [
        f"complete -c assay -n __fish_use_subcommand -f -a {name} -d {quoted(COMMANDS[name])}" for name in COMMANDS
    ]
    for command, words in commands.items():
        after = f'complete -c assay -n "__fish_seen_subcommand_from {command}"'
        for option, text in words.options.items():
            kind = "-l" if option.startswith("--") else "-s" if option.startswith("-") else "-a"
            line = f"{after} {kind} {option.lstrip('-')} -d {quoted(text)}"
            if option in words.values:
                line += f" -x -a {quoted(' '.join(words.values[option]))}"
            lines.append(line)
    return "\n".join(lines)


def quoted(text: str) -> str:
    """A string of fish, on one line."""
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
