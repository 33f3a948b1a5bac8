"""The file of a vision tower with its projector, as llama.cpp's ``--mmproj`` takes it: what goes where, and its values.

Matrices are float16, and what llama.cpp adds to float32 numbers is float32. A family's own file says what its tower is
(`quantforge.architectures.projector`); a checkpoint has to have these tensors and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantforge.architectures import MODEL_TYPES, architecture_of
from quantforge.architectures.architecture import matches
from quantforge.architectures.projector import Projector, TowerTensor
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.checkpoint.safetensors import TensorEntry, torch_dtype
from quantforge.errors import InputError, NotReadError, RefusedError
from quantforge.events import Event
from quantforge.formats.gguf import container
from quantforge.formats.gguf.container import GgufTensor, file_plan
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.projector_keys import ARCH, general, tower_keys
from quantforge.formats.gguf.storing import interleaved
from quantforge.formats.gguf.token_row import PlacedRow, placed
from quantforge.plans import FilePlan

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.checkpoint.reader import Checkpoint

OPTION = "--mmproj"
_TYPES = ("F32", "F16", "BF16")
_NAMED = 5


@dataclass(frozen=True, slots=True)
class ProjectorFile:
    """The file of one checkpoint's tower.

    Attributes:
        plan: its bytes, but for the tensors.
        keys: of the file.
        tensors: what is stored for each tensor of the checkpoint, by its name there.
        row: what is stored of the token embedding, if anything.
        events: what llama.cpp makes of the tower that the model does not, and towers that are in no file.
    """

    plan: FilePlan
    keys: container.Metadata
    tensors: Mapping[str, TowerTensor]
    row: PlacedRow | None = None
    events: tuple[Event, ...] = ()

    def values(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the file with its name, one of the checkpoint after the other.

        Raises:
            InputError: a value is not finite.
            RefusedError: a value is beyond float16.
        """
        types = {stored.name: stored.dtype for stored, _ in self.plan.places}
        for name, tensor in self.tensors.items():
            value = checkpoint.read(name)
            scan_finite(name, value)
            if tensor.plus_one:
                value = value.float() + 1
            if tensor.pixels:  # colours of a pixel beside each other become planes
                value = value.reshape(len(value), tensor.pixels, tensor.pixels, -1).permute(
                    0, 3, 1, 2
                )
            value = interleaved(value, tensor.heads)
            count = len(tensor.held)
            parts = value.chunk(count, tensor.axis) if count > 1 else (value,)
            for held, part in zip(tensor.held, parts, strict=True):
                stored = part.reshape(_shape(tensor)).to(torch_dtype(types[held]))
                if not bool(stored.isfinite().all()) and bool(value.isfinite().all()):
                    raise RefusedError(
                        f"{name}: a value is beyond the range of float16, in which {OPTION} stores matrices",
                        f"leave {OPTION} out: the language model alone is written",
                        tensor=name,
                    )
                yield held, stored
        if self.row:
            yield self.row.held, self.row.read(checkpoint)


def projector_file(checkpoint: Checkpoint, name: str) -> ProjectorFile:
    """Plan the file of a checkpoint's tower; ``name`` is what it is called in the stage.

    Raises:
        RefusedError: the model has no tower, or none that is written, or llama.cpp computes something else.
        InputError: a tensor of the tower is missing, unknown, or of another shape or type than the configuration says.
    """
    declared = _declared(checkpoint.config)
    parts, config = checkpoint.entries, checkpoint.config
    entries = {one: entry for one, entry in parts.items() if _is_of_tower(config, one)}
    named = {declared.canonical(one): one for one in entries}
    _check_names("has twice", entries.keys() - named.values())
    wanted = {tensor.name: tensor for tensor in declared.tensors}
    unread = {
        one
        for one in named
        if one not in wanted and matches(declared.unread + declared.left_out, one)
    }
    _check_names("misses", wanted.keys() - named.keys())
    _check_names("has, and llama.cpp has no place for,", named.keys() - wanted.keys() - unread)
    for tensor in declared.tensors:
        entry = entries[named[tensor.name]]
        if entry.shape != tensor.shape or entry.dtype not in _TYPES:
            raise InputError(
                f"{entry.name}: {entry.dtype} {list(entry.shape)}, its configuration says {list(tensor.shape)}",
                f"a tensor of this shape in one of {', '.join(_TYPES)}",
                tensor=entry.name,
            )
    held = [
        GgufTensor(one, "F32" if _is_wide(tensor) else "F16", _shape(tensor))
        for tensor in declared.tensors
        for one in tensor.held
    ]
    row = placed(checkpoint, declared.row) if declared.row else None
    held += [GgufTensor(row.held, "F32", (row.size,))] if row else []
    keys = general(checkpoint, held) | tower_keys(declared, checkpoint.path)
    tensors = {named[tensor.name]: tensor for tensor in declared.tensors}
    events = _events(declared, checkpoint, entries)
    return ProjectorFile(file_plan(name, keys, held), keys, tensors, row, events)


def check_no_tower(file: GgufFile) -> None:
    """Raise `NotReadError` for the file of a tower, which is no model."""
    if file.value("general.architecture", str, "") == ARCH:
        raise NotReadError(
            f"{file.files[0]}: holds a tower that reads pictures, and no model",
            "name the file of its language model; `verify FILE --source MODEL` compares both with the source",
        )


def has_projector(config: Mapping[str, Any]) -> bool:
    """Return whether the tower of a model of this configuration can be written."""
    return bool(_path_of(config)) and isinstance(config.get("vision_config"), Mapping)


def _declared(config: Mapping[str, Any]) -> Projector:
    """Return the tower that a configuration describes; errors as `projector_file`."""
    model_type, path = str(config.get("model_type", "")), _path_of(config)
    if not any(key.endswith("_config") and "text" not in key and isinstance(value, Mapping)
               for key, value in config.items() if key != "quantization_config"):  # fmt: skip
        raise RefusedError(
            f"{OPTION}: a model of type {model_type!r} whose config.json describes no vision tower",
            f"leave {OPTION} out",
        )
    if not has_projector(config):
        written = sorted(one for one in MODEL_TYPES if _path_of({"model_type": one}))
        raise RefusedError(
            f"{OPTION}: the tower of model_type {model_type!r} is not written",
            f"written are those of {', '.join(written)}; without {OPTION}, the language model alone",
        )
    module, _, function = path.rpartition(".")
    declared: Projector = getattr(import_module(module), function)(config)
    return declared


def _path_of(config: Mapping[str, Any]) -> str:
    found = architecture_of(config)
    return found.projector.get(str(config.get("model_type")), "") if found else ""


def _is_of_tower(config: Mapping[str, Any], name: str) -> bool:
    found = architecture_of(config)
    return found is not None and matches(found.foreign, name)


def _check_names(what: str, names: set[str]) -> None:
    if names:
        first = sorted(names)
        more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
        raise InputError(
            f"the vision tower {what} {', '.join(first[:_NAMED])}{more}",
            f"complete files, or leave {OPTION} out",
            tensor=first[0],
        )


def _events(
    declared: Projector, checkpoint: Checkpoint, entries: Mapping[str, TensorEntry]
) -> tuple[Event, ...]:
    """Return what is less than asked for: what llama.cpp computes otherwise, and towers that are left out."""
    where = checkpoint.path.name
    found = [Event("tower-differs", where, declared.differs)] if declared.differs else []
    lost = [
        entry
        for one, entry in entries.items()
        if matches(declared.left_out, declared.canonical(one))
    ]
    if lost:
        parts = sorted({declared.canonical(entry.name).partition(".")[0] for entry in lost})
        nbytes = sum(entry.nbytes for entry in lost)
        text = f"{' and '.join(parts)}: {len(lost)} tensors, {nbytes} bytes, are in no file"
        found.append(Event("tower-left-out", where, text))
    return tuple(found)


def _is_wide(tensor: TowerTensor) -> bool:
    return tensor.wide or len(tensor.shape) < 2


def _shape(tensor: TowerTensor) -> tuple[int, ...]:
    """Return the shape of one part."""
    if tensor.pixels:
        return tensor.shape[0], 3, tensor.pixels, tensor.pixels
    shape = list(tensor.shape) or [1]
    if (count := len(tensor.held)) > 1:
        shape[tensor.axis] //= count
        if shape[tensor.axis] == 1:
            del shape[tensor.axis]
    return tuple(shape)
