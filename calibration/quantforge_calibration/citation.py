"""Names and digests under which a SOURCE is cited in a file that is published: never where it lies.

``../mine/talks.txt=3,builtin=1`` is cited as ``talks.txt=3,builtin=1`` beside the SHA-256 of every file, in the form
of ``sha256sum``: ``DIGEST  talks.txt``. The same text under another path, or of another person, is cited alike, so that
the same bytes come out. Of a directory the digest is that of the list of its files that are read; a dataset of the hub
is cited by the name that it has there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantforge_calibration.readers import check_head
from quantforge_calibration.source_error import FILES
from quantforge_calibration.sources import Source, files_of, parse_sources
from quantforge_files.roles import TABLE


@dataclass(frozen=True, slots=True)
class Citation:
    """A SOURCE without its paths.

    Attributes:
        source: names for paths, otherwise as typed.
        digests: ``DIGEST  NAME`` of each part that is a file or a directory here, in order.
    """

    source: str
    digests: tuple[str, ...]


def cite(text: str) -> Citation:
    """Cite a SOURCE; reads its files.

    Raises:
        SourceError: as `parse_sources`, or a file cannot be read.
    """
    parts = parse_sources(text)
    names = [_name(part) for part in parts]
    return Citation(
        _text(parts, names),
        tuple(
            f"{_digest(part)}  {name}"
            for part, name in zip(parts, names, strict=True)
            if part.path is not None
        ),
    )


def same(text: str, cited: str, digests: Sequence[str]) -> bool:
    """Return whether a SOURCE has the cited texts and weights, whatever its files are called here.

    Raises:
        SourceError: as `cite`.
    """
    parts = parse_sources(text)
    found = [_digest(part) for part in parts if part.path is not None]
    if found != [digest.partition("  ")[0] for digest in digests]:
        return False
    return _text(parts, _stated(parts, digests)) == cited


def titles(text: str, digests: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a citation of a SOURCE gives to its parts; errors as `cite`."""
    parts = parse_sources(text)
    return tuple(map(_title, parts, _stated(parts, digests)))


def _stated(parts: Sequence[Source], digests: Sequence[str]) -> list[str]:
    """Return the name of every part; of files as the digests of a citation state them."""
    names = iter([digest.partition("  ")[2] for digest in digests])
    return [part.name if part.path is None else next(names, _name(part)) for part in parts]


def _text(parts: Sequence[Source], names: Sequence[str]) -> str:
    """Return the parts under these names, with their weights."""
    return ",".join(
        _title(part, name) + ("" if part.weight == 1 else f"={part.weight!r}".removesuffix(".0"))
        for part, name in zip(parts, names, strict=True)
    )


def _name(part: Source) -> str:
    return part.name if part.path is None else part.path.resolve().name


def _title(part: Source, name: str) -> str:
    if part.path is None:
        return name
    fields = [part.split, part.column] if part.kind == "directory" else [part.column]
    return ":".join([name, *fields]).rstrip(":")


def _digest(part: Source) -> str:
    if part.path is None:
        return ""
    if part.kind == "file":
        return _sha256(part.path)
    lines = (
        f"{_sha256(file)}  {file.relative_to(part.path)}\n" for file in files_of(part.path, part)
    )
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _sha256(path: Path) -> str:
    check_head(path)
    with FILES.stream(path, TABLE, None) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
