from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.rewards.verifiers import EXTRACTORS, extract
from assay.types import Status

FOUND = [
    ("boxed", r"so \boxed{72}", "72"),
    ("boxed", r"\boxed{1} then \boxed{2}", "2"),
    ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ("boxed", r"\boxed{a {b {c} d} e} f}", "a {b {c} d} e"),
    ("boxed", r"\boxed {5}", "5"),
    ("boxed", r"\fbox{5}", "5"),
    ("boxed", r"\boxed{\boxed{5}}", "5"),
    ("boxed", r"\boxed 5", "5"),
    ("boxed", r"\boxed -1,234.5 eggs", "-1,234.5"),
    ("boxed", r"$\boxed{5}$ as \boxed asks", "5"),
    ("boxed", "\\boxed{\n5\n}", "5"),
    ("hash", "It is 5.\n#### 72", "72"),
    ("hash", "#### 1\nno, #### 2\nmore", "2"),
    ("hash", "####72", "72"),
    ("hash", "#### -1,200 dollars \nbye", "-1,200 dollars"),
    ("answer-tag", "<answer>5</answer>", "5"),
    ("answer-tag", "<answer>1</answer> <answer> (1+2) * 3 </answer> bye", "(1+2) * 3"),
    ("answer-tag", "<answer><answer>5</answer></answer>", "5"),
    ("last-number", "12 and then 15.", "15"),
    ("last-number", "she pays $1,234.50!", "$1,234.50"),
    ("last-number", "it is -5", "-5"),
    ("last-number", "it is \u22125 here", "\u22125"),
    ("last-number", "9-5", "5"),
    ("last-number", "(9)-5", "5"),
    ("last-number", "about 3/4 of it", "3/4"),
    ("last-number", r"\frac{3}{4} of it", r"\frac{3}{4}"),
    ("last-number", "50 % of it", "50 %"),
    ("last-number", "1,2,3", "3"),
    ("last-number", ".5 cups", ".5"),
    ("last-number", "1.5e3 cups", "1.5e3"),
]


@pytest.mark.parametrize(("form", "text", "answer"), FOUND)
def test_last_answer_is_extracted(form: str, text: str, answer: str) -> None:
    found = extract(text, form)
    assert (found.status, found.text, found.form) == (Status.OK, answer, form)


NOT_FOUND = [
    ("boxed", "72", Status.NO_ANSWER),
    ("boxed", "", Status.NO_ANSWER),
    ("boxed", r"put it in \boxed form", Status.NO_ANSWER),
    ("boxed", r"\boxedfoo{5}", Status.NO_ANSWER),
    ("boxed", r"\boxed{72", Status.UNPARSABLE),
    ("boxed", r"\boxed{5} and \boxed{\frac{1}{2}", Status.UNPARSABLE),
    ("boxed", r"\boxed{5\}", Status.UNPARSABLE),
    ("boxed", r"\boxed{}", Status.UNPARSABLE),
    ("boxed", r"\boxed{" + "5" * 10_000 + "}", Status.UNPARSABLE),
    ("hash", "## 72", Status.NO_ANSWER),
    ("hash", "#### 5 ####", Status.UNPARSABLE),
    ("hash", "####\n72", Status.UNPARSABLE),
    ("answer-tag", "72</answer>", Status.NO_ANSWER),
    ("answer-tag", "<answer>5</answer> <answer>6", Status.UNPARSABLE),
    ("answer-tag", "<answer> </answer>", Status.UNPARSABLE),
    ("last-number", "none at all", Status.NO_ANSWER),
    ("last-number", "9" * 10_000, Status.UNPARSABLE),
]


@pytest.mark.parametrize(("form", "text", "status"), NOT_FOUND)
def test_missing_answer_has_a_reason(form: str, text: str, status: Status) -> None:
    found = extract(text, form)
    assert found.status is status
    assert found.detail


@pytest.mark.parametrize(
    ("form", "text", "answer", "source"),
    [
        ("boxed", "#### 5 and 6", "5 and 6", "hash"),
        ("boxed", "<answer>7</answer> 8", "7", "answer-tag"),
        ("boxed", "so it is 72.", "72", "last-number"),
        ("boxed", r"so \boxed{72", "72", "last-number"),
        ("hash", r"\boxed{5} or 6", "5", "boxed"),
        ("hash", r"\boxed{5} #### 6", "6", "hash"),
    ],
)
def test_lenient_extraction_accepts_other_forms(form: str, text: str, answer: str, source: str) -> None:
    found = extract(text, form, strict=False)
    assert (found.status, found.text, found.form) == (Status.OK, answer, source)
    assert extract(text, form).found == (source == form)


def test_lenient_extraction_without_answer_keeps_the_first_reason() -> None:
    assert extract(r"\boxed{x", "boxed", strict=False).status is Status.UNPARSABLE
    assert extract("nothing", "boxed", strict=False).status is Status.NO_ANSWER
    assert extract("just 5", "answer-tag", strict=False, any_number=False).status is Status.NO_ANSWER


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="\\boxed{}fr#<answer>/ 0123456789,.$%-\ud800\n", max_size=60), st.sampled_from(list(EXTRACTORS))
)
def test_any_text_gives_an_answer_or_a_reason(text: str, form: str) -> None:
    found = extract(text, form)
    if found.found:
        assert found.text and found.text in text
    else:
        assert found.status in (Status.NO_ANSWER, Status.UNPARSABLE) and found.detail


@given(st.text(alphabet="ab1{}\\ ", max_size=30).filter(lambda s: s.strip()))
@settings(max_examples=150, deadline=None)
def test_boxed_agrees_with_counting_braces(inside: str) -> None:
    """Against a reference that walks character by character."""
    text = "x \\boxed{" + inside + "}"
    depth, position, expected = 1, 0, None
    body = inside + "}"
    while position < len(body):
        if body[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(body[position], 0)
        if depth == 0:
            expected = body[:position].strip()
            break
        position += 1
    found = extract(text, "boxed")
    assert found.found == bool(expected)
    if expected:
        assert found.text == expected
