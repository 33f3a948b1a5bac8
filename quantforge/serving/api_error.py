"""Errors of requests, as the error documents of OpenAI's API that its clients understand.

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
    """A request that was refused or has failed.

    Attributes:
        message: what is wrong, and what to send instead.
        status: HTTP status.
        param: field of the body that is wrong.
        code: short name of the error.
        headers: additional headers of the response.
    """

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the error document."""
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            error_type = "rate_limit_error"
        fields = {
            "message": self.message,
            "type": error_type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": fields}


@contextmanager
def source_error_as_refusal(param: str, code: str | None = None, hint: str = "") -> Iterator[None]:
    """Context manager that raises a `SourceError` as the `ApiError` of a field.

    Args:
        param: field of the body.
        code: short name of the error.
        hint: replaces the hint of the error; "" keeps it.
    """
    try:
        yield
    except SourceError as error:
        message = f"{error.message} ({hint or error.hint})"
        raise ApiError(message, param=param, code=code) from error
