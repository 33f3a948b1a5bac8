"""Run the serving engine on a thread of its own: commands arrive through a queue, events go to the asyncio event loop.

Only this thread uses the engine. It runs commands between two steps, and sleeps while there are no requests. The events
of a step are passed to the loop in one call, which puts each into the queue of the HTTP request that it belongs to.
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

EventQueue = asyncio.Queue[EngineEvent]
LOG = logging.getLogger(__name__)
FAILED_MESSAGE = "the engine has failed; the log of the server has the reason"


class EngineThread:
    """Engine for coroutines; all methods except `stop` must be called in the event loop.

    Args:
        engine: the engine.
        max_requests: maximum number of running and waiting requests.
        prepare: called on the thread before anything else.

    Attributes:
        has_failed: whether the engine can no longer be used.
    """

    def __init__(
        self, engine: ServingEngine, max_requests: int, prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._engine, self._max_requests, self._prepare = engine, max_requests, prepare
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._events: dict[str, EventQueue] = {}  # of requests that have not ended; the loop's
        self._engine_ids: set[str] = set()  # requests that the engine has; the thread's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.has_failed = False

    def start(self) -> None:
        """Start the thread and connect it to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End all requests and the thread."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(seconds)

    @property
    def open_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._events)

    def submit(self, requests: Sequence[GenerationRequest]) -> EventQueue:
        """Submit requests and return the queue of their events.

        A caller that stops reading before the requests have ended must `cancel` them.

        Raises:
            ApiError: too many requests are waiting, or the engine has failed.
        """
        if self.has_failed:
            raise ApiError(FAILED_MESSAGE, 503, code="engine_failed")
        if len(requests) > self._max_requests:
            raise ApiError(
                f"{len(requests)} completions are asked for, and this server takes {self._max_requests} at a time: "
                "send several requests",
                code="too_many_answers",
            )
        if self.open_requests + len(requests) > self._max_requests:
            raise too_many_requests()
        events: EventQueue = asyncio.Queue()
        self._events |= dict.fromkeys((request.id for request in requests), events)
        self._commands.put(lambda: self._submit(requests))
        return events

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel the given requests that have not ended; their cache pages are freed before the next step."""
        running_ids = [request_id for request_id in ids if request_id in self._events]
        if running_ids:
            self._commands.put(lambda: self._cancel(running_ids))

    def cancel_all(self) -> None:
        """Cancel all requests."""
        self.cancel([*self._events])

    async def counters(self) -> EngineCounters:
        """Return the counters of the engine, read between two steps."""
        future: Future[EngineCounters] = Future()
        self._commands.put(lambda: future.set_result(self._engine.counters))
        return await asyncio.shield(asyncio.wrap_future(future))

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit requests to the engine; runs on the engine thread."""
        for request in requests:
            self._engine.submit(request)
            self._engine_ids.add(request.id)

    def _cancel(self, ids: Iterable[str]) -> None:
        """Cancel requests in the engine; runs on the engine thread."""
        for request_id in ids:
            self._engine.cancel(request_id)

    def _run(self) -> None:
        """Run commands and engine steps until the thread is stopped."""
        self._prepare()
        while self._run_commands():
            self._step()
        self._cancel(self._engine_ids)
        self._step()

    def _run_commands(self) -> bool:
        """Run queued commands, waiting for one if there is nothing to compute; return False when told to stop."""
        while self.has_failed or self._engine.idle or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            try:
                command()
            except Exception:  # a command that fails must not end the thread
                LOG.exception("a command to the engine failed")
        return True

    def _step(self) -> None:
        """Run one engine step and pass its events to the event loop."""
        try:
            events = self._engine.step()
        except Exception as error:  # ends all requests of this step; the thread serves later ones
            LOG.exception("a step of the engine failed")
            events = self._end_all(f"{FAILED_MESSAGE} ({type(error).__name__})")
        self._engine_ids -= {event.id for event in events if isinstance(event, Finished)}
        if events and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._dispatch, events)

    def _end_all(self, error: str) -> list[EngineEvent]:
        """End all requests after an error; mark the engine as failed if it cannot be stepped any more."""
        ids = [*self._engine_ids]
        try:
            self._cancel(ids)
            self._engine.step()
        except Exception:  # what it holds is not known any more
            LOG.exception("the engine cannot go on")
            self.has_failed = True
        return [Finished(request_id, FinishReason.ERROR, (), error) for request_id in ids]

    def _dispatch(self, events: Iterable[EngineEvent]) -> None:
        """Put each event into the queue of its request."""
        for event in events:
            is_finished = isinstance(event, Finished)
            queue = self._events.pop(event.id, None) if is_finished else self._events.get(event.id)
            if queue is not None:
                queue.put_nowait(event)


def too_many_requests() -> ApiError:
    """Create the error for a request that exceeds the limit of waiting requests."""
    return ApiError(
        "too many requests are waiting; send this one again later",
        429,
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )
