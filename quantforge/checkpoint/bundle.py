"""Names and digests that a signature bundle (of the OpenSSF's model signing) lists.

`quantforge.results.signing` checks that they are true.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from quantforge.checkpoint.foreign_json import parse_object
from quantforge.errors import InputError
from quantforge_files.roles import SIGNATURE


def listed(place: Path, data: bytes) -> dict[str, str]:
    """Return the digests by the names of the files that a bundle, the content of ``place``, speaks of.

    Raises:
        InputError: it is no bundle.
    """
    try:
        envelope = parse_object(data, place, SIGNATURE).get("dsseEnvelope")
        inner = base64.b64decode(dict(envelope or {})["payload"])
        payload = parse_object(inner, place, SIGNATURE)
        found = {item["name"]: item["digest"] for item in payload["predicate"]["resources"]}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InputError(f"{place}: is no signature bundle", file=str(place)) from error
    return found
