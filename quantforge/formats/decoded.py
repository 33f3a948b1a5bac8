"""View of a quantized checkpoint as unquantized: weights are decoded when read, a strip of rows at a time.

Two kinds of models are read so: models that are published in low precision (`formats.sources`), and models that were
quantized from a better source. What that first quantization has lost stays lost, so that a run that begins with one of
the latter records an event. Some of the former are in layouts that no format writes: their readers return
`EncodedWeight` objects.

Rows of a weight are rows of its codes and, where rows have scales of their own, of its scales; a scale of a tile
belongs to some rows. `FormatInfo.row_sliced_suffixes` lists the stored tensors that are sliced with them. What is
decoded at a time is a strip, so that a matrix of any size takes the memory of its float32 values and little more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures import architecture_of
from quantforge.errors import InputError
from quantforge.files.computed_tensors import ComputedCheckpoint, ComputeRows, with_computed_tensors
from quantforge.files.reader import Checkpoint
from quantforge.formats import Format, ModuleLayout, detect_format, kv_scales
from quantforge.formats.configuration import strip_quantization_keys
from quantforge.formats.match_quantized import match_headers
from quantforge.grids import Tile

if TYPE_CHECKING:
    import torch

STRIP_WEIGHTS = 1 << 19  # weights that are decoded at a time
WORD_BITS = 32  # rows whose zero points fill whole words, whatever their bits
PRECISION = "precision"  # the subject of what is said of it, see `Checkpoint.source_notes`


@dataclass(frozen=True, slots=True)
class QuantizedWeightReader:
    """Reader that decodes rows of one quantized weight to float32.

    Attributes:
        file_format: the format of the files.
        layout: of the weight ``[out_features, in_features]``.
        transposed: the family stores it as ``[in_features, out_features]``; a square one looks the same.
    """

    file_format: Format
    layout: ModuleLayout
    transposed: bool = False

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> torch.Tensor:
        """Return rows ``first:last`` of the weight as the family stores it."""
        if not self.transposed:
            return self._rows(checkpoint, first, last)
        return self._rows(checkpoint, 0, self.layout.shape[0]).T[first:last].contiguous()

    def _rows(self, checkpoint: Checkpoint, first: int, last: int) -> torch.Tensor:
        """Return rows of the weight ``[out_features, in_features]``."""
        import torch

        rows, columns = self.layout.shape
        if not self.file_format.INFO.row_sliced_suffixes or self.layout.transposed:
            return self._strip(checkpoint, 0, rows)[first:last]
        unit = 1 if self.layout.scheme.weight.symmetric else WORD_BITS
        step = max(1, STRIP_WEIGHTS // (columns * unit)) * unit
        if unit == 1 and 0 < last - first <= step:
            return self._strip(checkpoint, first, last)
        weight = torch.empty((last - first, columns), dtype=torch.float32)
        for start in range(first // unit * unit, last, step):
            stop = min(start + step, -(-last // unit) * unit, rows)
            strip = self._strip(checkpoint, start, stop)
            low, high = max(start, first), min(stop, last)
            weight[low - first : high - first] = strip[low - start : high - start]
        return weight

    def _strip(self, checkpoint: Checkpoint, first: int, last: int) -> torch.Tensor:
        """Decode rows ``first:last``; if scales belong to tiles, each row gets its own copy."""
        layout = self.layout
        rows = self.layout.shape[0]
        endings = self.file_format.INFO.row_sliced_suffixes
        if (first, last) == (0, rows):
            tensors = {name: checkpoint.read(name) for name in layout.tensor_names}
            return self.file_format.unpack(layout, tensors).decode()
        scheme, tensors = layout.scheme.weight, {}
        for name in layout.tensor_names:
            shape = checkpoint.entries[name].shape
            if not name.endswith(endings) or shape in {(), (1,)}:
                tensors[name] = checkpoint.read(name)
            elif shape[0] == rows:
                tensors[name] = checkpoint.read_rows(name, first, last)
            elif isinstance(scheme.granularity, Tile):
                tensors[name] = _repeat_tile_rows(
                    checkpoint, name, scheme.granularity.rows, first, last
                )
            else:  # a stream of zero points along the rows
                start, stop = (-(-row * scheme.bits // WORD_BITS) for row in (first, last))
                tensors[name] = checkpoint.read_rows(name, start, stop)
        if isinstance(scheme.granularity, Tile):
            scheme = replace(scheme, granularity=Tile(1, scheme.granularity.columns))
        layer = replace(layout.scheme, weight=scheme)
        strip = replace(
            layout, scheme=layer, shape=(last - first, layout.shape[1]), total_rows=rows
        )
        try:
            return self.file_format.unpack(strip, tensors).decode()
        except InputError:
            self._strip(checkpoint, 0, rows)  # names the place in the whole
            raise


def _repeat_tile_rows(
    checkpoint: Checkpoint, name: str, high: int, first: int, last: int
) -> torch.Tensor:
    """Return the parameters of rows ``first:last``, repeated from those of tiles that are ``high`` rows tall."""
    import torch

    start = first // high
    scale_rows = checkpoint.read_rows(name, start, -(-last // high))
    return scale_rows[torch.arange(first, last) // high - start]


def decode_checkpoint(checkpoint: Checkpoint) -> ComputedCheckpoint:
    """Return a view of a quantized checkpoint with float32 weights; errors as `quantized_weight_readers`."""
    weights = quantized_weight_readers(checkpoint)
    headers = checkpoint.stored_tensors()
    used_names = {
        tensor_name for rows, _ in weights.values() for tensor_name in rows.layout.tensor_names
    }
    decoded_entries = {
        name: replace(
            checkpoint.entries[rows.layout.tensor_names[0]], name=name, dtype="F32", shape=shape
        )
        for name, (rows, shape) in weights.items()
    }
    return with_computed_tensors(
        checkpoint,
        {name: rows for name, (rows, _) in weights.items()},
        config=unquantized_config(checkpoint),
        new_entries=decoded_entries,
        removed=used_names | kv_scales.find_scales(checkpoint.config, headers).tensor_names,
    )


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """One weight of a model that was released in low precision.

    Attributes:
        name: of the weight that the codes stand for.
        shape: of that weight.
        tensor_names: of the tensors that hold it.
        reader: decodes rows of it, see `quantforge.files.computed_tensors`.
        precision: how it is held, for people: ``mxfp4``.
    """

    name: str
    shape: tuple[int, ...]
    tensor_names: tuple[str, ...]
    reader: ComputeRows
    precision: str


def decode_weights(
    checkpoint: Checkpoint, weights: Iterable[EncodedWeight], left_out: Iterable[str] = ()
) -> ComputedCheckpoint:
    """Return a view of a source model in which encoded weights appear unquantized, in the model's dtype.

    Args:
        checkpoint: the source.
        weights: what is decoded.
        left_out: tensors that only matter beside the codes: ranges of inputs.

    Raises:
        InputError: a weight is stored plainly as well.
    """
    weights = list(weights)
    used_names = {name for weight in weights for name in weight.tensor_names}
    for weight in weights:
        if weight.name in checkpoint.entries and weight.name not in used_names:
            raise InputError(
                f"{weight.name}: stored as it is, and as {' and '.join(weight.tensor_names)}",
                "every tensor has to be there once: fetch the checkpoint again",
                tensor=weight.name,
            )
    weight_counts: Counter[str] = Counter()
    decoded_entries, dtype = {}, checkpoint.dtype
    for weight in weights:
        weight_counts[weight.precision] += sum(
            checkpoint.entries[name].nbytes for name in weight.tensor_names
        )
        first = checkpoint.entries[weight.tensor_names[0]]
        decoded_entries[weight.name] = replace(
            first, name=weight.name, dtype=dtype, shape=weight.shape
        )
    return with_computed_tensors(
        checkpoint,
        {weight.name: weight.reader for weight in weights},
        config=unquantized_config(checkpoint),
        new_entries=decoded_entries,
        removed=used_names.union(left_out),
        source_notes={
            PRECISION: ", ".join(precision for precision, _ in weight_counts.most_common())
        },
    )


def quantized_weight_readers(
    checkpoint: Checkpoint,
) -> dict[str, tuple[QuantizedWeightReader, tuple[int, int]]]:
    """Return readers and shapes of the quantized weights by name; errors as ``find_layouts``, `match_headers`."""
    file_format = detect_format(checkpoint.config)
    headers = checkpoint.stored_tensors()
    architecture = architecture_of(checkpoint.config)
    transposed_linears = architecture.linears if architecture and architecture.transposed else ()
    readers, layouts = {}, file_format.find_layouts(checkpoint.config, headers)
    match_headers(checkpoint, {layout.module: layout for layout in layouts}, headers)
    for layout in layouts:
        flip = any(layout.module.endswith(f".{linear}") for linear in transposed_linears)
        shape = layout.shape[::-1] if flip else layout.shape
        readers[f"{layout.module}.weight"] = QuantizedWeightReader(file_format, layout, flip), shape
    return readers


def unquantized_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the configuration without the keys that describe the quantization."""
    config = strip_quantization_keys(checkpoint.config)
    return {key: value for key, value in config.items() if key != "gguf_types"}
