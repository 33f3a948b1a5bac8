"""The body of a request: bytes that are read up to a limit, and one JSON object without a second meaning."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from quantforge.http_api.api_error import ApiError

DISCARDED = 16  # times the largest body: so much is read and thrown away, for a client that listens only afterwards


async def read_body(parts: AsyncIterator[bytes], stated: str | None, most: int) -> bytes:
    """Return a body.

    Args:
        parts: of it, as they come.
        stated: its length by its header.
        most: bytes that are accepted.

    Raises:
        ApiError: it is longer.
    """
    length = int(stated[:20]) if stated is not None and stated.isdecimal() else 0
    found, read = bytearray(), 0
    if length <= most * DISCARDED:
        async for part in parts:
            read += len(part)
            if max(read, length) <= most:
                found += part
            elif read > most * DISCARDED:
                break
    if max(read, length) > most:
        raise _too_large(most)
    return bytes(found)


def check_type(headers: dict[str, str]) -> None:
    """Refuse a body that is not said to be JSON, which a page of a browser may send to anybody unasked.

    Raises:
        ApiError: naming the header.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            f"the body is {kind[:60] or 'of no stated type'!r}; send the header 'Content-Type: application/json'",
            415,
            code="unsupported_media_type",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(
            "the body is compressed; send it as it is", 415, code="unsupported_media_type"
        )


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises:
        ApiError: it is none, or names a field twice.
    """
    try:
        found = json.loads(body.decode(), parse_constant=_no_number, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            why = "it is not UTF-8"
        elif isinstance(error, RecursionError):
            why = "it is nested too deeply"
        elif "digits" in str(error):
            why = "a number has more than 4300 digits"
        else:
            why = str(error)
        raise ApiError(f"the body is no JSON: {why}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise ApiError("the body is no JSON object: send {...}", code="invalid_json")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the field {twice!a:.60} is there twice")
    return found


def _too_large(most: int) -> ApiError:
    return ApiError(
        f"the body has more than {most} bytes; send less, or start the server with a larger --max-body",
        413,
        code="body_too_large",
    )
