"""Templates of task files, rendered in a sandbox that bounds what one of them takes.

The sandbox of jinja keeps a template from Python, not from making a text of a gigabyte or from looping for hours.
While one is compiled (constants are computed then) or rendered, the process may take `MOST_BYTES` of memory more, and
`MOST_SECONDS` of processor time. The system enforces both; outside of Linux or the main thread there is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BYTES = 256 << 20
MOST_SECONDS = 5.0
_STATUS = Path("/proc/self/statm")


class TooMuchError(Exception):
    """A template takes more than one may."""


class BoundedTemplate(Template):
    """A template that is rendered within limits."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render it.

        Raises:
            TooMuchError: a limit was reached.
        """
        with limited():
            return super().render(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that compiles and renders within limits; what is not defined is an error."""

    template_class = BoundedTemplate

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, keep_trailing_newline=True)

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        """Compile a template.

        Raises:
            TooMuchError: a limit was reached.
        """
        with limited():
            return super().from_string(*args, **kwargs)


@contextmanager
def limited() -> Iterator[None]:
    """Bound the memory and the time of what happens inside, on Linux and in the main thread.

    Raises:
        TooMuchError: a limit was reached.
    """
    if threading.current_thread() is not threading.main_thread() or not _STATUS.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(_STATUS.read_text().split()[0]) * resource.getpagesize()
    most = held + MOST_BYTES
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    earlier = signal.signal(signal.SIGVTALRM, _late)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        yield
    except MemoryError:
        raise TooMuchError(f"a template takes more than {MOST_BYTES >> 20} MiB") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, earlier)


def _late(_number: int, _frame: FrameType | None) -> None:
    raise TooMuchError(f"a template takes more than {MOST_SECONDS:.0f} seconds")
