"""Decode models that were released in low precision, so that runs read plain weights.

A format in which models are published (`FormatInfo.published`) is read by its own reader; some models are published in
layouts that nothing here writes (`READER_BY_METHOD`). A result of this program is not decoded: its manifest names the
model that it was made from, which is the better source.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from quantforge.architectures.draft_heads import is_draft, model_type_or_draft
from quantforge.errors import RefusedError
from quantforge.files.previous_output import MANIFEST
from quantforge.files.reader import Checkpoint
from quantforge.formats import ModuleLayout, detect_format, kv_scales
from quantforge.formats.configuration import quantization_config
from quantforge.formats.decoded import EncodedWeight, decode_weights, quantized_weight_readers
from quantforge.formats.sources import modelopt, mxfp4_stacks
from quantforge.grids import GRIDS, PerGroup, PerTensor, Row, Tile
from quantforge.plans import StoredTensor

# By ``quant_method``: finds in the headers what is encoded, and what is left out.
Reader = Callable[[Mapping[str, StoredTensor]], tuple[list[EncodedWeight], list[str]]]
READER_BY_METHOD: Mapping[str, Reader] = {
    "mxfp4": mxfp4_stacks.find_encoded_weights,
    "modelopt": modelopt.find_encoded_weights,
}


def decode_if_low_precision(checkpoint: Checkpoint) -> Checkpoint:
    """Return a source as runs read it: a decoded view if it was released in low precision, else unchanged.

    Raises:
        InputError: it cannot be decoded: a scale is missing or has another shape, or nothing reads its
            ``quant_method``.
    """
    reader = _reader(checkpoint)
    is_declared = isinstance(checkpoint.config.get("quantization_config"), Mapping)
    if reader is not None:
        return decode_weights(checkpoint, *reader(checkpoint.stored_tensors()))
    if not is_declared or checkpoint.path.is_file():
        return checkpoint
    if (checkpoint.path / MANIFEST).exists() or not detect_format(
        checkpoint.config
    ).INFO.used_for_releases:
        return checkpoint
    return decode_quantized_source(checkpoint)


def decode_quantized_source(checkpoint: Checkpoint) -> Checkpoint:
    """Return a decoded view of any quantized model, in the model's dtype; errors as `decode_if_low_precision`."""
    weights = [
        EncodedWeight(name, shape, rows.layout.tensor_names, rows, _precision_text(rows.layout))
        for name, (rows, shape) in quantized_weight_readers(checkpoint).items()
    ]
    return decode_weights(
        checkpoint,
        weights,
        kv_scales.find_scales(checkpoint.config, checkpoint.stored_tensors()).tensor_names,
    )


def decode_if_unsupported(checkpoint: Checkpoint) -> Checkpoint:
    """Return a model as its format reads it; a decoded view if no format has its layout.

    Raises:
        RefusedError: they are draft heads, which compute nothing without their model.
    """
    if is_draft(checkpoint.config):
        raise RefusedError(
            f"{model_type_or_draft(checkpoint.config)} heads, no model: they guess for one",
            f"quantforge generate MODEL --draft {shlex.quote(str(checkpoint.path))}",
            subject=str(checkpoint.path),
        )
    return checkpoint if _reader(checkpoint) is None else decode_if_low_precision(checkpoint)


def _reader(checkpoint: Checkpoint) -> Reader | None:
    """Return the reader for a layout that no format reads, None for other layouts."""
    return READER_BY_METHOD.get(str(quantization_config(checkpoint.config).get("quant_method")))


def _precision_text(layout: ModuleLayout) -> str:
    """Describe how the weights of a linear are stored, e.g. ``fp8 (128x128 tiles)``."""
    scheme = layout.scheme.weight
    name, granularity = scheme.grid.partition("_")[0], scheme.granularity
    if not GRIDS[scheme.grid].has_parameters:
        return name
    match granularity:
        case Tile(rows, columns):
            return f"{name} ({rows}x{columns} tiles)"
        case PerGroup(size):
            return f"{name} (groups of {size}, {scheme.scale} scales)"
        case Row():
            return f"{name} (a scale for each row)"
        case PerTensor():
            return f"{name} (one scale)"
