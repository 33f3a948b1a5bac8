"""JSON of others, see `quantforge_files.strict_json`; what is wrong with it is an `InputError`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge_files import FileRole, roles


def parse_object(
    data: bytes, path: Path | str, role: FileRole = roles.CONFIG, *, loose: bool = False
) -> dict[str, Any]:
    """Parse one JSON object, the whole content of ``path``; errors as `Opener.parse_object`."""
    return FILES.parse_object(data, path, role, loose=loose)


def read_object(
    path: Path, role: FileRole, inside: Path | None, *, loose: bool = False
) -> dict[str, Any]:
    """Read a JSON file whose top level is an object; errors as `Opener.read` and `parse_object`."""
    return parse_object(FILES.read(path, role, inside), path, role, loose=loose)
