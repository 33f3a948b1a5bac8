"""The file of a vision tower with its projector, as llama.cpp's ``--mmproj`` takes it: what goes where, and its values.

Matrices are float16, and what llama.cpp adds to float32 numbers is float32. A family's own file says what its tower is
(`quantforge.architectures.projector`); a checkpoint has to have these tensors and no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge import __version__
from quantforge.architectures import MODEL_TYPES, architecture_of
from quantforge.architectures.architecture import matches
from quantforge.architectures.projector import Projector, TowerTensor, Value
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.hub import source_name
from quantforge.checkpoint.safetensors import torch_dtype
from quantforge.errors import InputError, NotReadError, RefusedError
from quantforge.formats.gguf import container
from quantforge.formats.gguf.container import GgufTensor, ValueType, file_plan, flag, text, u32
from quantforge.formats.gguf.metadata import QUANTIZATION_VERSION, size_label
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.storing import interleaved
from quantforge.formats.gguf.token_row import PlacedRow, placed
from quantforge.plans import FilePlan
from quantforge_files.roles import SETTINGS

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.checkpoint.reader import Checkpoint

OPTION = "--mmproj"
ARCH = "clip"
_F16 = 1  # `general.file_type`
_SETTINGS = ("preprocessor_config.json", "processor_config.json")
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
    """

    plan: FilePlan
    keys: container.Metadata
    tensors: Mapping[str, TowerTensor]
    row: PlacedRow | None = None

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
            value = interleaved(value, tensor.heads)
            for held, part in zip(
                tensor.held, value.chunk(len(tensor.held), tensor.axis), strict=True
            ):
                stored = part.reshape(_shape(tensor)).to(torch_dtype(types[held]))
                if not bool(stored.isfinite().all()):
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
    unread = {one for one in named if one not in wanted and matches(declared.unread, one)}
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
    keys = _general(checkpoint, held) | _keys(declared, checkpoint.path)
    tensors = {named[tensor.name]: tensor for tensor in declared.tensors}
    return ProjectorFile(file_plan(name, keys, held), keys, tensors, row)


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


def _is_wide(tensor: TowerTensor) -> bool:
    return tensor.wide or len(tensor.shape) == 1


def _shape(tensor: TowerTensor) -> tuple[int, ...]:
    """Return the shape of one part."""
    shape = list(tensor.shape)
    if (count := len(tensor.held)) > 1:
        shape[tensor.axis] //= count
        if shape[tensor.axis] == 1:
            del shape[tensor.axis]
    return tuple(shape)


def _general(checkpoint: Checkpoint, held: list[GgufTensor]) -> dict[str, container.Value]:
    weights = sum(math.prod(tensor.shape) for tensor in held)
    return {
        "general.architecture": text(ARCH),
        "general.type": text("mmproj"),
        "general.name": text(source_name(checkpoint.path)[0].rpartition("/")[2]),
        "general.size_label": text(size_label(weights)),
        "general.file_type": u32(_F16),
        "general.quantization_version": u32(QUANTIZATION_VERSION),
        "quantforge.version": text(__version__),
    }


def _keys(declared: Projector, source: Path) -> dict[str, container.Value]:
    """Return the keys of the tower, in which the processor's settings say how pictures are shifted and divided."""
    settings = _processor(source)
    colours = {
        key: container.array(ValueType.F32, _three(settings, key, otherwise))
        for key, otherwise in (("image_mean", declared.mean), ("image_std", declared.deviation))
    }
    return {
        f"{ARCH}.has_vision_encoder": flag(True),
        f"{ARCH}.projector_type": text(declared.kind),
        **{f"{ARCH}.{key}": _value(value) for key, value in declared.keys.items()},
        **{f"{ARCH}.vision.{key}": value for key, value in colours.items()},
    }


def _value(value: Value) -> container.Value:
    if isinstance(value, tuple):
        return container.array(ValueType.BOOL, value)
    if isinstance(value, bool):
        return flag(value)
    return u32(value) if isinstance(value, int) else container.f32(value)


def _processor(source: Path) -> Mapping[str, Any]:
    """Return the settings of a model's processor of pictures; {} where it has none."""
    for name in _SETTINGS:
        if (source / name).is_file():
            found = read_object(source / name, SETTINGS, source)
            inner = found.get("image_processor")
            return inner if isinstance(inner, Mapping) else found
    return {}


def _three(settings: Mapping[str, Any], key: str, otherwise: tuple[float, ...]) -> list[float]:
    found = settings.get(key, otherwise)
    good = isinstance(found, list | tuple) and len(found) == 3
    if not good or not all(type(one) in {int, float} and 0 <= one <= 1 for one in found):
        raise InputError(f"{_SETTINGS[0]}: {key} = {str(found)[:40]}", "three numbers from 0 to 1")
    return [float(one) for one in found]
