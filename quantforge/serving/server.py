"""HTTP server that reports its address and stops gracefully on a signal.

After the first signal (SIGINT, SIGTERM, SIGHUP) new requests are refused, and running ones have some seconds to finish;
then the engine ends them, each with an error document. A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from quantforge.errors import InputError
from quantforge.serving.routes import ServedModel, application
from quantforge_files import system

BACKLOG = 512
STOPPING_SECONDS = 5.0  # for completions that have not ended when the server is asked to stop
UNREAD_SECONDS = 5.0  # after those, for clients that do not read


class ModelServer(uvicorn.Server):
    """uvicorn server that stops gracefully on a signal and reports when it listens."""

    def __init__(
        self, config: uvicorn.Config, model: ServedModel, ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._model, self._ready = model, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engine, start listening, and report it."""
        self._model.engine.start()
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop the server on a signal, without uvicorn's re-raising of the signal afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = [
            number
            for number in system.STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        previous_handlers = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (uvicorn's)
        """Stop gracefully; stop at once on the second signal."""
        if self.should_exit:
            self.force_exit = True
            self._model.engine.cancel_all()
        self.should_exit = self._model.stopping = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish for some seconds, then cancel them and stop the engine."""
        self._model.stopping = True
        engine = self._model.engine
        late = asyncio.get_running_loop().call_later(STOPPING_SECONDS, engine.cancel_all)
        await super().shutdown(sockets)
        late.cancel()
        await asyncio.to_thread(engine.stop)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 chooses a free port.

    Raises:
        InputError: the address is not available.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host} port {port}: {reason}", "choose another --port or --host"
        ) from error


def server_url(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return whether a log record is about anything else than a request cancelled at shutdown."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def create_server(model: ServedModel, ready: Callable[[], object] = lambda: None) -> ModelServer:
    """Create the server of a model; its ``run(sockets=[...])`` returns when the server has stopped."""
    config = uvicorn.Config(
        application(model),
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(STOPPING_SECONDS + UNREAD_SECONDS),
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    return ModelServer(config, model, ready)
