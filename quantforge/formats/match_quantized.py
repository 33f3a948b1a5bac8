"""Match a quantized checkpoint to its architecture as if its weights were unquantized.

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
from quantforge.formats.declared_quantization import check_declared_modules
from quantforge.plans import StoredTensor


def match_quantized(
    checkpoint: Checkpoint,
    layouts: Mapping[str, ModuleLayout],
    headers: Mapping[str, StoredTensor],
    *,
    derive: bool = False,
) -> ModelLayout:
    """Match a checkpoint's tensors to its architecture.

    ``derive``: of a family that is not declared, derive the declarations where that can be done.
    """
    entries = _unquantized_headers(checkpoint, layouts, headers, architecture_of(checkpoint.config))
    model_layout = match_tensors(checkpoint.config, entries, checkpoint.derived_declarations)
    if derive and model_layout.architecture is None:
        model_layout = _match_derived(checkpoint.config, entries) or model_layout
    return drop_tied_copy(model_layout, checkpoint)


def match_headers(
    checkpoint: Checkpoint,
    layouts: Mapping[str, ModuleLayout],
    headers: Mapping[str, StoredTensor],
) -> ModelLayout:
    """Match a checkpoint by its headers alone, without comparing a tied head that is stored twice.

    Raises:
        InputError: as `match` and `check_declared_modules`.
    """
    entries = _unquantized_headers(checkpoint, layouts, headers, architecture_of(checkpoint.config))
    model_layout = match_tensors(checkpoint.config, entries, checkpoint.derived_declarations)
    check_declared_modules(checkpoint.config, model_layout, layouts)
    return model_layout


def _unquantized_headers(
    checkpoint: Checkpoint,
    layouts: Mapping[str, ModuleLayout],
    headers: Mapping[str, StoredTensor],
    architecture: Architecture | None,
) -> list[StoredTensor]:
    """Return the headers that a checkpoint would have if no tensor were quantized."""
    transposed_linears = architecture.linears if architecture and architecture.transposed else ()
    packed = {name for layout in layouts.values() for name in layout.tensor_names}
    packed |= kv_scales.find_scales(checkpoint.config, headers).tensor_names
    entries = [tensor for name, tensor in headers.items() if name not in packed]
    for module, layout in layouts.items():
        is_transposed = any(module.endswith(f".{linear}") for linear in transposed_linears)
        shape = layout.shape[::-1] if is_transposed else layout.shape
        entries.append(StoredTensor(f"{module}.weight", checkpoint.dtype, shape))
    return entries


def _match_derived(config: Mapping[str, Any], entries: list[StoredTensor]) -> ModelLayout | None:
    """Match with derived declarations; return None if there are none."""
    from quantforge.model.derive.derive import derive_declarations_for

    try:
        return match_tensors(config, entries, derive_declarations_for(config, entries))
    except (InputError, RefusedError):
        return None


def drop_tied_copy(model_layout: ModelLayout, checkpoint: Checkpoint) -> ModelLayout:
    """Drop a tied head that is stored twice; raise `InputError` if it differs from the embedding."""

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
