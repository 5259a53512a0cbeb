"""Access control of vLLM servers. vLLM's own API key protects /v1 only, not the endpoints that replace weights.

vLLM loads this module in its own environment (see `worker.stage`), so it imports only modules that are copied with it.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

from assay.engine.remote.server_side import KEY

MIDDLEWARE = "assay.integrations.vllm.access.KeyCheck"


class KeyCheck:
    """ASGI middleware: every request must have the key, also those for metrics and health."""

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._is_valid(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_valid(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)
