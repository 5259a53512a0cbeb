"""Plain text templates for models without a chat format: "{examples}Question: {question}\\nAnswer:"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from string import Formatter
from typing import Any

from assay.text.few_shot import Shot
from assay.types import Prompt, UserError

DEFAULT_TEMPLATE = "{examples}Question: {question}\nAnswer:"
Piece = tuple[str, str | None]  # literal text, then the name of a placeholder or None


class RawTemplate:
    """A template with {question}, {examples}, {system} and any of a prompt's fields; literal braces are {{ and }}.

    {examples} is filled with few-shot examples and the earlier turns of a conversation, each in the form of what
    follows {examples} in the template. System text for which there is no {system} goes first, before an empty line.
    `escape` is applied to everything that is filled in, and never to the template itself.
    """

    def __init__(self, template: str, escape: Callable[[str], str] = str) -> None:
        self.pieces = _parse(template)
        self._escape = escape
        self.names = [name for _, name in self.pieces if name is not None]
        if not self.names:
            raise UserError("prompt.template has no placeholder: put {question} where the question belongs")
        start = self.names.index("examples") + 1 if "examples" in self.names else 0
        self._shot_pieces = self.pieces[start:]

    @property
    def default_stop(self) -> tuple[str, ...]:
        """A model that asks itself the next question has finished: the words before {question}, on a new line."""
        literals = [literal for literal, name in self.pieces if name == "question"]
        words = literals[0].split("\n")[-1].strip() if literals else ""
        return (f"\n{words}",) if any(letter.isalpha() for letter in words) else ()

    def render(self, prompt: Prompt, system: str | None, few_shot: Sequence[Shot]) -> str:
        own_system = next((m["content"] for m in prompt.messages if m["role"] == "system"), "")
        system = own_system if system is None else system
        shots = [*few_shot, *_earlier_turns(prompt)]
        if shots and "examples" not in self.names:
            raise UserError("prompt.template has no {examples}: put it where examples and earlier turns belong")
        values = {
            **prompt.fields,
            "question": prompt.question,
            "system": system,
            "examples": "".join(self._shot(question, solution) for question, solution in shots),
        }
        text = self._fill(self.pieces, values)
        return f"{self._escape(system)}\n\n{text}" if system and "system" not in self.names else text

    @staticmethod
    def gap(before: str, after: str) -> str:
        """A space to set an answer apart from its prompt, if there is no whitespace yet."""
        return "" if before[-1:].isspace() or after[:1].isspace() else " "

    def next_question(self, question: str, reply: str) -> str:
        """What follows a reply, in the form of the examples; one that began to ask by itself is taken at its word."""
        asked = self._fill(self._shot_pieces, {"question": question, "system": ""})
        begun = next((stop for stop in self.default_stop if reply.endswith(stop)), "")
        return asked.removeprefix(begun.lstrip("\n")) if begun else f"\n\n{asked}"

    def _shot(self, question: str, solution: str) -> str:
        asked = self._fill(self._shot_pieces, {"question": question, "system": ""})
        return f"{asked}{self.gap(asked, solution)}{self._escape(solution)}\n\n"

    def _fill(self, pieces: Sequence[Piece], values: Mapping[str, Any]) -> str:
        parts: list[str] = []
        content = ""  # values with nothing between them are escaped together
        for literal, name in pieces:
            if name == "examples":  # made of the template, and of content that is escaped already
                literal += _value(values, name)
                name = None
            if literal:
                parts += [self._escape(content), literal]
                content = ""
            if name is not None:
                content += _value(values, name)
        return "".join([*parts, self._escape(content)])


def _parse(template: str) -> list[Piece]:
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"prompt.template: {error} (a literal brace is written twice: {{{{ or }}}})") from error
    pieces: list[Piece] = []
    for literal, name, form, conversion in parsed:
        if name is not None and (not name.isidentifier() or form or conversion):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise UserError(
                f"prompt.template: {{{shown}}} is not a plain name (a literal brace is written twice: {{{{ or }}}})"
            )
        pieces.append((literal, name))
    return pieces


def _value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        known = ", ".join(f"{{{known}}}" for known in sorted(values))
        raise UserError(
            f"prompt.template: unknown placeholder {{{name}}}: known here are {known} "
            "(a literal brace is written twice: {{ or }})"
        )
    return str(values[name])


def _earlier_turns(prompt: Prompt) -> list[Shot]:
    """Questions of a conversation that have been answered already."""
    turns = [message for message in prompt.messages if message["role"] != "system"]
    return [(q["content"], a["content"]) for q, a in pairwise(turns) if (q["role"], a["role"]) == ("user", "assistant")]
