"""The server: it listens, says where, and stops cleanly when it is asked to.

After the first signal (SIGINT, SIGTERM, SIGHUP) requests are refused, and those under way have some seconds to end;
then the engine ends them, each with an error document. A second signal does not wait.
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
    """A server that ends by itself after a signal, and reports when it listens."""

    def __init__(
        self, config: uvicorn.Config, model: ServedModel, ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._model, self._ready = model, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._model.engine.start()
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal, which uvicorn does not raise again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = [one for one in system.STOP_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (uvicorn's)
        """Stop, at the second signal at once."""
        if self.should_exit:
            self.force_exit = True
            self._model.engine.cancel_all()
        self.should_exit = self._model.stopping = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, for a while, also where no signal has asked for it."""
        self._model.stopping = True
        engine = self._model.engine
        late = asyncio.get_running_loop().call_later(STOPPING_SECONDS, engine.cancel_all)
        await super().shutdown(sockets)
        late.cancel()
        await asyncio.to_thread(engine.stop)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        InputError: the address cannot be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host} port {port}: {why}", "choose another --port or --host"
        ) from error


def url_of(listening: socket.socket) -> str:
    """Return the address of a server."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _worth_logging(record: logging.LogRecord) -> bool:
    """Return whether a record is about more than a request that was cancelled at the end."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def server_of(model: ServedModel, ready: Callable[[], object] = lambda: None) -> ModelServer:
    """Return a server of a model; its ``run(sockets=[...])`` returns when it was stopped."""
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
    logging.getLogger("uvicorn.error").addFilter(_worth_logging)
    return ModelServer(config, model, ready)
