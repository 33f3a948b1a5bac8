"""Compare an importance file (imatrix) with a plan by names and widths, so that a file of another model is found early.

All matrices inside the blocks should be in the file; embeddings and heads, which llama-imatrix does not write, are not
counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path

from quantforge.architectures.match import ModelLayout
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.formats.gguf.families import GgufName, family_of, gguf_names
from quantforge.formats.gguf.importance_file import check_structure
from quantforge.packers.lattices import NEED_IMPORTANCE
from quantforge.plans import Action, TensorPlan

_BLOCK_NUMBER = re.compile(r"blk\.(\d+)\.")
_OUTER_NAMES = frozenset({"token_embd.weight", "output.weight"})
_OTHER_MODEL_HINT = "it belongs to another model"


def compare_importance(
    path: Path, tensors: Sequence[TensorPlan], model_layout: ModelLayout, model: str
) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """Compare an importance file with a plan; return events for missing matrices and notes on superfluous ones.

    Args:
        path: path of the file.
        tensors: plans of all tensors.
        model_layout: the model.
        model: path of the model, for events.

    Raises:
        InputError: the file belongs to another model: it has more layers, other widths, or none of the model's names.
        RefusedError: a tensor's type needs importance that the file lacks.
    """
    file_names = names_in_gguf(tensors, model_layout)
    quantized = {
        tensor.name: tensor
        for tensor in tensors
        if tensor.action is Action.QUANTIZE and tensor.name in file_names
    }
    file_entries = check_structure(path, importance_sizes(quantized.values(), file_names))
    _refuse_other_model(
        path, file_entries, model_layout, {file_names[name].name for name in quantized}
    )
    missing_tensors = [
        tensor
        for name, tensor in quantized.items()
        if tensor.block >= 0 and file_names[name].name not in file_entries
    ]
    blocks = sum(tensor.block >= 0 for tensor in quantized.values())
    _refuse_missing_importance(path, missing_tensors, blocks, file_names)
    events, notes = [], []
    if missing_tensors:
        message = f"--imatrix {path.name}: no importance for {len(missing_tensors)} of {blocks} matrices: "
        events.append(
            Event(
                "importance-incomplete", model, message + _file_names(missing_tensors, file_names)
            )
        )
    all_names = {name for entry in file_names.values() for name in (entry.name, *entry.others)}
    unknown = sorted({*file_entries} - all_names - _OUTER_NAMES)
    if unknown:
        message = f"--imatrix {path.name}: {len(unknown)} of its matrices are of no tensor of this model: "
        notes.append(message + _first_names(unknown))
    return tuple(events), tuple(notes)


def names_in_gguf(tensors: Iterable[TensorPlan], model_layout: ModelLayout) -> dict[str, GgufName]:
    """Return the names that matrices have in a GGUF file, by their names in the source.

    Raises:
        RefusedError: GGUF has no names for the family.
    """
    linears = {tensor.name for tensor in tensors if len(tensor.shape) == 2}
    matrices = [tensor for tensor in model_layout.tensors if tensor.header.name in linears]
    gguf_tensors = gguf_names(
        family_of(model_layout.config), model_layout.blocks, [tensor.name for tensor in matrices]
    )
    return {tensor.header.name: gguf_tensors[tensor.name] for tensor in matrices}


def importance_sizes(
    tensors: Collection[TensorPlan], gguf_name_of: Mapping[str, GgufName]
) -> dict[str, int]:
    """Return the number of importance values of each matrix, by GGUF name; those of experts are stacked."""
    matrices = Counter(entry.name for entry in gguf_name_of.values())
    return {
        gguf_name_of[tensor.name].name: matrices[gguf_name_of[tensor.name].name] * tensor.matrix[1]
        for tensor in tensors
    }


def _refuse_other_model(
    path: Path, file_entries: Set[str], model_layout: ModelLayout, expected: Set[str]
) -> None:
    numbers = [int(match[1]) + 1 for name in file_entries if (match := _BLOCK_NUMBER.match(name))]
    layers = max(numbers, default=0)
    if layers > model_layout.blocks and not model_layout.draft_head_tensors:
        raise InputError(
            f"--imatrix {path}: it has the importance of {layers} layers, the model has {model_layout.blocks}",
            _OTHER_MODEL_HINT,
            file=str(path),
        )
    if not expected & file_entries:
        raise InputError(
            f"--imatrix {path}: nothing of it concerns this model",
            _OTHER_MODEL_HINT,
            file=str(path),
        )


def _refuse_missing_importance(
    path: Path,
    missing_tensors: Sequence[TensorPlan],
    blocks: int,
    gguf_name_of: Mapping[str, GgufName],
) -> None:
    """Refuse types that llama-quantize does not make without importance, if the file lacks it."""
    refused = [
        tensor for tensor in missing_tensors if _type_name(tensor).lower() in NEED_IMPORTANCE
    ]
    if refused:
        raise RefusedError(
            f"--imatrix {path}: no importance for {len(refused)} of {blocks} matrices whose types need it"
            f" ({', '.join(sorted({_type_name(tensor) for tensor in refused}))}): {_file_names(refused, gguf_name_of)}",
            "an importance of this very model: without --imatrix the calibration text gives one",
            tensor=refused[0].name,
            file=str(path),
        )


def _type_name(tensor: TensorPlan) -> str:
    return tensor.scheme.weight.grid.upper() if tensor.scheme else ""


def _file_names(tensors: Sequence[TensorPlan], gguf_name_of: Mapping[str, GgufName]) -> str:
    return _first_names(list(dict.fromkeys(gguf_name_of[tensor.name].name for tensor in tensors)))


def _first_names(names: Sequence[str]) -> str:
    more_suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more_suffix
