"""The client of a request: work goes on while it is there, and while there is time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

from quantforge.http_api.api_error import ApiError

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection."""


class ClientLink:
    """A client whose body was read.

    Args:
        receive: tells when it is gone.
        seconds: for all of the answer.
    """

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds
        self._gone = asyncio.ensure_future(_gone(receive))

    async def within(self, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
        """Return what work gives, which is ended with the client and the time.

        Raises:
            ClientGoneError: nobody waits for it any more.
            ApiError: it takes too long.
        """
        task = asyncio.ensure_future(work)
        left = self._end - asyncio.get_running_loop().time()
        either: set[asyncio.Future[Any]] = {task, self._gone}
        try:
            done, _ = await asyncio.wait(
                either, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task in done:
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
        if self._gone in done:
            raise ClientGoneError
        raise ApiError(
            f"the answer was not there within {self._seconds:g} s; ask for fewer tokens, or start the server with a "
            "larger --timeout",
            504,
            code="timeout",
        )

    def close(self) -> None:
        """Stop watching."""
        self._gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
