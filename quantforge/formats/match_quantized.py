"""A quantized checkpoint, matched as if its weights were stored plainly.

The layouts that a format finds in the headers are replaced by the weights they stand for, so that the declarations of
an architecture account for every tensor of it, exactly as for the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import Architecture, architecture_of
from quantforge.architectures.match import ModelLayout, match_tensors, resolve_tied
from quantforge.errors import InputError, RefusedError
from quantforge.files.reader import Checkpoint
from quantforge.formats import ModuleLayout, kv_scales
from quantforge.formats.declared_quantization import check_declared
from quantforge.plans import StoredTensor


def match_quantized(
    checkpoint: Checkpoint,
    layouts: Mapping[str, ModuleLayout],
    headers: Mapping[str, StoredTensor],
    *,
    derive: bool = False,
) -> ModelLayout:
    """Match a checkpoint; errors as `quantforge.architectures.match.match_tensors`.

    ``derive``: of a family that is not declared, derive the declarations where that can be done.
    """
    entries = _plain(checkpoint, layouts, headers, architecture_of(checkpoint.config))
    model_layout = match_tensors(checkpoint.config, entries, checkpoint.declared)
    if derive and model_layout.architecture is None:
        model_layout = _derived(checkpoint.config, entries) or model_layout
    return drop_tied_copy(model_layout, checkpoint)


def match_headers(
    checkpoint: Checkpoint,
    layouts: Mapping[str, ModuleLayout],
    headers: Mapping[str, StoredTensor],
) -> ModelLayout:
    """Match a checkpoint by its headers alone; a tied head that is stored twice is not compared.

    Raises:
        InputError: as `match` and `check_declared`.
    """
    entries = _plain(checkpoint, layouts, headers, architecture_of(checkpoint.config))
    model_layout = match_tensors(checkpoint.config, entries, checkpoint.declared)
    check_declared(checkpoint.config, model_layout, layouts)
    return model_layout


def _plain(
    checkpoint: Checkpoint,
    layouts: Mapping[str, ModuleLayout],
    headers: Mapping[str, StoredTensor],
    architecture: Architecture | None,
) -> list[StoredTensor]:
    """Return the tensors that a checkpoint would hold if none were quantized."""
    turned = architecture.linears if architecture and architecture.transposed else ()
    packed = {name for layout in layouts.values() for name in layout.tensor_names}
    packed |= kv_scales.found(checkpoint.config, headers).tensor_names
    entries = [tensor for name, tensor in headers.items() if name not in packed]
    for module, layout in layouts.items():
        flip = any(module.endswith(f".{linear}") for linear in turned)
        shape = layout.shape[::-1] if flip else layout.shape
        entries.append(StoredTensor(f"{module}.weight", checkpoint.dtype, shape))
    return entries


def _derived(config: Mapping[str, Any], entries: list[StoredTensor]) -> ModelLayout | None:
    """Return a match by derived declarations; None where there are none."""
    from quantforge.model.derive.derive import derive_for

    try:
        return match_tensors(config, entries, derive_for(config, entries))
    except (InputError, RefusedError):
        return None


def drop_tied_copy(model_layout: ModelLayout, checkpoint: Checkpoint) -> ModelLayout:
    """Drop a tied head that is stored twice, after reading both; raise `InputError` if it is not the embedding."""

    def equal(first: str, second: str) -> bool:
        import torch

        if not {first, second} <= checkpoint.entries.keys():
            return False  # one of them is quantized
        rows, step = checkpoint.entries[first].shape[0], 4096
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            pair = [checkpoint.read_rows(name, start, stop) for name in (first, second)]
            if not torch.equal(*pair):
                return False
        return True

    return resolve_tied(model_layout, equal)
