"""Refusal of models that cannot be compared, by their configurations and tokenizers, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantforge.architectures.configuration import positions_in
from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError
from quantforge.evaluation.generated import Answering, Prompts
from quantforge.evaluation.windows import Windows, cut
from quantforge.formats.opening import open_model
from quantforge.runtime.text_side import text_side, tokenizer_of
from quantforge_files.roles import SETTINGS, TOKENIZER


def check_comparable(path: Path, reference: Path, text: str, windows: Windows) -> None:
    """Check that a model can be scored on the windows of its reference.

    Raises:
        InputError: it has fewer positions than a window has tokens, or its tokenizer makes other tokens of the text.
    """
    count, length = windows.ids.shape
    positions = positions_of(path)
    if positions < length:
        raise InputError(
            f"{path}: windows of {length} tokens, the model has {positions} positions",
            f"--length {positions}",
        )
    if path == reference or _tokenizer_files(path) == _tokenizer_files(reference):
        return
    if cut(tokenizer_of(path), text, count, length).sha256 != windows.sha256:
        raise InputError(
            f"{path}: its tokenizer makes other tokens of the text than that of {reference}",
            "compare a model with the one that it was made from",
        )


def answering_of(paths: Sequence[Path], prompts: Prompts | None) -> Answering | None:
    """Return the prompts in tokens of the first model; errors as `Answering.check`, for every model."""
    if prompts is None:
        return None
    reference = paths[0]
    found = Answering(prompts, text_side(reference, open_model(reference).config))
    for path in paths:
        found.check(positions_of(path))
    return found


def positions_of(path: Path) -> int:
    """Return how many tokens a model can see; a very large number where it does not say."""
    return positions_in(open_model(path).config)


def _tokenizer_files(path: Path) -> list[bytes]:
    if path.is_file():
        return []
    files = ((path / "tokenizer.json", TOKENIZER), (path / "tokenizer_config.json", SETTINGS))
    return [FILES.read(file, role, path) if file.is_file() else b"" for file, role in files]
