"""Limits of a server: what it accepts from a client, and how long it works for one."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.errors import UsageError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server.

    Attributes:
        waiting: most answers that wait beside those that are computed; more are refused.
        body_bytes: of a request.
        seconds: from a request to the end of its answers.
        stopping_seconds: for answers that are not finished when the server is asked to stop.

    Raises:
        UsageError: a value that makes no sense.
    """

    waiting: int = 64
    body_bytes: int = 4 * MIB
    seconds: float = 600.0
    stopping_seconds: float = 5.0

    def __post_init__(self) -> None:
        for name, least in (("waiting", 0), ("body_bytes", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} = {value!r}", f"a whole number from {least} on")
        for name in ("seconds", "stopping_seconds"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < 1e9:
                raise UsageError(f"{name} = {value!r}", "a number of seconds")
