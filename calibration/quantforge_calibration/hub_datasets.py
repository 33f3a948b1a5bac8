"""Datasets of the hub, through the optional ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterator

from quantforge_calibration.readers import Record, RowReader
from quantforge_calibration.source_error import SourceError


def read_hub(source: str, split: str, rows: RowReader, *, offline: bool) -> Iterator[Record]:
    """Yield the records of one split of a dataset, named ``NAME:SPLIT[:COLUMN]``.

    Raises:
        SourceError: ``offline``, no library for it, or the dataset cannot be read.
    """
    name, _, rest = source.partition(":")
    download = f"hf download --repo-type dataset {name} --local-dir DIR; give DIR:{rest}"
    if offline:
        raise SourceError(
            f"'{name}' is no local path, and --offline forbids asking the hub", download
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SourceError(
            f"'{name}' is not a local path, and reading from the hub needs the datasets library",
            f"pip install 'quantforge[datasets]', or {download}",
        ) from error
    try:
        for number, row in enumerate(load_dataset(name, split=split, streaming=True), 1):
            yield from rows.record(source, f"{source}, row {number}", row)
    except SourceError:
        raise
    except Exception as error:  # datasets passes on whatever its network and file layers raise
        raise SourceError(
            f"the hub dataset '{source}' cannot be read: {error}", download
        ) from error
