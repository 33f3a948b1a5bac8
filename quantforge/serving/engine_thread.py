"""The engine on a thread of its own: commands go in through a queue, and events come back to the event loop.

Only this thread touches the engine. Between two steps it carries out commands; without requests it sleeps. The events
of a step are handed to the loop in one call, which puts each into the queue of the request over HTTP that it is for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue

from quantforge.runtime.batching.engine import EngineCounters, ServingEngine
from quantforge.runtime.batching.generation_requests import (
    EngineEvent,
    Finished,
    FinishReason,
    GenerationRequest,
)
from quantforge.serving.api_error import ApiError

Events = asyncio.Queue[EngineEvent]
LOG = logging.getLogger(__name__)
BROKEN = "the engine has failed; the log of the server has the reason"


class EngineThread:
    """An engine for coroutines. All methods but `stop` are called in the event loop.

    Args:
        engine: the engine.
        most: requests at a time, running and waiting ones.
        prepare: is called on the thread before anything else.

    Attributes:
        broken: nothing can be computed any more.
    """

    def __init__(
        self, engine: ServingEngine, most: int, prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._engine, self._most, self._prepare = engine, most, prepare
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._events: dict[str, Events] = {}  # of requests that have not ended; the loop's
        self._inside: set[str] = set()  # requests that the engine has; the thread's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.broken = False

    def start(self) -> None:
        """Start the thread, for the running loop."""
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
        return len(self._events)

    def submit(self, requests: Sequence[GenerationRequest]) -> Events:
        """Queue requests that the engine has room for, and return the queue of their events.

        Who ends before they do has to `cancel` them.

        Raises:
            ApiError: too many requests are waiting, or the engine has failed.
        """
        if self.broken:
            raise ApiError(BROKEN, 503, code="engine_failed")
        if len(requests) > self._most:
            raise ApiError(
                f"{len(requests)} completions are asked for, and this server takes {self._most} at a time: "
                "send several requests",
                code="too_many_answers",
            )
        if self.open + len(requests) > self._most:
            raise full()
        events: Events = asyncio.Queue()
        self._events |= dict.fromkeys((one.id for one in requests), events)
        self._commands.put(lambda: self._submit(requests))
        return events

    def cancel(self, ids: Iterable[str]) -> None:
        """End those of these requests that have not ended; their pages are free before the next step."""
        left = [one for one in ids if one in self._events]
        if left:
            self._commands.put(lambda: self._cancel(left))

    def cancel_all(self) -> None:
        """End every request."""
        self.cancel([*self._events])

    async def counters(self) -> EngineCounters:
        """Return the counts of the engine between two steps."""
        future: Future[EngineCounters] = Future()
        self._commands.put(lambda: future.set_result(self._engine.counters))
        return await asyncio.shield(asyncio.wrap_future(future))

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        for one in requests:
            self._engine.submit(one)
            self._inside.add(one.id)

    def _cancel(self, ids: Iterable[str]) -> None:
        for one in ids:
            self._engine.cancel(one)

    def _run(self) -> None:
        self._prepare()
        while self._obey():
            self._step()
        self._cancel(self._inside)
        self._step()

    def _obey(self) -> bool:
        """Carry out commands, waiting for one where there is nothing to compute; return False at the end."""
        while self.broken or self._engine.idle or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            try:
                command()
            except Exception:  # a command that fails must not end the thread
                LOG.exception("a command to the engine failed")
        return True

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:  # ends all requests of this step; the thread serves later ones
            LOG.exception("a step of the engine failed")
            events = self._end_all(f"{BROKEN} ({type(error).__name__})")
        self._inside -= {one.id for one in events if isinstance(one, Finished)}
        if events and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._hand_out, events)

    def _end_all(self, error: str) -> list[EngineEvent]:
        ids = [*self._inside]
        try:
            self._cancel(ids)
            self._engine.step()
        except Exception:  # what it holds is not known any more
            LOG.exception("the engine cannot go on")
            self.broken = True
        return [Finished(one, FinishReason.ERROR, (), error) for one in ids]

    def _hand_out(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            ended = isinstance(event, Finished)
            queue = self._events.pop(event.id, None) if ended else self._events.get(event.id)
            if queue is not None:
                queue.put_nowait(event)


def full() -> ApiError:
    """Return the refusal of a request for which there is no room."""
    return ApiError(
        "too many requests are waiting; send this one again later",
        429,
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )
