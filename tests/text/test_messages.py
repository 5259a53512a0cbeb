"""Prompts for endpoints: ids stand for messages and texts."""

from __future__ import annotations

import pytest

from assay.text.messages import MessageRenderer, TextTable
from assay.types import Prompt, UserError

PROMPT = Prompt("p", ({"role": "system", "content": "own"}, {"role": "user", "content": "2 + 2?"}))


def test_a_chat_prompt_is_its_messages() -> None:
    texts = TextTable()
    assert texts.messages(MessageRenderer(texts).prompt_ids(PROMPT)) == list(PROMPT.messages)
    renderer = MessageRenderer(texts, system="be brief", few_shot=[("1 + 1?", "2")])
    (ids,) = renderer.all_prompt_ids([PROMPT])
    assert [(m["role"], m["content"]) for m in texts.messages(ids)] == [
        ("system", "be brief"),
        ("user", "1 + 1?"),
        ("assistant", "2"),
        ("user", "2 + 2?"),
    ]


def test_a_completion_has_one_id_per_token_and_its_text() -> None:
    texts = TextTable()
    renderer = MessageRenderer(texts)
    ids = texts.completion_ids("the answer is 4", 5)
    assert len(ids) == 5 and renderer.decode(ids) == "the answer is 4"
    assert renderer.decode_all([ids, texts.completion_ids("", 2)]) == ["the answer is 4", ""]
    assert len(texts.completion_ids("", 1)) == 1


def test_turns_of_an_episode_become_messages() -> None:
    texts = TextTable()
    renderer = MessageRenderer(texts)
    reply = texts.completion_ids("is it 5", 3) + texts.completion_ids("?", 1)  # streamed in two parts
    context = renderer.next_turn_ids(PROMPT, reply, [{"role": "user", "content": "no"}])
    messages = texts.messages([*renderer.prompt_ids(PROMPT), *reply, *context])
    assert [m["content"] for m in messages] == ["own", "2 + 2?", "is it 5?", "no"]
    assert messages[2]["role"] == "assistant"
    again = texts.messages([*renderer.prompt_ids(PROMPT), *reply, *context])
    assert again == messages  # reading changes nothing


def test_raw_style_is_text() -> None:
    texts = TextTable()
    renderer = MessageRenderer(texts, style="raw", template="{examples}Q: {question}\nA:", few_shot=[("1 + 1?", "2")])
    prompt = Prompt("p", ({"role": "user", "content": "2 + 2?"},))
    assert texts.text(renderer.prompt_ids(prompt)) == "Q: 1 + 1?\nA: 2\n\nQ: 2 + 2?\nA:" == renderer.prompt_text(prompt)
    assert renderer.stop == ("\nQ:",)
    reply = texts.completion_ids(" 4", 1)
    follow = renderer.next_turn_ids(prompt, reply, [{"role": "user", "content": "3 + 3?"}])
    assert texts.text([*reply, *follow]) == " 4\n\nQ: 3 + 3?\nA:"
    assert renderer.decode(renderer.inline_ids("<result>")) == "<result>"


def test_a_chat_endpoint_has_its_own_template_and_whole_replies() -> None:
    with pytest.raises(UserError, match=r"prompt.template needs openai.api = completions"):
        MessageRenderer(TextTable(), template="{question}")
    with pytest.raises(UserError, match=r"openai.api completions"):
        MessageRenderer(TextTable()).inline_ids("x")
