"""Text that an evaluation scores: one document out of one source, and its name in reports."""

from __future__ import annotations

from pathlib import Path

from quantforge.errors import InputError, UsageError

BUILTIN = "builtin"
BYTES_OF_TOKEN = 32  # more than a token has: so much text is enough
OWN = "evaluation.txt"  # beside a reference: the text that is scored where none is named


def own_text(reference: Path) -> str:
    """Return the source of the text that lies beside a reference, or `BUILTIN` where there is none."""
    place = reference / OWN
    return str(place) if reference.is_dir() and place.is_file() else BUILTIN


def read_text(source: str, max_bytes: int, *, offline: bool) -> str:
    """Read the text of a source, as one document of about ``max_bytes`` at most.

    Raises:
        UsageError: more than one source, or one that the model would write itself.
        InputError: the source is missing or malformed.
    """
    from quantforge_calibration import SourceError, documents, parse_sources

    try:
        parsed = parse_sources(source)
        if len(parsed) != 1 or parsed[0].kind == "self":
            raise UsageError(
                f"--text {source}: one text is scored at a time", "give one file or source"
            )
        found = documents(parsed[0], max_bytes, corpus="evaluation", offline=offline)
        return "\n\n".join(found)
    except SourceError as error:
        raise InputError(f"--text: {error.message}", error.hint) from error


def check_text(reference: Path, source: str, length: int | None, *, offline: bool) -> None:
    """Refuse, before results are made that are to be scored, a text that has no window of ``length`` tokens.

    Raises:
        UsageError: as `read_text`.
        InputError: the text cannot be read, is too short, or the reference has no tokenizer.
    """
    from quantforge.evaluation.windows import LENGTH, cut
    from quantforge.runtime.text_side import tokenizer_of

    tokens = LENGTH if length is None else length
    text_name(source)
    text = read_text(source, BYTES_OF_TOKEN * tokens, offline=offline)
    cut(tokenizer_of(reference), text, 1, tokens)


def text_name(source: str) -> str:
    """Return the name of a text in reports: names and digests, no paths; errors as `read_text`."""
    return "builtin evaluation text" if source == BUILTIN else cited_name(source, "--text")


def cited_name(source: str, option: str) -> str:
    """Return the name of a source with its digest, for a report; ``option`` is named in errors.

    Raises:
        InputError: the source is missing.
    """
    from quantforge_calibration import SourceError
    from quantforge_calibration.citation import cite

    try:
        found = cite(source)
    except SourceError as error:
        raise InputError(f"{option}: {error.message}", error.hint) from error
    digests = [digest.partition("  ")[0] for digest in found.digests]
    return f"{found.source} (SHA-256 {', '.join(digests)})" if digests else found.source
