"""The view of a source in low precision that runs read, and the words for its precision.

A format in which models are published (`FormatInfo.published`) is read by its own reader; some models are published in
layouts that nothing here writes, which `READERS` has. A result of this program is no such source: its manifest names
what it was made from, and that is the better one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from quantforge.architectures.draft_heads import is_draft, type_of
from quantforge.errors import RefusedError
from quantforge.files.previous_output import MANIFEST
from quantforge.files.reader import Checkpoint
from quantforge.formats import ModuleLayout, detect_format, kv_scales
from quantforge.formats.configuration import quantization_config
from quantforge.formats.decoded import Encoded, decoded_weights, decoding
from quantforge.formats.sources import modelopt, mxfp4_stacks
from quantforge.grids import GRIDS, PerGroup, PerTensor, Row, Tile
from quantforge.plans import StoredTensor

# By ``quant_method``: finds in the headers what is encoded, and what is left out.
Reader = Callable[[Mapping[str, StoredTensor]], tuple[list[Encoded], list[str]]]
READERS: Mapping[str, Reader] = {"mxfp4": mxfp4_stacks.weights, "modelopt": modelopt.weights}


def plain_source(checkpoint: Checkpoint) -> Checkpoint:
    """Return a source as runs read it: decoded where it is published in low precision, else as it is.

    Raises:
        InputError: it cannot be decoded: a scale is missing or has another shape, or nothing reads its
            ``quant_method``.
    """
    reader = _reader(checkpoint)
    stated = isinstance(checkpoint.config.get("quantization_config"), Mapping)
    if reader is not None:
        return decoding(checkpoint, *reader(checkpoint.headers()))
    if not stated or checkpoint.path.is_file():
        return checkpoint
    if (checkpoint.path / MANIFEST).exists() or not detect_format(
        checkpoint.config
    ).INFO.used_for_releases:
        return checkpoint
    return quantized_source(checkpoint)


def quantized_source(checkpoint: Checkpoint) -> Checkpoint:
    """Return any quantized model as runs read a source: decoded, in the type of the model; errors as `plain_source`."""
    weights = [
        Encoded(name, shape, rows.layout.tensor_names, rows, _words(rows.layout))
        for name, (rows, shape) in decoded_weights(checkpoint).items()
    ]
    return decoding(
        checkpoint, weights, kv_scales.found(checkpoint.config, checkpoint.headers()).tensor_names
    )


def readable(checkpoint: Checkpoint) -> Checkpoint:
    """Return a model as its format reads it; decoded where it is in a layout that no format has.

    Raises:
        RefusedError: they are draft heads, which compute nothing without their model.
    """
    if is_draft(checkpoint.config):
        raise RefusedError(
            f"{checkpoint.path}: {type_of(checkpoint.config)} heads, no model: they guess for one",
            f"quantforge generate MODEL --draft {shlex.quote(str(checkpoint.path))}",
        )
    return checkpoint if _reader(checkpoint) is None else plain_source(checkpoint)


def _reader(checkpoint: Checkpoint) -> Reader | None:
    """Return what reads a model that is in a layout which no format has."""
    return READERS.get(str(quantization_config(checkpoint.config).get("quant_method")))


def _words(layout: ModuleLayout) -> str:
    """Return how the weights of one linear are held, for people: ``fp8 (128x128 tiles)``."""
    scheme = layout.scheme.weight
    name, granularity = scheme.grid.partition("_")[0], scheme.granularity
    if not GRIDS[scheme.grid].free:
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
