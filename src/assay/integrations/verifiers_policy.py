"""The policy of a run as an agent of verifiers: its model client, and a harness with the chat loop.

Imported only when verifiers is used. `HARNESS` is the id of the harness in settings of verifiers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.clients import Client  # type: ignore[import-not-found,import-untyped,unused-ignore]
from verifiers.v1.configs.client import EvalClientConfig  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.configs.harness import HarnessConfig  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.dialects.chat import message_to_wire  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.harness import Harness  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.runtimes import ProgramResult  # type: ignore[import-not-found,unused-ignore]

__all__ = ["PolicyHarness"]  # verifiers looks here for the class of the harness
HARNESS = "assay_policy"
MODEL = "policy"
CLIENT = EvalClientConfig(base_url="http://policy.invalid", api_key_var="ASSAY_NO_KEY")  # stands for `PolicyClient`
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

sys.modules.setdefault(HARNESS, sys.modules[__name__])  # verifiers imports a harness by its id


class PolicyClient(Client):  # type: ignore[misc,unused-ignore]
    """Passes each model request of a rollout to the policy."""

    def __init__(self) -> None:
        self.ask: dict[str, Callable[[Mapping[str, Any]], Awaitable[str]]] = {}  # by the id of the trace

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str = "", **options: Any
    ) -> Any:
        text = await self.ask[session_id](body)
        calls = tool_calls(text) if body.get("tools") else []
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        raw = {"id": MODEL, "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class PolicyHarness(Harness[HarnessConfig]):  # type: ignore[misc,unused-ignore]
    """A conversation with the tools of the task, like the harness `null` of verifiers, but without a separate process.

    Model requests go to the interception server of verifiers, which applies limits and stop conditions.
    """

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, *connections = await connect_mcp({"mcpServers": servers}, stack)
            headers, no_limit = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout(total=None)
            session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=no_limit))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                async with session.post(f"{endpoint}/chat/completions", json=body) as reply:
                    if reply.status != 200:  # a limit or stop condition of the rollout, or an error
                        return ProgramResult(1, "", await reply.text())
                    message = (await reply.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    content = await tool_result(call["function"], *connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def tool_result(function: Mapping[str, str], dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    """What the tool returns; an unknown tool and invalid arguments are errors that the policy reads."""
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError) as error:
        return f"error: the call is not valid JSON ({error})"
    if name not in dispatch or not isinstance(arguments, dict):
        return f"error: unknown tool {name!r}" if name not in dispatch else "error: arguments must be a JSON object"
    return await call_mcp(servers, dispatch, name, arguments)


def tool_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a reply, as the OpenAI API represents them. Invalid JSON becomes a call with this text."""
    calls = []
    for number, match in enumerate(_CALL.finditer(text)):
        try:
            value = json.loads(match[1])
        except (ValueError, RecursionError):
            value = None
        named = isinstance(value, dict) and isinstance(value.get("name"), str)
        name = value["name"] if named else ""
        arguments = json.dumps(value.get("arguments") or {}) if named else match[1].strip()
        function = {"name": name, "arguments": arguments}
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
    return calls
