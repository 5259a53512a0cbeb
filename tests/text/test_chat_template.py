# ruff: noqa: E501 (templates on one line each)
"""Malicious and broken chat templates end, in one line; good ones are rendered as by transformers."""

from __future__ import annotations

import tracemalloc

import pytest

from assay.text import Tokenizer, char_tokenizer, chat_template
from assay.types import Message, UserError

MESSAGES = [Message(role="system", content=" be kind "), Message(role="user", content="2+2?")]

GOOD = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m['content'] | trim | upper }}\n{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% macro say(m, deep) %}{{ m.content ~ '!' * 3 ~ deep }}{% endmacro %}{{ say(messages[0], 2 ** 3) }}",
    "{% for m in messages recursive %}{{ m.content if m is mapping else m }}{% if m is mapping %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v.replace('be', 'BE').split(' ') | join(',') }}{% endfor %}",
    "{{ messages | map(attribute='role') | list | tojson }}{{ '**%s**-%03d 1234567' % ('a', 7) }}{{ '{:>5}'.format('x') }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% generation %}{{ bos_token }}{% endgeneration %}{{ tools }}{{ documents is defined }}{{ add_generation_prompt }}",
    "{% for x in undefined_name %}x{% else %}none{% endfor %}{{ 'a' in 'abc' }}{{ messages[::-1][0].content }}",
    "{{ dict(a=1).a }}{{ range(3) | list }}{{ [1, 2] + [3] }}{% set x %}block{% endset %}{{ x | length }}",
]


def test_prompts_do_not_depend_on_the_day() -> None:
    tokenizer = char_tokenizer()
    tokenizer.hf.chat_template = "Today Date: {{ strftime_now('%d %b %Y') }}"
    assert tokenizer.hf.get_chat_template() and (
        chat_template.ChatTemplate(tokenizer.hf.chat_template).render(MESSAGES, {}) == "Today Date: 26 Jul 2024"
    )


BAD = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "wide recursive loop": "{% for a in range(9999) recursive %}{% if loop.depth < 9 %}{{ loop(range(9999)) }}{% endif %}{% endfor %}",
    "macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two calls in each macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "text that doubles": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "text that doubles by +": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "list that doubles": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(999) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "repeated text": "{{ 'a' * 999999999999 }}",
    "power": "{{ 9 ** 99999 }}",
    "filter with a large width": "{{ 'a' | center(999999999999) }}",
    "method with a large width": "{{ 'a'.ljust(999999999999) }}",
    "format with a large width": "{{ '{:999999999999}'.format(1) }}",
    "percent with a large width": "{{ '%999999999999d' % 1 }}",
    "percent with a given width": "{{ '%*d' % (999999999, 1) }}",
    "replace that squares": "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(9) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "replace filter that squares": "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(9) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
    "sums in a loop": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "lazy sums in a loop": "{% for a in range(99999) %}{{ range(99999) | map('abs') | sum }}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=99999999) }}",
    "long words of lorem ipsum": "{{ lipsum(n=9999, max=999999) }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "division by zero": "{{ 1 // 0 }}",
    "wrong type": "{{ messages.x.y.z }}{{ 'a' + 1 }}",
    "not a template": "{% for %}",
    "python internals": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "other files": "{% include '/etc/passwd' %}",
}


def with_template(template: str) -> Tokenizer:
    hf = char_tokenizer().hf
    hf.chat_template = template
    return Tokenizer(hf)


@pytest.mark.parametrize("template", GOOD)
def test_templates_are_rendered_as_by_transformers(template: str) -> None:
    tokenizer = with_template(template)
    for open_reply in (False, True):
        expected = tokenizer.hf.apply_chat_template(MESSAGES, add_generation_prompt=open_reply, tokenize=False)
        for _ in range(2):  # the budget is for each rendering
            assert tokenizer.chat_text(MESSAGES, open_reply=open_reply) == expected


@pytest.mark.parametrize("name", BAD)
def test_malicious_and_broken_templates_give_one_line_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "nested loops":  # quicker; the limits are otherwise the same
        monkeypatch.setattr(chat_template, "MAX_WORK", 20_000)
    with pytest.raises(UserError, match="chat template") as caught:
        with_template(BAD[name]).chat_text(MESSAGES)
    assert len(str(caught.value)) < 1_000


LONG, SHORT = "('a' * 100000)", "('a' * 1000)"
EXPANDING = [
    f"{{{{ {LONG}.join(['a'] * 1000) }}}}",
    f"{{{{ (['a'] * 1000) | join({LONG}) }}}}",
    f"{{{{ range(1000) | map('string') | join({LONG}) }}}}",
    f"{{{{ ([{LONG}] * 1000) | join }}}}",
    "{{ ('\\t' * 1000).expandtabs(100000) }}",
    "{{ ('a\\n' * 1000) | indent(100000) }}",
    "{{ ('a\\n' * 1000) | indent(width=100000) }}",
    f"{{{{ ('a ' * 1000) | wordwrap(1, wrapstring={LONG}) }}}}",
    f"{{{{ ('{{0}}' * 1000).format({LONG}) }}}}",
    f"{{{{ ('%(a)s' * 1000) % {{'a': {LONG}}} }}}}",
    f"{{{{ ('%(a)s' * 1000) | format(a={LONG}) }}}}",
]


@pytest.mark.parametrize("template", EXPANDING)
def test_too_long_texts_are_rejected_before_allocation(template: str) -> None:
    tokenizer = with_template(template)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="characters"):
            tokenizer.chat_text(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_filters_and_methods_of_ordinary_size_are_allowed() -> None:
    template = (
        "{{ (m.content * 1000) | wordwrap(79) | length }} {{ (m.content * 1000) | indent(4) | length }} "
        "{{ ', '.join(messages | map(attribute='role')) }} {{ '%s and {}' % m.role }} {{ 'a\\tb'.expandtabs(4) }}"
    )
    text = with_template("{% set m = messages[0] %}" + template).chat_text([Message(role="user", content="word " * 40)])
    assert text.endswith("user user and {} a   b")


def test_the_work_of_a_long_conversation_is_within_the_budget() -> None:
    messages = [Message(role="user", content="word " * 2_000)] * 1_000
    template = "{% for m in messages %}{{ m.content | trim | replace('x', 'y') }}{% endfor %}"
    long = "word " * 400
    assert with_template(template).chat_text([{**m, "content": long} for m in messages]).count("word") == 400_000
