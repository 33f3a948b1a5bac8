"""Open a model from a directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from quantforge.files.disk import save_file
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.formats.declared_quantization import resolve_declaration
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import decode_if_low_precision
from quantforge.formats.sources.merged import merge_adapter

if TYPE_CHECKING:
    from quantforge.formats.gguf.parsing import GgufFile


def open_model(path: Path) -> Checkpoint:
    """Open a model directory, or a file that begins with GGUF's magic number, whatever its name.

    Raises:
        InputError: as `open_checkpoint`, `resolve_declaration` and `quantforge.formats.gguf.source.open_gguf`.
    """
    if path.is_file():
        from quantforge.formats.gguf.source import open_gguf

        return open_gguf(path)
    return resolve_declaration(open_checkpoint(path))


def open_plain_source(path: Path, adapter: Path | None = None) -> Checkpoint:
    """Open a source model for a run: decoded if it was released in low precision, with its adapter merged.

    Errors as `open_model` and `decode_if_low_precision`, and with an adapter as `open_adapter` and `merge_adapter`.
    """
    checkpoint = decode_if_low_precision(open_model(path))
    return checkpoint if adapter is None else merge_adapter(checkpoint, open_adapter(adapter))


def tokenizer_side_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return tokenizer files made from the keys of a GGUF file, by name; {} for a directory."""
    if checkpoint.path.is_dir():
        return {}
    from quantforge.formats.gguf.source import GgufCheckpoint
    from quantforge.formats.gguf.tokenizer_files import tokenizer_files

    opened = checkpoint.original
    assert isinstance(opened, GgufCheckpoint)
    return tokenizer_files(opened.file)


@contextmanager
def tokenizer_directory(path: Path) -> Iterator[tuple[Path, GgufFile | None]]:
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
    with TemporaryDirectory() as directory:
        for name, data in tokenizer_files(file).items():
            target = Path(directory) / name
            target.parent.mkdir(exist_ok=True)
            save_file(target, data)
        yield Path(directory), file
