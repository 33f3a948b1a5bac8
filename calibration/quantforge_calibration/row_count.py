"""Rows that the builtin text gives a model, counted without drawing them, and so without torch."""

from __future__ import annotations

from pathlib import Path

from quantforge_calibration.sources import documents, parse_sources
from quantforge_calibration.tokenizer import load_tokenizer

BUILTIN = "builtin"
_WHOLE = 1 << 40  # bytes, more than the text has


def builtin_rows(model: Path, length: int) -> int:
    """Count the rows of ``length`` ids that `draw` makes at most of the builtin text.

    Args:
        model: the directory with ``tokenizer.json``.
        length: ids per row, at least 2.

    Raises:
        SourceError: as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(model)
    counts = [
        count
        for source in parse_sources(BUILTIN)
        for text in documents(source, _WHOLE)
        if (count := len(tokenizer.encode(text)))
    ]
    between = len(counts) - 1 if counts and tokenizer.eos_id is not None else 0
    return (sum(counts) + between) // (length - (tokenizer.bos_id is not None))
