"""Server-sent events: documents one by one, until the last or until the client is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from quantforge.http_api.api_error import ApiError
from quantforge.http_api.client_link import ClientLink

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"
LAST = 5.0  # seconds, for a client that does not read


class EventStream:
    """A response whose documents come over time.

    Args:
        documents: in order; an `ApiError` is told as the last one.
        link: the client.
        end: is called when it is over in any way, begun or not.
    """

    def __init__(
        self,
        documents: AsyncGenerator[Mapping[str, Any], None],
        link: ClientLink,
        end: Callable[[], object],
    ) -> None:
        self._documents, self._link, self._end = documents, link, end
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (ASGI)
        """Send it.

        Raises:
            ClientGoneError: the client has gone.
        """
        try:
            async with aclosing(self._documents) as documents:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                try:
                    async for document in documents:
                        await self._send(send, _event(document))
                    await self._send(send, DONE)
                    last = b""
                except ApiError as error:
                    last = _event(error.document())
            with suppress(TimeoutError):
                ending = {"type": "http.response.body", "body": last, "more_body": False}
                await asyncio.wait_for(send(ending), LAST)
        finally:
            self._end()
            self._link.close()

    async def _send(self, send: Send, data: bytes) -> None:
        """Send data to a client that may read slowly, or not at all."""
        await self._link.within(
            send({"type": "http.response.body", "body": data, "more_body": True})
        )


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, allow_nan=False).encode() + b"\n\n"
