"""A JSON document as a response: in ASCII, so that no text in it depends on an encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from quantforge.http_api.api_error import ApiError


class JsonResponse(Response):
    """A document."""

    def __init__(
        self,
        document: Mapping[str, Any],
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        data = json.dumps(document, allow_nan=False).encode()
        super().__init__(data, status, headers, "application/json")


def error_response(error: ApiError) -> JsonResponse:
    """Return an error document as a response."""
    return JsonResponse(error.document(), error.status, error.headers)
