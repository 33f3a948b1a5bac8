"""The embedding of one token, which llama.cpp wants beside some vision towers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quantforge.architectures import architecture_of
from quantforge.architectures.projector import TokenRow
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.checkpoint.foreign_json import read_object
from quantforge.errors import InputError
from quantforge.formats.gguf.tokenizer_json import added_tokens
from quantforge_files.roles import TOKENIZER

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.checkpoint.reader import Checkpoint

_FILE = "tokenizer.json"


class PlacedRow(NamedTuple):
    """Row ``number`` of the matrix ``name`` of a checkpoint, float32 ``[size]`` under the name ``held`` in a file."""

    held: str
    name: str
    number: int
    size: int

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """Read the row; errors as `scan_finite`."""
        value = checkpoint.read_rows(self.name, self.number, self.number + 1)
        scan_finite(self.name, value)
        return value[0].float()


def placed(checkpoint: Checkpoint, row: TokenRow) -> PlacedRow:
    """Find the embedding of a token in a checkpoint.

    Raises:
        InputError: the tokenizer has no such token, or the embedding is not there, has no such row, or another width.
    """
    found = architecture_of(checkpoint.config)
    assert found is not None  # it has declared the row
    own = f"{found.embedding}.weight"
    for stored, canonical in found.prefixes:
        name = stored + own.removeprefix(canonical)
        if own.startswith(canonical) and name in checkpoint.entries:
            break
    else:
        raise InputError("the checkpoint has no token embedding", "complete files", tensor=own)
    number = _number(checkpoint, row.token)
    shape = checkpoint.entries[name].shape
    if len(shape) != 2 or not number < shape[0] or shape[1] != row.size:
        raise InputError(
            f"{name}: {list(shape)}, and row {number} of {row.size} columns is that of {row.token}",
            "the tokenizer and the weights of one model",
            tensor=name,
        )
    return PlacedRow(row.held, name, number, row.size)


def _number(checkpoint: Checkpoint, token: str) -> int:
    path = checkpoint.path / _FILE
    if path.is_file():
        for item in added_tokens(read_object(path, TOKENIZER, checkpoint.path)):
            if item["content"] == token:
                number: int = item["id"]
                return number
    raise InputError(
        f"{_FILE}: no added token {token}, whose embedding llama.cpp puts behind each row of a picture",
        "the tokenizer of the model, or leave --mmproj out",
    )
