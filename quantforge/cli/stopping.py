"""Stopping: what a signal does that asks the command to stop, modules that are being loaded aside."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_COMMAND_LINE = "quantforge.cli.app"  # imports below it are not of the command


class Stopped(BaseException):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop(number: int, frame: FrameType | None) -> None:
    """Raise `Stopped`, once no module is being imported; handler of a signal."""
    if _imports(frame):  # which would swallow it, or abort: later then
        again = threading.Timer(0.05, _again, (number,))
        again.daemon = True
        again.start()
        return
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    raise Stopped(number)


def _again(number: int) -> None:
    """Send a signal to the main thread, which may wait for something: a signal of another thread would not wake it."""
    main = threading.main_thread().ident
    assert main is not None  # it is running
    signal.pthread_kill(main, number)


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported since the command line began."""
    while frame is not None and frame.f_globals.get("__name__") != _COMMAND_LINE:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
