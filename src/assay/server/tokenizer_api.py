"""The tokenizer over HTTP, with the endpoints and formats of vLLM: encode, decode, special tokens and template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from assay.server.protocol import ApiError, Fields, check_model, is_token_list, parse_messages
from assay.server.service import Service, json_response

OF_TEXTS = {"prompt", "add_special_tokens"}
OF_CHATS = {"messages", "add_generation_prompt"}
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenizer_routes(service: Service) -> list[Route]:
    renderer, parser = service.renderer, service.parser
    tokenizer = renderer.tokenizer

    def token_ids(tree: Mapping[str, Any]) -> tuple[list[int], bool]:
        """The token ids of a text or a chat, and whether to return their texts as well."""
        fields = Fields(tree)
        has_messages = tree.get("messages") is not None
        fields.check_known((OF_CHATS if has_messages else OF_TEXTS) | {"model", "return_token_strs"})
        check_model(fields, service.model)
        with_texts = fields.get("return_token_strs", bool, False)
        if has_messages:
            if not fields.get("add_generation_prompt", bool, True):
                raise ApiError(400, "'add_generation_prompt' must be true: remove it", "add_generation_prompt")
            return parser.chat_ids(parse_messages(tree["messages"])), with_texts
        text = fields.get("prompt", str)
        if text is None:
            raise ApiError(400, "give either 'prompt', a text, or 'messages'", "prompt")
        special = fields.get("add_special_tokens", bool, True)
        return renderer.text_ids(text) if special else tokenizer.encode(text), with_texts

    def given_ids(tree: Mapping[str, Any]) -> list[int]:
        fields = Fields(tree)
        fields.check_known({"model", "tokens"})
        check_model(fields, service.model)
        ids: Any = tree.get("tokens")
        limit = parser.info.vocab_size
        if ids != [] and not (is_token_list(ids) and min(ids) >= 0 and max(ids) < limit):
            raise ApiError(400, f"'tokens' must be a list of token ids below {limit}", "tokens")
        return ids

    async def tokenize(request: HttpRequest) -> Response:
        ids, with_texts = await service.parse(request, token_ids)
        texts = [service.texts(token) for token in ids] if with_texts else None
        return json_response(
            {"count": len(ids), "max_model_len": service.max_length, "tokens": ids, "token_strs": texts}
        )

    async def detokenize(request: HttpRequest) -> Response:
        ids = await service.parse(request, given_ids)
        return json_response({"prompt": tokenizer.decode(ids, skip_special=False)})

    async def tokenizer_info(request: HttpRequest) -> Response:
        special = {name: getattr(tokenizer.hf, name, None) for name in SPECIAL_TOKENS}
        template = {"chat_template": renderer.chat_template if parser.has_chat else None}
        sizes = {"model_max_length": service.max_length, "vocab_size": tokenizer.vocab_size}
        return json_response({"tokenizer_class": type(tokenizer.hf).__name__, **special, **template, **sizes})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
    ]
