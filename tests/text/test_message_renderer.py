"""Prompts for endpoints: messages and texts instead of token ids."""

from __future__ import annotations

import pytest

from assay.text.render import MessageRenderer
from assay.types import Prompt, UserError

PROMPT = Prompt("p", ({"role": "system", "content": "own"}, {"role": "user", "content": "2 + 2?"}))


def test_a_chat_prompt_is_its_messages() -> None:
    assert MessageRenderer().prompt_ids(PROMPT) == list(PROMPT.messages)
    renderer = MessageRenderer(system="be brief", few_shot=[("1 + 1?", "2")])
    (messages,) = renderer.all_prompt_ids([PROMPT])
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "be brief"),
        ("user", "1 + 1?"),
        ("assistant", "2"),
        ("user", "2 + 2?"),
    ]


def test_completions_are_texts_and_observations_are_messages() -> None:
    renderer, observed = MessageRenderer(), {"role": "user", "content": "no"}
    assert renderer.decode_all([["is it 5", "?"], [""], []]) == ["is it 5?", "", ""]
    assert renderer.next_turn_ids(PROMPT, ["is it 5?"], [observed]) == [observed]  # type: ignore[list-item]


def test_raw_style_is_text() -> None:
    renderer = MessageRenderer(style="raw", template="{examples}Q: {question}\nA:", few_shot=[("1 + 1?", "2")])
    prompt = Prompt("p", ({"role": "user", "content": "2 + 2?"},))
    assert renderer.prompt_ids(prompt) == ["Q: 1 + 1?\nA: 2\n\nQ: 2 + 2?\nA:"] == [renderer.prompt_text(prompt)]
    assert renderer.stop == ("\nQ:",)
    follow = renderer.next_turn_ids(prompt, [" 4"], [{"role": "user", "content": "3 + 3?"}])
    assert renderer.decode([" 4", *follow]) == " 4\n\nQ: 3 + 3?\nA:"
    assert renderer.inline_ids("<result>") == ["<result>"] and renderer.inline_ids("") == []


def test_a_chat_endpoint_has_its_own_template_and_whole_replies() -> None:
    with pytest.raises(UserError, match=r"prompt.template needs openai.api = completions"):
        MessageRenderer(template="{question}")
    with pytest.raises(UserError, match=r"openai.api completions"):
        MessageRenderer().inline_ids("x")
