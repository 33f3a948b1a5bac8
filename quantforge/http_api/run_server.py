"""Running the server: it listens, tells where, and stops cleanly when it is asked to.

The first signal (SIGINT, SIGTERM, SIGHUP) closes the door: requests under way have some seconds to end, then the engine
ends them, each with an error document. A second signal does not wait.
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
from quantforge.http_api.application import application
from quantforge.http_api.served_model import ServedModel
from quantforge_files import system

BACKLOG = 512
UNFINISHED = 5.0  # seconds beside those that answers have: for clients that do not read


class ModelServer(uvicorn.Server):
    """A server that ends by itself after a signal, and says when it listens."""

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
        """Stop at a signal, which then counts as answered."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [one for one in system.stopping() if signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (uvicorn's)
        """Take a signal."""
        if self.should_exit:
            self.force_exit = True
            self._model.engine.cancel_all()
        self.should_exit = self._model.stopping = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, for a while."""
        self._model.stopping = True  # also where no signal has asked for it
        engine = self._model.engine
        late = asyncio.get_running_loop().call_later(
            self._model.limits.stopping_seconds, engine.cancel_all
        )
        await super().shutdown(sockets)
        late.cancel()
        await asyncio.to_thread(engine.stop)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        InputError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
        except OSError:
            found.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host} port {port}: {why}", "choose another --port or --host"
        ) from error
    return found


def url_of(listening: socket.socket) -> str:
    """Return the address of a server."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _not_ended(record: logging.LogRecord) -> bool:
    """Return whether a record is of more than a request that was ended."""
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
        timeout_graceful_shutdown=int(model.limits.stopping_seconds + UNFINISHED),
    )
    logging.getLogger("uvicorn.error").addFilter(_not_ended)
    return ModelServer(config, model, ready)
