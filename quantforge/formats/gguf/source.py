"""A GGUF file as if it were a model directory: a checkpoint whose tensors have transformers' names, order and shapes.

What is held in blocks appears as its bytes, and the configuration says of which type (``gguf_types``), so that the
format finds its layers as any format does. Types that can only be decoded (the lattices IQ1 to IQ3, NVFP4) appear as
float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from quantforge.architectures.llama_cpp import Family
from quantforge.checkpoint import safetensors
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.safetensors import TensorEntry
from quantforge.checkpoint.seal import Seal
from quantforge.errors import InputError
from quantforge.formats.gguf import KEY, QUANTIZATION, halves
from quantforge.formats.gguf.config_keys import config_of
from quantforge.formats.gguf.container import TYPES
from quantforge.formats.gguf.families import original_names, read_families
from quantforge.formats.gguf.parsing import GgufFile, TableEntry, read_gguf
from quantforge.formats.gguf.projector_file import check_no_tower
from quantforge.formats.gguf.rope import FREQUENCIES, LONG, SHORT
from quantforge.grids import SUPERBLOCKS
from quantforge.plans import DTYPE_BITS, HeldTensor

if TYPE_CHECKING:
    import torch

_COMPUTED = frozenset({FREQUENCIES, LONG, SHORT})
_MOST_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor of the model in the file, and what was done to it."""

    entry: TensorEntry
    type: str
    heads: int = 0
    plus_one: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class GgufCheckpoint(Checkpoint):
    """Checkpoint of a GGUF file; ``path`` is the file."""

    places: Mapping[str, _Place]
    file: GgufFile

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor as transformers has it (blocks: their bytes, rows in transformers' order)."""
        place = self.places[name]
        return _restored(place, safetensors.read_tensor(place.entry))

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor; of one whose rows were reordered, by way of all of them."""
        place = self.places[name]
        if place.heads or place.transposed:
            return self.read(name)[first:last]
        return _restored(place, safetensors.read_rows(place.entry, first, last))

    def held(self) -> tuple[HeldTensor, ...]:
        """Return the tensors with their types in the file: a block type stands for its elements."""
        return tuple(_held(entry, self.places[name]) for name, entry in self.entries.items())

    def sealed(self, seals: Mapping[Path, Seal]) -> Self:
        """Return the checkpoint with seals on its files (as `Checkpoint`)."""
        places = {
            name: replace(place, entry=replace(place.entry, seal=seals[place.entry.file]))
            for name, place in self.places.items()
        }
        return replace(self, places=places)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Open a file, or numbered files by any of them.

    Raises:
        InputError: damaged, or with tensors that are not of its architecture.
        NotReadError: as `config_of`, and of the file of a tower.
    """
    file = read_gguf(path)
    check_no_tower(file)
    config = config_of(file)
    family = read_families()[config["model_type"]]
    blocks = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    if blocks > len(file.tensors):
        raise InputError(
            f"{path}: {blocks} blocks, but {len(file.tensors)} tensors",
            "the file is damaged",
            file=str(path),
        )
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    known = original_names(config["model_type"], blocks, min(experts, _MOST_EXPERTS))
    places: dict[str, _Place] = {}
    for entry in file.tensors.values():
        if entry.name in _COMPUTED:
            continue
        if entry.name not in known:
            raise InputError(
                f"{path}: tensor {entry.name!r} is none of {family.arch}",
                "is this a model file?",
                file=str(path),
                tensor=entry.name,
            )
        places |= _places(entry, known[entry.name], family, config)
    entries = {name: _shown(name, place) for name, place in sorted(places.items())}
    types = {
        name: place.type.lower()
        for name, place in sorted(places.items())
        if place.type.lower() in SUPERBLOCKS
    }
    if types:
        config = {**config, "quantization_config": dict(QUANTIZATION), f"{KEY}_types": types}
    return GgufCheckpoint(
        path=path,
        config=config,
        entries=entries,
        shards=file.files,
        side_files=(),
        card=None,
        places=places,
        file=file,
    )


def headers_alone(file: GgufFile) -> tuple[HeldTensor, ...]:
    """Return the tensors of a file of any architecture by their names there; types as `GgufCheckpoint.held`."""
    return tuple(
        HeldTensor(
            entry.name,
            entry.type if TYPES[entry.type].columns == 1 else entry.type.lower(),
            entry.shape,
            entry.end - entry.start,
        )
        for entry in file.tensors.values()
    )


def _places(
    entry: TableEntry, originals: tuple[str, ...], family: Family, config: Mapping[str, object]
) -> dict[str, _Place]:
    """Return one place, or of a stack one for each matrix of an expert."""
    raw = entry.raw()
    turned = family.arch == "gpt2" and entry.name.startswith("blk.") and len(entry.shape) == 2
    place = _Place(
        raw,
        entry.type,
        _heads(entry.name, family, config),
        family.norm_plus_one and entry.name.endswith("norm.weight"),
        turned,
    )
    if len(originals) == 1:
        return {originals[0]: place}
    experts, rows, _ = entry.shape if len(entry.shape) == 3 else (len(originals) + 1, 0, 0)
    parts, left = divmod(len(originals), experts)  # matrices that are one, rows behind rows
    if left or rows % parts:
        raise InputError(
            f"tensor {entry.name!r}: {list(entry.shape)}, {len(originals)} matrices of experts",
            tensor=entry.name,
        )
    size, shape = raw.nbytes // len(originals), (rows // parts, *raw.shape[2:])
    if raw.dtype == "U8":
        shape = (rows // parts, raw.shape[1])
    return {
        name: replace(
            place,
            entry=replace(
                raw,
                shape=shape,
                start=raw.start + number * size,
                end=raw.start + (number + 1) * size,
            ),
        )
        for number, name in enumerate(originals)
    }


def _heads(name: str, family: Family, config: Mapping[str, object]) -> int:
    module = name.rpartition(".")[0]
    key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(
        module.rpartition(".")[2]
    )
    heads = config[key] if key and family.interleaved else 0
    return heads if isinstance(heads, int) else 0


def _shown(name: str, place: _Place) -> TensorEntry:
    """Return the entry that others see: with the model's name, type and shape."""
    entry = replace(place.entry, name=name)
    if place.type.lower() not in SUPERBLOCKS and TYPES[place.type].columns > 1:
        entry = replace(entry, dtype="F32", shape=_elements(place))
    if place.transposed and entry.dtype != "U8":
        entry = replace(entry, shape=entry.shape[::-1])
    if place.heads and entry.shape[0] % (2 * place.heads):
        raise InputError(
            f"{name}: {entry.shape[0]} rows for {place.heads} heads",
            "the file is damaged",
            tensor=name,
        )
    assert entry.dtype in DTYPE_BITS
    assert math.prod(entry.shape) > 0
    return entry


def _elements(place: _Place) -> tuple[int, int]:
    """Return rows and columns of what is held in blocks."""
    rows, row_bytes = place.entry.shape
    layout = TYPES[place.type]
    return rows, row_bytes // layout.block_bytes * layout.columns


def _held(entry: TensorEntry, place: _Place) -> HeldTensor:
    if TYPES[place.type].columns == 1:
        return HeldTensor(entry.name, place.type, entry.shape, place.entry.nbytes, place.entry.name)
    kind, shape = place.type.lower(), _elements(place)
    return HeldTensor(entry.name, kind, shape, place.entry.nbytes, place.entry.name)


def _restored(place: _Place, value: torch.Tensor) -> torch.Tensor:
    blocks = TYPES[place.type].columns > 1
    if blocks and place.type.lower() not in SUPERBLOCKS:
        from quantforge.packers.ggml.blocks import decode_blocks

        value = decode_blocks(value, place.type)
    value = halves(value, place.heads)
    if place.plus_one:
        value = value - 1
    return value.T.contiguous() if place.transposed and value.dtype.is_floating_point else value
