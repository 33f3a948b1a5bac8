"""Refusals of a request, as the error documents of OpenAI's API that its clients read.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

The message says what is wrong and what to send instead; ``param`` names the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quantforge_calibration.source_error import SourceError


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is refused or has failed.

    Attributes:
        message: what is wrong, and what to send instead.
        status: HTTP status.
        param: the field of the body.
        code: short name of the rule.
        headers: further headers of the response.
    """

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the error document."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        found = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": found}


@contextmanager
def refusing(param: str, code: str | None = None, hint: str = "") -> Iterator[None]:
    """Turn a `SourceError` into the refusal of a field, with another hint where one is given."""
    try:
        yield
    except SourceError as error:
        message = f"{error.message} ({hint or error.hint})"
        raise ApiError(message, param=param, code=code) from error
