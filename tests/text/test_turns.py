"""Conversations of many turns: what was sampled stays as it is, and everything between is as the template writes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from assay.text import Renderer, Tokenizer, char_tokenizer, load_tokenizer
from assay.types import Message, Prompt, UserError

MODELS = Path(os.environ.get("ASSAY_MODELS", Path(__file__).parents[2] / ".models"))
QWEN = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|body|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|body|>\n\n{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are SmolLM.<|im_end|>"
    "\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # as Qwen3: what was thought is dropped once somebody has answered
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = SMOLLM2.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
FORGETFUL = "{% for m in messages if m['role'] == 'user' %}<user>{{ m['content'] }}{% endfor %}<assistant>"
FORMS = {"qwen": QWEN, "llama": LLAMA, "smollm2": SMOLLM2, "builtin": None}
EXTRA = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|body|>", "<|eot_id|>", "<|endoftext|>"]
PROMPT = Prompt("p/0", ({"role": "user", "content": "Guess."},))


def tokenizer(template: str | None) -> Tokenizer:
    hf = char_tokenizer().hf
    hf.add_special_tokens({"additional_special_tokens": EXTRA}, replace_extra_special_tokens=False)
    if template is not None:
        hf.chat_template = template
    return Tokenizer(hf)


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("form", FORMS)
def test_turn_by_turn_ids_equal_the_template_of_the_whole_conversation(form: str, role: str) -> None:
    tokens = tokenizer(FORMS[form])
    renderer = Renderer(tokens)
    messages: list[Message] = list(PROMPT.messages)
    ids = renderer.prompt_ids(PROMPT)
    for turn in range(12):
        reply, answer = f"my guess: {turn}", f"higher than {turn}"
        sampled = [*tokens.encode(reply), renderer.stop_token_ids[0]]
        ids += sampled + renderer.next_turn_ids(PROMPT, sampled, [{"role": role, "content": answer}])
        messages += [{"role": "assistant", "content": reply}, {"role": role, "content": answer}]
        assert ids == tokens.encode(tokens.chat_text(messages, open_reply=True))
    assert ids.count(renderer.stop_token_ids[0]) >= 12


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("file", ["smollm2-135m-instruct.q4_1.gguf", "qwen2.5-coder-1.5b-instruct.q4_k_m.gguf"])
def test_turn_by_turn_ids_with_tokenizers_of_real_models(file: str, role: str) -> None:
    """Merges of a real tokenizer, line ends and blanks where texts meet, and the templates as they are."""
    if not (MODELS / file).is_file():
        pytest.skip(f"no {file} under {MODELS}")
    tokens = load_tokenizer(str(MODELS / file))
    renderer = Renderer(tokens)
    messages, ids = list(PROMPT.messages), renderer.prompt_ids(PROMPT)
    for turn in range(15):
        reply, answer = f"I think it is {37 * turn}.\nMaybe <b>{turn}</b>", f"Higher than {turn}!\n\n  ok"
        sampled = [*tokens.encode(reply), renderer.stop_token_ids[0]]
        ids += sampled + renderer.next_turn_ids(PROMPT, sampled, [{"role": role, "content": answer}])
        messages += [{"role": "assistant", "content": reply}, {"role": role, "content": answer}]
        assert ids == tokens.encode(tokens.chat_text(messages, open_reply=True))
    assert renderer.rewritten_history() == ""


@pytest.mark.parametrize("form", FORMS)
def test_missing_end_token_of_a_reply_is_added_as_context(form: str) -> None:
    """Cut off by a limit or a stop string; or ended by another token than the template's."""
    tokens = tokenizer(FORMS[form])
    renderer = Renderer(tokens)
    end, answer = renderer.stop_token_ids[0], [Message(role="user", content="no")]
    ended = renderer.next_turn_ids(PROMPT, [*tokens.encode("7"), end], answer)
    assert renderer.next_turn_ids(PROMPT, tokens.encode("7"), answer) == [end, *ended]
    other = tokens.encode("<|endoftext|>")
    assert renderer.next_turn_ids(PROMPT, [*tokens.encode("7"), *other], answer) == [end, *ended]


def test_sampled_tokens_are_never_retokenized() -> None:
    """A policy may spell a word in tokens that no tokenizer would choose; only what follows it is tokenised."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, "<u>": 4, "<a>": 5, "?": 6}
    backend = Backend(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<u>", "<a>"])
    hf.chat_template = (
        "{% for m in messages %}{{ '<u>' if m['role'] == 'user' else '<a>' }}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    renderer = Renderer(Tokenizer(hf))
    sampled = [1, 2, 0]  # "ab" as two tokens
    following = renderer.next_turn_ids(PROMPT, sampled, [{"role": "user", "content": "ab"}])
    assert following == [4, 3, 5] and renderer.tokenizer.encode("ab") == [3]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (QWEN, ""),
        (SMOLLM2, ""),
        (None, ""),
        (LLAMA, "trims whitespace"),
        (THINKING, "drops <think> sections"),
        (OPENED, "changes the text before"),
    ],
)
def test_templates_that_change_earlier_replies_are_detected(template: str | None, found: str) -> None:
    how = Renderer(tokenizer(template)).rewritten_history()
    assert how.startswith(found) and bool(how) == bool(found)


def test_template_without_earlier_replies_rejects_further_turns() -> None:
    renderer = Renderer(tokenizer(FORGETFUL))
    with pytest.raises(UserError, match="drops earlier replies"):
        renderer.next_turn_ids(PROMPT, [1], [{"role": "user", "content": "?"}])


def test_raw_templates_format_further_questions_like_examples() -> None:
    tokens = tokenizer(None)
    renderer = Renderer(tokens, style="raw")
    answer = [Message(role="user", content="Higher.")]
    text = tokens.decode(renderer.next_turn_ids(PROMPT, tokens.encode(" 5"), answer), skip_special=False)
    assert text == "\n\nQuestion: Higher.\nAnswer:"
    begun = tokens.encode(" 5\nQuestion:")  # the stop string of this style: it has asked already
    assert tokens.decode(renderer.next_turn_ids(PROMPT, begun, answer)) == " Higher.\nAnswer:"
    assert renderer.rewritten_history() == ""
    assert renderer.inline_ids("24>>") == tokens.encode("24>>") and renderer.inline_ids("") == []
