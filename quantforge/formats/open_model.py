"""One door to every kind of model: a directory, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from quantforge.files.disk import save
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.formats.declared_quantization import settle_declared
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import plain_source
from quantforge.formats.sources.merged import merged

if TYPE_CHECKING:
    from quantforge.formats.gguf.parsing import GgufFile


def open_model(path: Path) -> Checkpoint:
    """Open a model directory, or a file that begins like GGUF, whatever it is called.

    Raises:
        InputError: as `open_checkpoint`, `settle_declared` and `quantforge.formats.gguf.source.open_gguf`.
    """
    if path.is_file():
        from quantforge.formats.gguf.source import open_gguf

        return open_gguf(path)
    return settle_declared(open_checkpoint(path))


def open_plain_source(path: Path, adapter: Path | None = None) -> Checkpoint:
    """Open a model as a run reads it: decoded where it is published in low precision, with its adapter merged.

    Errors as `open_model` and `plain_source`, and with an adapter as `open_adapter` and `merged`.
    """
    checkpoint = plain_source(open_model(path))
    return checkpoint if adapter is None else merged(checkpoint, open_adapter(adapter))


def side_data(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the tokenizer files that a GGUF file stands for, by name; {} for a directory, which has its own."""
    if checkpoint.path.is_dir():
        return {}
    from quantforge.formats.gguf.source import GgufCheckpoint
    from quantforge.formats.gguf.tokenizer_files import tokenizer_files

    opened = checkpoint.opened
    assert isinstance(opened, GgufCheckpoint)
    return tokenizer_files(opened.file)


@contextmanager
def tokenizer_folder(path: Path) -> Iterator[tuple[Path, GgufFile | None]]:
    """Yield a directory with the files of a model's tokenizer.

    Yields:
        A model directory itself and None; for a GGUF file a temporary directory with the files that its keys stand for,
        and the parsed file.

    Raises:
        InputError: as `tokenizer_files`.
    """
    if not path.is_file():
        yield path, None
        return
    from quantforge.formats.gguf.parsing import read_gguf
    from quantforge.formats.gguf.tokenizer_files import tokenizer_files

    file = read_gguf(path)
    with TemporaryDirectory() as folder:
        for name, data in tokenizer_files(file).items():
            place = Path(folder) / name
            place.parent.mkdir(exist_ok=True)
            save(place, data)
        yield Path(folder), file
