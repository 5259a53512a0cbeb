"""Prompts, completions, conversations and loss masks rendered by chat and raw templates; few-shot examples."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from assay.text import Renderer, Tokenizer, char_tokenizer, load_tokenizer
from assay.text.render import MessageRenderer, few_shot_from_prompts, load_few_shot, read_text_file
from assay.types import Message, Prompt, UserError

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|body|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|body|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "qwen": QWEN, "builtin": None}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "qwen": "<|im_end|>"}
ENDS |= {"builtin": "<eos>"}


def with_template(template: str | None, adds_bos: bool = False) -> Tokenizer:
    """The character tokenizer with the special tokens of chat formats, and the template of one of them."""
    hf = char_tokenizer().hf
    special = ["<|head|>", "<|body|>", "<|im_start|>", "<start_of_turn>", "<|endoftext|>", *ENDS.values()]
    hf.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    hf.chat_template = template or hf.chat_template
    if adds_bos:
        hf.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return Tokenizer(hf)


FORMS = {form: with_template(template) for form, template in TEMPLATES.items()}


def ask(question: str, *, system: str | None = None, **fields: object) -> Prompt:
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": question})
    return Prompt(id="test/0", messages=tuple(messages), fields=fields)


PROMPT = ask("What is 2+3?")


@pytest.mark.parametrize("form", TEMPLATES)
@settings(max_examples=25)
@given(completion=st.text(alphabet="abc 0123+=\\{}#.\n", max_size=20))
def test_loss_masks_cover_completion_and_end_token(form: str, completion: str) -> None:
    tokenizer = FORMS[form]
    renderer = Renderer(tokenizer)
    prompt_ids = renderer.prompt_ids(PROMPT)
    ids, mask = renderer.example(PROMPT, completion)
    assert ids[: len(prompt_ids)] == prompt_ids
    assert mask == [0] * len(prompt_ids) + [1] * (len(ids) - len(prompt_ids))
    taught = [index for index, bit in zip(ids, mask, strict=True) if bit]
    assert tokenizer.decode(taught, skip_special=False) == completion + ENDS[form]
    assert renderer.decode(taught) == completion


@pytest.mark.parametrize("form", TEMPLATES)
def test_example_equals_the_conversation_rendered_by_the_template(form: str) -> None:
    check_example(Renderer(FORMS[form]))


def check_example(renderer: Renderer) -> None:
    ids, _ = renderer.example(PROMPT, "2+3=5")
    conversation = [*PROMPT.messages, {"role": "assistant", "content": "2+3=5"}]
    whole = renderer.tokenizer.hf.apply_chat_template(conversation, return_dict=True)["input_ids"]
    assert ids == whole[: len(ids)]
    assert renderer.tokenizer.decode(whole[len(ids) :], skip_special=False).strip() == ""


@pytest.mark.parametrize("form", TEMPLATES)
def test_end_token_is_added_once(form: str) -> None:
    tokenizer, end = FORMS[form], ENDS[form]
    renderer = Renderer(tokenizer)
    assert renderer.example(PROMPT, "5" + end) == renderer.example(PROMPT, "5")
    assert renderer.stop_token_ids[0] == tokenizer.encode(end)[0]
    assert set(tokenizer.eos_ids) <= set(renderer.stop_token_ids)
    assert renderer.stop == ()


@pytest.mark.parametrize(("written", "end"), [("\n", "<eos>"), ("<|body|>", "<|body|>")])
def test_end_token_is_that_of_the_template_or_else_eos(written: str, end: str) -> None:
    """Also an end token that no config lists."""
    tokenizer = FORMS["builtin"]
    template = "{% for m in messages %}<|head|>{{ m['content'] }}" + written + "{% endfor %}"
    renderer, (end_id,) = Renderer(tokenizer, style="chat", template=template), tokenizer.encode(end)
    assert renderer.example(PROMPT, "5")[0][-1] == end_id == renderer.stop_token_ids[0]
    assert renderer.decode([*tokenizer.encode("5"), end_id]) == "5"


@pytest.mark.parametrize("form", ["llama3", "chatml"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_is_added_once_if_expected(form: str, adds_bos: bool) -> None:
    tokenizer = with_template(TEMPLATES[form], adds_bos)
    written_by_template = form != "chatml"
    chat, raw = Renderer(tokenizer), Renderer(tokenizer, style="raw")
    assert chat.prompt_ids(PROMPT).count(1) == int(written_by_template or adds_bos)
    assert raw.prompt_ids(PROMPT).count(1) == int(adds_bos)
    for renderer in (chat, raw):
        assert 1 not in renderer.prompt_ids(PROMPT)[1:]
        assert renderer.example(PROMPT, "5")[0].count(1) == renderer.prompt_ids(PROMPT).count(1)
    assert Renderer(tokenizer, style="raw", template="<bos>{question}").prompt_ids(PROMPT).count(1) == 1
    assert Renderer(tokenizer, style="raw", add_bos=True).prompt_ids(PROMPT)[0] == 1
    assert 1 not in Renderer(tokenizer, style="raw", add_bos=False).prompt_ids(PROMPT)


@pytest.mark.parametrize(("form", "adds_bos"), [("llama3", False), ("chatml", True)])
def test_batched_calls_equal_single_calls(form: str, adds_bos: bool) -> None:
    prompts = [PROMPT, Prompt("other", ({"role": "user", "content": "1 + 1?"},), answer="2")]
    for style in ("chat", "raw"):
        renderer = Renderer(with_template(TEMPLATES[form], adds_bos), style=style)
        assert renderer.all_prompt_ids(prompts) == [*map(renderer.prompt_ids, prompts)]
        end = renderer.stop_token_ids[0]
        answers = [[*renderer.tokenizer.encode("5"), end, end], [end, *renderer.tokenizer.encode("6")], [], [end]]
        assert renderer.decode_all(answers) == [*map(renderer.decode, answers)] == ["5", "6", "", ""]


def test_system_prompts() -> None:
    tokenizer = FORMS["chatml"]
    assert "system\nBe brief.<|im_end|>" in Renderer(tokenizer).prompt_text(PROMPT)  # the template's default
    own = ask("2+3?", system="Be kind.")
    assert Renderer(tokenizer).prompt_text(own).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user")
    configured = Renderer(tokenizer, system="Be exact.").prompt_text(own)
    assert "Be exact." in configured and "Be kind." not in configured and "Be brief." not in configured
    with pytest.raises(UserError, match="no system role here"):
        Renderer(FORMS["gemma"], system="Be exact.").prompt_ids(PROMPT)


def test_few_shot_turns_come_between_system_and_question() -> None:
    renderer = Renderer(FORMS["builtin"], system="S", few_shot=[("1+1?", "2"), ("2+2?", "4")])
    expected = "<system>S<user>1+1?<assistant>2<eos><user>2+2?<assistant>4<eos><user>What is 2+3?<assistant>"
    assert renderer.prompt_text(PROMPT) == expected
    assert renderer.tokenizer.decode(renderer.prompt_ids(PROMPT), skip_special=False) == expected


def test_model_without_a_chat_template_is_reported() -> None:
    tokenizer = char_tokenizer()
    tokenizer.hf.chat_template = None
    for style in ("auto", "chat"):
        with pytest.raises(UserError, match=r'prompt\.style = "raw".*prompt\.template'):
            Renderer(tokenizer, style=style)
    assert Renderer(tokenizer, style="raw").prompt_text(PROMPT) == "Question: What is 2+3?\nAnswer:"
    assert Renderer(tokenizer, template="Q {question} A").prompt_text(PROMPT) == "Q What is 2+3? A"
    assert Renderer(tokenizer, style="chat", template=CHATML).prompt_text(PROMPT).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "chatty"}, "chatty"),
        ({"style": "chat", "template": "Question: {question}"}, "raw"),
        ({"style": "chat", "template": "{% for %}"}, "template"),
        ({"template": "Question: {question"}, "brace"),
        ({"template": "{question!r}"}, "plain name"),
        ({"template": "{0}"}, "plain name"),
        ({"template": "{}"}, "plain name"),
        ({"template": "no placeholder"}, r"\{question\}"),
        ({"template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, r"set prompt.style = .chat."),
    ],
)
def test_invalid_renderer_settings_are_reported(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Renderer(FORMS["builtin"], **settings)  # type: ignore[arg-type]


def test_raw_templates_fill_fields_and_keep_literal_braces() -> None:
    prompt = ask("Make 24", nums=[4, 6], target=24)
    template = "{question} from {nums}, \\boxed{{{target}}}:"
    assert Renderer(FORMS["builtin"], template=template).prompt_text(prompt) == "Make 24 from [4, 6], \\boxed{24}:"
    with pytest.raises(UserError, match=r"unknown placeholder \{numbers\}.*\{nums\}"):
        Renderer(FORMS["builtin"], template="{question} {numbers}").prompt_ids(prompt)
    braces = ask("what is {x}?")  # values are not templates
    assert Renderer(FORMS["builtin"], template="{question}").prompt_text(braces) == "what is {x}?"


def test_raw_few_shot_and_system() -> None:
    shots = [("1+1?", "1+1=2")]
    renderer = Renderer(FORMS["builtin"], style="raw", few_shot=shots, system="Answer.")
    asked = "Question: What is 2+3?\nAnswer:"
    assert renderer.prompt_text(PROMPT) == f"Answer.\n\nQuestion: 1+1?\nAnswer: 1+1=2\n\n{asked}"
    headed = Renderer(FORMS["builtin"], template="[{system}] Like so:\n{examples}Q: {question}\nA:\n", few_shot=shots)
    assert headed.prompt_text(ask("2+2?", system="Hm")) == "[Hm] Like so:\nQ: 1+1?\nA:\n1+1=2\n\nQ: 2+2?\nA:\n"
    with pytest.raises(UserError, match=r"\{examples\}"):
        Renderer(FORMS["builtin"], template="{question}", few_shot=shots).prompt_ids(PROMPT)


def test_raw_conversations_keep_their_earlier_turns() -> None:
    messages: tuple[Message, ...] = (
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
    )
    text = Renderer(FORMS["builtin"], style="raw").prompt_text(Prompt(id="x", messages=messages))
    assert text == "Question: 1+1?\nAnswer: 2\n\nQuestion: And 2+2?\nAnswer:"


def test_raw_examples_separate_the_answer_and_end_with_eos() -> None:
    tokenizer = FORMS["builtin"]
    for template, completion, expected in [
        ("A:{question}\nB:", "5", " 5<eos>"),
        ("A:{question}\nB:", "\n5", "\n5<eos>"),
        ("A:{question}\nB:\n", "5", "5<eos>"),
    ]:
        renderer = Renderer(tokenizer, template=template)
        ids, mask = renderer.example(PROMPT, completion)
        start = mask.index(1)
        assert ids[:start] == renderer.prompt_ids(PROMPT) and all(mask[start:])
        assert tokenizer.decode(ids[start:], skip_special=False) == expected


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        (None, ("\nQuestion:",)),
        ("Some words.\n{examples}Q: {question}\nA:", ("\nQ:",)),
        ("{question}", ()),
        ("- {question}\n", ()),
        ("Make {target}.", ()),
    ],
)
def test_raw_stop_strings(template: str | None, stop: tuple[str, ...]) -> None:
    assert Renderer(FORMS["builtin"], style="raw", template=template).stop == stop
    assert Renderer(FORMS["builtin"], style="raw", template=template, stop=["END"]).stop == ("END",)
    assert Renderer(FORMS["builtin"], style="raw", template=template, stop=[]).stop == ()


def test_missing_end_token_is_reported_by_example() -> None:
    hf = char_tokenizer().hf
    hf.eos_token = None
    renderer = Renderer(Tokenizer(hf), style="raw")
    assert renderer.prompt_ids(PROMPT) and renderer.stop_token_ids == ()
    with pytest.raises(UserError, match="end-of-text"):
        renderer.example(PROMPT, "5")


def test_few_shot_examples_of_a_file(tmp_path: Path) -> None:
    rows = [
        {"question": "1+1?", "solution": "1+1=2", "answer": "2"},
        {"prompt": "2+2?", "completion": "4\u2028!"},
        {"question": "3+3?", "answer": "#### 6"},
    ]
    expected = [("1+1?", "1+1=2"), ("2+2?", "4\u2028!"), ("3+3?", "#### 6")]
    path = tmp_path / "shots.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert [load_few_shot(path, n) for n in (None, 2, 0)] == [expected, expected[:2], []]
    for content, n, message in (
        ("", None, "has 0 few-shot examples"),
        ('{"prompt": "a", "completion": "b"}', 2, "has 1 few-shot example, but 2 are"),
        ('{"question": "1+1?"}', None, "line 1"),
        ('\n{"question"', None, "line 2: not valid JSON"),
        ("[1]", None, "line 1"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=message) as caught:
            load_few_shot(path, n)
        assert str(path) in str(caught.value)


def test_few_shot_uses_the_first_prompts_with_a_solution() -> None:
    def prompt(index: int, solution: str | None = None) -> Prompt:
        return Prompt(str(index), ({"role": "user", "content": f"q{index}"},), solution=solution)

    prompts = [prompt(index, f"s{index}" if index % 2 else None) for index in range(6)]
    assert few_shot_from_prompts(prompts, 2) == [("q1", "s1"), ("q3", "s3")]
    with pytest.raises(UserError, match="4 few-shot examples requested, but only 3 prompts"):
        few_shot_from_prompts(prompts, 4)
    with pytest.raises(UserError, match="only 0"):
        few_shot_from_prompts(map(prompt, count()), 1)  # the search in endless prompts is limited


def test_prompt_files_are_read_without_the_final_newline(tmp_path) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Be brief.\n\nAlways.\n", encoding="utf-8")
    assert read_text_file(path) == "Be brief.\n\nAlways."
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    for name, message in [("none.txt", "no such file"), ("binary", "UTF-8"), (".", "cannot read")]:
        with pytest.raises(UserError, match=message):
            read_text_file(tmp_path / name)


MODELS = Path(os.environ.get("ASSAY_MODELS", Path(__file__).parents[2] / ".models"))
THINKING = (  # as Qwen3: what was thought is dropped once somebody has answered
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
FORGETFUL = "{% for m in messages if m['role'] == 'user' %}<user>{{ m['content'] }}{% endfor %}<assistant>"
GUESS = Prompt("p/0", ({"role": "user", "content": "Guess."},))


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("form", FORMS)
def test_turn_by_turn_ids_equal_the_template_of_the_whole_conversation(form: str, role: str) -> None:
    check_turns(Renderer(FORMS[form]), role)


def check_turns(renderer: Renderer, role: str) -> None:
    """Line ends and blanks where texts meet."""
    tokens, end = renderer.tokenizer, renderer.stop_token_ids[0]
    messages, ids = list(GUESS.messages), renderer.prompt_ids(GUESS)
    for turn in range(12):
        reply, answer = f"I think it is {37 * turn}.\nMaybe <b>{turn}</b>", f"Higher than {turn}!\n\n  ok"
        sampled = [*tokens.encode(reply), end]
        ids += sampled + renderer.next_turn_ids(GUESS, sampled, [{"role": role, "content": answer}])
        messages += [{"role": "assistant", "content": reply}, {"role": role, "content": answer}]
        assert ids == tokens.encode(tokens.chat_text(messages, open_reply=True))
    assert ids.count(end) >= 12


@pytest.mark.parametrize("file", ["smollm2-135m-instruct.q4_1.gguf", "qwen2.5-coder-1.5b-instruct.q4_k_m.gguf"])
def test_tokenizers_of_real_models(file: str, tmp_path: Path) -> None:
    """Merges of a real tokenizer, and the templates as they are."""
    if not (MODELS / file).is_file():
        pytest.skip(f"no {file} under {MODELS}")
    tokenizer = load_tokenizer(str(MODELS / file))
    text = "Ann has 1234 coins.\n\n12 + 7 = 19, so it's   €5 — naïve 😀"
    tokenizer.save(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(str(tmp_path)).encode(text) == tokenizer.encode(text)
    renderer = Renderer(tokenizer)
    check_example(renderer)
    for role in ("user", "tool"):
        check_turns(renderer, role)
    assert renderer.rewritten_history() == ""


@pytest.mark.parametrize("form", FORMS)
def test_missing_end_token_of_a_reply_is_added_as_context(form: str) -> None:
    """Cut off by a limit or a stop string; or ended by another token than the template's."""
    tokens = FORMS[form]
    renderer = Renderer(tokens)
    end, answer = renderer.stop_token_ids[0], [Message(role="user", content="no")]
    ended = renderer.next_turn_ids(GUESS, [*tokens.encode("7"), end], answer)
    assert renderer.next_turn_ids(GUESS, tokens.encode("7"), answer) == [end, *ended]
    other = tokens.encode("<|endoftext|>")
    assert renderer.next_turn_ids(GUESS, [*tokens.encode("7"), *other], answer) == [end, *ended]


@pytest.mark.parametrize(
    ("user", "assistant", "start", "following"),
    [
        ("[INST] {} [/INST]", " {} <eos>", "", "[INST] more [/INST]"),  # a space before the end
        ("<eos>q: {}", "{}", "a: ", "q: morea: "),  # the end begins the next turn
    ],
)
def test_the_end_of_a_reply_is_not_repeated(user: str, assistant: str, start: str, following: str) -> None:
    tokens, ids = char_tokenizer(), [Message(role="user", content="more")]
    written = {"<eos>": "' + eos_token + '", "{}": "' + m['content'] + '"}
    for mark, code in written.items():
        user, assistant = user.replace(mark, code), assistant.replace(mark, code)
    template = "{% for m in messages %}{{ '" + user + "' if m['role'] == 'user' else '" + assistant + "' }}{% endfor %}"
    renderer = Renderer(
        tokens, style="chat", template=template + "{% if add_generation_prompt %}" + start + "{% endif %}"
    )
    context = renderer.next_turn_ids(GUESS, [*tokens.encode("hi"), tokens.hf.eos_token_id], ids)
    assert tokens.decode(context, skip_special=False) == following


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
    following = renderer.next_turn_ids(GUESS, sampled, [{"role": "user", "content": "ab"}])
    assert following == [4, 3, 5] and renderer.tokenizer.encode("ab") == [3]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (CHATML, ""),
        (QWEN, ""),
        (None, ""),
        (LLAMA3, "trims whitespace"),
        (THINKING, "drops <think> sections"),
        (OPENED, "changes the text before"),
    ],
)
def test_templates_that_change_earlier_replies_are_detected(template: str | None, found: str) -> None:
    how = Renderer(with_template(template)).rewritten_history()
    assert how.startswith(found) and bool(how) == bool(found)


def test_template_without_earlier_replies_rejects_further_turns() -> None:
    renderer = Renderer(with_template(FORGETFUL))
    with pytest.raises(UserError, match="drops earlier replies"):
        renderer.next_turn_ids(GUESS, [1], [{"role": "user", "content": "?"}])


def test_raw_templates_format_further_questions_like_examples() -> None:
    tokens = FORMS["builtin"]
    renderer = Renderer(tokens, style="raw")
    answer = [Message(role="user", content="Higher.")]
    text = tokens.decode(renderer.next_turn_ids(GUESS, tokens.encode(" 5"), answer), skip_special=False)
    assert text == "\n\nQuestion: Higher.\nAnswer:"
    begun = tokens.encode(" 5\nQuestion:")  # the stop string of this style: it has asked already
    assert tokens.decode(renderer.next_turn_ids(GUESS, begun, answer)) == " Higher.\nAnswer:"
    assert renderer.rewritten_history() == ""
    assert renderer.inline_ids("24>>") == tokens.encode("24>>") and renderer.inline_ids("") == []


ASKED = Prompt("p", ({"role": "system", "content": "own"}, {"role": "user", "content": "2 + 2?"}))


def test_endpoints_get_messages_and_whole_replies() -> None:
    assert MessageRenderer().prompt_ids(ASKED) == list(ASKED.messages)
    renderer = MessageRenderer(system="be brief", few_shot=[("1 + 1?", "2")])
    (messages,) = renderer.all_prompt_ids([ASKED])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in messages] == ["be brief", "1 + 1?", "2", "2 + 2?"]
    assert renderer.decode_all([["is it 5", "?"], [""], []]) == ["is it 5?", "", ""]
    observed = {"role": "user", "content": "no"}
    assert renderer.next_turn_ids(ASKED, ["is it 5?"], [observed]) == [observed]  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"prompt.template needs openai.api = completions"):
        MessageRenderer(template="{question}")
    with pytest.raises(UserError, match=r"openai.api completions"):
        renderer.inline_ids("x")


def test_endpoints_get_text_of_a_raw_template() -> None:
    renderer = MessageRenderer(style="raw", template="{examples}Q: {question}\nA:", few_shot=[("1 + 1?", "2")])
    prompt = Prompt("p", ({"role": "user", "content": "2 + 2?"},))
    assert renderer.prompt_ids(prompt) == ["Q: 1 + 1?\nA: 2\n\nQ: 2 + 2?\nA:"] == [renderer.prompt_text(prompt)]
    assert renderer.stop == ("\nQ:",)
    follow = renderer.next_turn_ids(prompt, [" 4"], [{"role": "user", "content": "3 + 3?"}])
    assert renderer.decode([" 4", *follow]) == " 4\n\nQ: 3 + 3?\nA:"
    assert renderer.inline_ids("<result>") == ["<result>"] and renderer.inline_ids("") == []
