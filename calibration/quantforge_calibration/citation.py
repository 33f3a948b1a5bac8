"""Cite calibration sources in published files by name and digest instead of local paths.

``../mine/talks.txt=3,builtin=1`` is cited as ``talks.txt=3,builtin=1`` together with the SHA-256 of every file, in the
format of ``sha256sum``: ``DIGEST  talks.txt``. The same text under another path, or on another machine, has the same
citation, so that published files are byte-identical. The digest of a directory is that of the list of its files that
are read; a dataset of the hub is cited by its name there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantforge_calibration.readers import check_is_text
from quantforge_calibration.source_error import FILES
from quantforge_calibration.sources import Source, parse_sources, source_files
from quantforge_files.roles import TABLE


@dataclass(frozen=True, slots=True)
class Citation:
    """A SOURCE without local paths.

    Attributes:
        source: the SOURCE with names in place of paths.
        digests: ``DIGEST  NAME`` for each part that is a local file or directory, in order.
    """

    source: str
    digests: tuple[str, ...]


def cite(text: str) -> Citation:
    """Cite a SOURCE, reading its files to compute their digests.

    Raises:
        SourceError: as `parse_sources`, or a file cannot be read.
    """
    sources = parse_sources(text)
    names = [_name(source) for source in sources]
    return Citation(
        _format_source(sources, names),
        tuple(
            f"{_digest(source)}  {name}"
            for source, name in zip(sources, names, strict=True)
            if source.path is not None
        ),
    )


def matches_citation(text: str, cited: str, digests: Sequence[str]) -> bool:
    """Return whether a SOURCE has the cited texts and weights, regardless of local file names.

    Raises:
        SourceError: as `cite`.
    """
    sources = parse_sources(text)
    own_digests = [_digest(source) for source in sources if source.path is not None]
    if own_digests != [digest.partition("  ")[0] for digest in digests]:
        return False
    return _format_source(sources, _cited_part_names(sources, digests)) == cited


def cited_names(text: str, digests: Sequence[str]) -> tuple[str, ...]:
    """Return the name that a citation gives to each part of a SOURCE; raises as `cite` does."""
    sources = parse_sources(text)
    return tuple(map(_format_part, sources, _cited_part_names(sources, digests)))


def _cited_part_names(sources: Sequence[Source], digests: Sequence[str]) -> list[str]:
    """Return the name of every part; names of files are taken from the digests of the citation."""
    names = iter([digest.partition("  ")[2] for digest in digests])
    return [
        source.name if source.path is None else next(names, _name(source)) for source in sources
    ]


def _format_source(sources: Sequence[Source], names: Sequence[str]) -> str:
    """Format parts with the given names and their weights as a SOURCE."""
    return ",".join(
        _format_part(source, name)
        + ("" if source.weight == 1 else f"={source.weight!r}".removesuffix(".0"))
        for source, name in zip(sources, names, strict=True)
    )


def _name(source: Source) -> str:
    """Return the name of a part without its directory."""
    return source.name if source.path is None else source.path.resolve().name


def _format_part(source: Source, name: str) -> str:
    """Format a part with the given name, its split and its column."""
    if source.path is None:
        return name
    fields = [source.split, source.column] if source.kind == "directory" else [source.column]
    return ":".join([name, *fields]).rstrip(":")


def _digest(source: Source) -> str:
    """Return the SHA-256 of the content of a part; "" if it is not a local file or directory."""
    if source.path is None:
        return ""
    if source.kind == "file":
        return _sha256(source.path)
    lines = (
        f"{_sha256(file)}  {file.relative_to(source.path)}\n"
        for file in source_files(source.path, source)
    )
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a text or parquet file."""
    check_is_text(path)
    with FILES.stream(path, TABLE, None) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
