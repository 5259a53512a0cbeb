"""Calls of tools in the text of the policy, for environments of the package verifiers."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")
from assay.integrations.verifiers_policy import tool_calls, tool_result


def test_calls_in_a_reply_have_the_form_of_the_openai_api() -> None:
    text = 'a<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>b<tool_call>{oops</tool_call>'
    first, second = tool_calls(text)
    assert first == {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert second["id"] == "call_1" and second["function"] == {"name": "", "arguments": "{oops"}


@pytest.mark.parametrize(("name", "arguments"), [("no", "{}"), ("", "{oops"), ("add", "[1]"), ("add", "[" * 10**5)])
def test_invalid_calls_are_errors_that_the_policy_reads(name: str, arguments: str) -> None:
    call = {"name": name, "arguments": arguments}
    assert asyncio.run(tool_result(call, {"add": ("calculator", "add")}, {})).startswith("error: ")
