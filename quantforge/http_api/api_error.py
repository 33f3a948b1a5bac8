"""Refusals of a request over HTTP, as the error documents that clients of OpenAI's API read.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

The message says what is wrong, where, and what to send instead; ``param`` names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.errors import QuantForgeError

INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"
NOT_SUPPORTED = "not_supported"


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is not answered.

    Attributes:
        message: what is wrong, and what to send instead.
        status: of HTTP.
        param: the field.
        code: short name of the rule.
        headers: of the response.
    """

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Return the ``type`` of the document."""
        if self.status == 429:
            return BUSY
        return SERVER if self.status >= 500 else INVALID

    def document(self) -> dict[str, Any]:
        """Return the error document."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def refusal(error: QuantForgeError, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of ours as one of a request."""
    hint = f" ({error.hint})" if error.hint else ""
    return ApiError(f"{error.message}{hint}", 400, param, code)
