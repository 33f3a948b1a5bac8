"""The engine on a thread of its own: commands go in by a queue, what happens comes back into the loop of asyncio.

The thread alone touches the engine. Between two steps it works off commands; without requests it sleeps. What a step
tells is handed to the loop in one call, and there to whoever asked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from quantforge.errors import QuantForgeError
from quantforge.http_api.api_error import ApiError, refusal
from quantforge.runtime.serving.counters import Counters
from quantforge.runtime.serving.engine import ServingEngine
from quantforge.runtime.serving.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    Happening,
)

T = TypeVar("T")
Told = asyncio.Queue[Happening]
LOG = logging.getLogger(__name__)
BROKEN = "the engine has failed; the log of the server has the reason"


class EngineThread:
    """An engine that is fed from asyncio. All methods but `stop` are called in its loop.

    Args:
        engine: it.
        most: requests at a time, running and waiting ones.
        begin: is called on the thread before anything else.

    Attributes:
        broken: nothing can be computed any more.
    """

    def __init__(
        self, engine: ServingEngine, most: int, begin: Callable[[], object] = lambda: None
    ) -> None:
        self._engine = engine
        self._most = most
        self._begin = begin
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._told: dict[str, Told] = {}
        self._inside: set[str] = set()  # the thread's own account of what the engine has
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.broken = False

    def start(self) -> None:
        """Begin, for the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End all requests, and the thread."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(seconds)

    @property
    def open(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._told)

    async def submit(self, requests: Sequence[GenerationRequest]) -> Told:
        """Queue requests, all or none; return the queue in which what happens to them comes.

        Raises:
            ApiError: the engine refuses one of them, or there is no room.
        """
        if self.broken:
            raise ApiError(BROKEN, 503, code="engine_failed")
        if len(requests) > self._most:
            raise ApiError(
                f"{len(requests)} answers are asked for, this server takes {self._most} at a time: send them in parts",
                code="too_many_answers",
            )
        if len(self._told) + len(requests) > self._most:
            raise full()
        told: Told = asyncio.Queue()
        self._told |= dict.fromkeys((one.id for one in requests), told)
        try:
            await self._call(lambda: self._submit(requests))
        except QuantForgeError as error:
            for one in requests:
                self._told.pop(one.id, None)
            raise refusal(error) from error
        except asyncio.CancelledError:
            self.cancel(one.id for one in requests)
            raise
        return told

    def cancel(self, ids: Iterable[str]) -> None:
        """End requests, those that have not ended; their pages are free before the next step."""
        left = [one for one in ids if one in self._told]
        if left:
            self._commands.put(lambda: self._cancel(left))

    def cancel_all(self) -> None:
        """End every request."""
        self.cancel([*self._told])

    async def counters(self) -> Counters:
        """Return the counts of the engine between two steps."""
        return await self._call(lambda: self._engine.counters)

    async def _call(self, work: Callable[[], T]) -> T:
        assert self._loop is not None
        loop = self._loop
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if not future.cancelled():
                if error is None:
                    future.set_result(value)  # type: ignore[arg-type]
                else:
                    future.set_exception(error)

        def command() -> None:
            value: T | None = None
            error: Exception | None = None
            try:
                value = work()
            except Exception as caught:  # goes to whoever asked
                error = caught
            loop.call_soon_threadsafe(settle, value, error)

        self._commands.put(command)
        return await future

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        for number, one in enumerate(requests):
            try:
                self._engine.submit(one)
            except QuantForgeError:
                self._cancel([earlier.id for earlier in requests[:number]])
                raise
            self._inside.add(one.id)

    def _cancel(self, ids: Iterable[str]) -> None:
        for one in ids:
            self._engine.cancel(one)

    def _run(self) -> None:
        self._begin()
        while self._obey():
            self._step()
        self._cancel(self._inside)
        self._step()

    def _obey(self) -> bool:
        """Work off commands, waiting for one where there is nothing else to do; return whether to go on."""
        while self.broken or self._engine.idle or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            try:
                command()
            except Exception:
                LOG.exception("a command to the engine failed")
        return True

    def _step(self) -> None:
        try:
            happened = self._engine.step()
        except Exception as error:  # of one step: all of its requests end, others may follow
            LOG.exception("a step of the engine failed")
            happened = self._end_all(f"{BROKEN} ({type(error).__name__})")
        self._inside -= {one.id for one in happened if isinstance(one, Finished)}
        if happened and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tell, happened)

    def _end_all(self, error: str) -> list[Happening]:
        ids = [*self._inside]
        try:
            self._cancel(ids)
            self._engine.step()
        except Exception:  # what it holds is not known any more
            LOG.exception("the engine cannot go on")
            self.broken = True
        return [Finished(one, FinishReason.ERROR, (), error) for one in ids]

    def _tell(self, happened: Iterable[Happening]) -> None:
        for one in happened:
            told = self._told.get(one.id)
            if told is not None:
                told.put_nowait(one)
                if isinstance(one, Finished):
                    del self._told[one.id]


def full() -> ApiError:
    """Return the refusal of a request for which there is no room."""
    return ApiError(
        "too many requests are waiting; send this one again later",
        429,
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )
