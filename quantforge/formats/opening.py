"""One door to every kind of model: a directory, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from quantforge.checkpoint.reader import Checkpoint, open_checkpoint


def open_model(path: Path) -> Checkpoint:
    """Open a model directory, or a file that begins like GGUF, whatever it is called.

    Raises:
        InputError: as `open_checkpoint` and `quantforge.formats.gguf.source.open_gguf`.
    """
    if path.is_file():
        from quantforge.formats.gguf.source import open_gguf

        return open_gguf(path)
    return open_checkpoint(path)


def side_data(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return files of a tokenizer that lie in no file of their own: those of a GGUF file."""
    if checkpoint.path.is_dir():
        return {}
    from quantforge.formats.gguf.source import GgufCheckpoint
    from quantforge.formats.gguf.tokenizer_files import tokenizer_files

    opened = checkpoint.opened
    assert isinstance(opened, GgufCheckpoint)
    return tokenizer_files(opened.file)
