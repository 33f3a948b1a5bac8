"""GGUF file of a vision tower with its projector, for llama.cpp's ``--mmproj``.

Matrices are float16, and what llama.cpp adds to float32 numbers is float32. A family's own file says what its tower is
(`quantforge.architectures.projector`); a checkpoint has to have these tensors and no others. The settings of the
processor say how colours become numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantforge import __version__
from quantforge.architectures import architecture_of
from quantforge.architectures.architecture import matches_any
from quantforge.architectures.families import declared_families
from quantforge.architectures.projector import KeyValue, Projector, TokenRow, TowerTensor
from quantforge.errors import InputError, NotReadError, RefusedError
from quantforge.events import Event
from quantforge.files.finite_values import check_finite
from quantforge.files.hub import source_name
from quantforge.files.opener import read_object
from quantforge.files.safetensors import TensorEntry, torch_dtype
from quantforge.formats.gguf import container, interleave_rotary_rows
from quantforge.formats.gguf.container import (
    GgufTensor,
    ValueType,
    bool_value,
    file_plan,
    string_value,
    u32_value,
)
from quantforge.formats.gguf.metadata import QUANTIZATION_VERSION, size_label
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.tokenizer import added_tokens
from quantforge.plans import FilePlan
from quantforge_files.roles import SETTINGS, TOKENIZER

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.files.reader import Checkpoint

OPTION = "--mmproj"
ARCH = "clip"
_TYPES = ("F32", "F16", "BF16")
_F16 = 1  # `general.file_type`
_MAX_SHOWN = 5
_PROCESSOR, _TOKENIZER = ("preprocessor_config.json", "processor_config.json"), "tokenizer.json"
_MIN_DEVIATION = 1e-3  # that colours are divided by


@dataclass(frozen=True, slots=True)
class ProjectorFile:
    """Plan of the projector file of one checkpoint.

    Attributes:
        plan: the file without the data of its tensors: header, keys and tensor infos.
        keys: metadata of the file.
        tensors: what is stored for each tensor of the checkpoint, by its name there.
        row: the row of the token embedding that is stored with them, if any: its matrix, its number, its name here.
        events: what llama.cpp makes of the tower that the model does not, and towers that are in no file.
    """

    plan: FilePlan
    keys: container.Metadata
    tensors: Mapping[str, TowerTensor]
    row: tuple[str, int, str] | None = None
    events: tuple[Event, ...] = ()

    def values(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the file with its name, reading one checkpoint tensor at a time.

        Raises:
            InputError: a value is not finite.
            RefusedError: a value is beyond float16.
        """
        types = {stored.name: stored.dtype for stored, _ in self.plan.places}
        for name, tensor in self.tensors.items():
            value = checkpoint.read(name)
            check_finite(name, value)
            if tensor.plus_one:
                value = value.float() + 1
            if (
                patch_side := tensor.patch_size
            ):  # colours of a pixel beside each other become planes
                value = value.reshape(len(value), patch_side, patch_side, -1).permute(0, 3, 1, 2)
            value = interleave_rotary_rows(value, tensor.rotary_heads)
            values = (
                value.chunk(len(tensor.gguf_names), tensor.axis)
                if len(tensor.gguf_names) > 1
                else (value,)
            )
            for gguf_name, piece in zip(tensor.gguf_names, values, strict=True):
                stored = piece.reshape(_part_shape(tensor)).to(torch_dtype(types[gguf_name]))
                if not bool(stored.isfinite().all()) and bool(value.isfinite().all()):
                    raise RefusedError(
                        f"{name}: a value is beyond the range of float16, in which {OPTION} stores matrices",
                        f"leave {OPTION} out: the language model alone is written",
                        tensor=name,
                    )
                yield gguf_name, stored
        if self.row:
            name, number, gguf_name = self.row
            value = checkpoint.read_rows(name, number, number + 1)
            check_finite(name, value)
            yield gguf_name, value[0].float()


def projector_file(checkpoint: Checkpoint, name: str) -> ProjectorFile:
    """Plan the projector file of a checkpoint; ``name`` is its file name in the stage.

    Raises:
        RefusedError: the model has no tower, or none that is written, or llama.cpp computes something else.
        InputError: a tensor of the tower is missing, unknown, or of another shape or type than the configuration says,
            or the settings of the processor are malformed.
    """
    declared = _declared_projector(checkpoint.config)
    architecture = architecture_of(checkpoint.config)
    assert architecture is not None  # it has declared the tower
    entries = [
        entry
        for tensor_name, entry in checkpoint.entries.items()
        if matches_any(architecture.foreign_patterns, tensor_name)
    ]
    entries_by_name = {declared.canonical_name(entry.name): entry for entry in entries}
    expected = {tensor.name: tensor for tensor in declared.tensors}
    unread = {
        tensor_name
        for tensor_name in entries_by_name
        if matches_any(declared.unused_tensors + declared.omitted_towers, tensor_name)
    }
    _require_none(
        "has twice",
        [entry.name for entry in entries if entry not in entries_by_name.values()],
    )
    _require_none("misses", expected.keys() - entries_by_name.keys())
    _require_none(
        "has, and llama.cpp has no place for,", entries_by_name.keys() - expected.keys() - unread
    )
    for tensor in declared.tensors:
        entry = entries_by_name[tensor.name]
        if entry.shape != tensor.shape or entry.dtype not in _TYPES:
            raise InputError(
                f"{entry.name}: {entry.dtype} {list(entry.shape)}, its configuration says {list(tensor.shape)}",
                f"a tensor of this shape in one of {', '.join(_TYPES)}",
                tensor=entry.name,
            )
    gguf_tensors = [
        GgufTensor(
            gguf_name,
            "F32" if tensor.float32 or len(tensor.shape) < 2 else "F16",
            _part_shape(tensor),
        )
        for tensor in declared.tensors
        for gguf_name in tensor.gguf_names
    ]
    row = None
    if declared.token_row:
        row = (*_embedding_row(checkpoint, declared.token_row), declared.token_row.gguf_name)
        gguf_tensors.append(
            GgufTensor(declared.token_row.gguf_name, "F32", (declared.token_row.width,))
        )
    keys = _metadata_keys(declared, checkpoint, gguf_tensors)
    tensors = {entries_by_name[tensor.name].name: tensor for tensor in declared.tensors}
    events = _tower_events(declared, checkpoint.path.name, entries)
    return ProjectorFile(file_plan(name, keys, gguf_tensors), keys, tensors, row, events)


def check_no_tower(file: GgufFile) -> None:
    """Raise `NotReadError` if the file is a projector file instead of a language model."""
    if file.value("general.architecture", str, "") == ARCH:
        raise NotReadError(
            "holds a tower that reads pictures, and no model",
            "name the file of its language model; `verify FILE --source MODEL` compares both with the source",
            subject=str(file.files[0]),
        )


def has_projector(config: Mapping[str, Any]) -> bool:
    """Return whether the vision tower of a model can be written."""
    return _projector_declaration(config) is not None and isinstance(
        config.get("vision_config"), Mapping
    )


def _declared_projector(config: Mapping[str, Any]) -> Projector:
    """Return the projector that a configuration describes; errors as `projector_file`."""
    model_type = str(config.get("model_type", ""))
    if not any(
        key.endswith("_config") and "text" not in key and isinstance(value, Mapping)
        for key, value in config.items()
        if key != "quantization_config"
    ):
        raise RefusedError(
            f"{OPTION}: a model of type {model_type!r} whose config.json describes no vision tower",
            f"leave {OPTION} out",
        )
    tower = _projector_declaration(config)
    if tower is None or not has_projector(config):
        supported = sorted(
            family
            for family in declared_families()
            if _projector_declaration({"model_type": family})
        )
        raise RefusedError(
            f"{OPTION}: the tower of model_type {model_type!r} is not written",
            f"written are those of {', '.join(supported)}; without {OPTION}, the language model alone",
        )
    return tower(config)


def _projector_declaration(
    config: Mapping[str, Any],
) -> Callable[[Mapping[str, Any]], Projector] | None:
    architecture = architecture_of(config)
    return architecture.projector.get(str(config.get("model_type"))) if architecture else None


def _require_none(problem: str, names: Collection[str]) -> None:
    if names:
        first = sorted(names)
        more_suffix = f" and {len(first) - _MAX_SHOWN} more" if len(first) > _MAX_SHOWN else ""
        raise InputError(
            f"the vision tower {problem} {', '.join(first[:_MAX_SHOWN])}{more_suffix}",
            f"complete files, or leave {OPTION} out",
            tensor=first[0],
        )


def _tower_events(
    declared: Projector, where: str, entries: Iterable[TensorEntry]
) -> tuple[Event, ...]:
    """Return events for what llama.cpp computes differently and for towers that are left out."""
    events = (
        [Event("tower-differs", where, declared.known_difference)]
        if declared.known_difference
        else []
    )
    names = {declared.canonical_name(entry.name): entry.nbytes for entry in entries}
    rounded_to_zero = {
        name: size for name, size in names.items() if matches_any(declared.omitted_towers, name)
    }
    if rounded_to_zero:
        towers = " and ".join(sorted({name.partition(".")[0] for name in rounded_to_zero}))
        detail = f"{towers}: {len(rounded_to_zero)} tensors, {sum(rounded_to_zero.values())} bytes, are in no file"
        events.append(Event("tower-dropped", where, detail))
    return tuple(events)


def _part_shape(tensor: TowerTensor) -> tuple[int, ...]:
    """Return the shape of one stored part of a tensor."""
    if tensor.patch_size:
        return tensor.shape[0], 3, tensor.patch_size, tensor.patch_size
    shape = list(tensor.shape) or [1]
    if (count := len(tensor.gguf_names)) > 1:
        shape[tensor.axis] //= count
        if shape[tensor.axis] == 1:
            del shape[tensor.axis]
    return tuple(shape)


def _embedding_row(checkpoint: Checkpoint, row: TokenRow) -> tuple[str, int]:
    """Return the name of the token embedding in a checkpoint, and the row of a token.

    Raises:
        InputError: the tokenizer has no such token, or the embedding is not there, has no such row, or another width.
    """
    architecture = architecture_of(checkpoint.config)
    assert architecture is not None  # it has declared the row
    embedding_name = f"{architecture.embedding}.weight"
    names = (
        stored + embedding_name.removeprefix(canonical)
        for stored, canonical in architecture.prefixes
        if embedding_name.startswith(canonical)
    )
    name = next((name for name in names if name in checkpoint.entries), None)
    if name is None:
        raise InputError(
            "the checkpoint has no token embedding", "complete files", tensor=embedding_name
        )
    path = checkpoint.path / _TOKENIZER
    tokens = added_tokens(read_object(path, TOKENIZER, checkpoint.path)) if path.is_file() else []
    number = next((item["id"] for item in tokens if item["content"] == row.token), None)
    if number is None:
        raise InputError(
            f"{_TOKENIZER}: no added token {row.token}, whose embedding llama.cpp puts after each row of a picture",
            f"the tokenizer of the model, or leave {OPTION} out",
        )
    shape = checkpoint.entries[name].shape
    if len(shape) != 2 or not number < shape[0] or shape[1] != row.width:
        raise InputError(
            f"{name}: {list(shape)}, and row {number} of {row.width} columns is that of {row.token}",
            "the tokenizer and the weights of one model",
            tensor=name,
        )
    return name, number


def _metadata_keys(
    declared: Projector, checkpoint: Checkpoint, gguf_tensors: Iterable[GgufTensor]
) -> dict[str, container.MetadataValue]:
    """Return the metadata: general keys, the family's keys, mean and deviation of the image normalization."""
    weights = sum(math.prod(tensor.shape) for tensor in gguf_tensors)
    mean, deviation = _mean_and_deviation(checkpoint, declared)
    return {
        "general.architecture": string_value(ARCH),
        "general.type": string_value("mmproj"),
        "general.name": string_value(source_name(checkpoint.path)[0].rpartition("/")[2]),
        "general.size_label": string_value(size_label(weights)),
        "general.file_type": u32_value(_F16),
        "general.quantization_version": u32_value(QUANTIZATION_VERSION),
        "quantforge.version": string_value(__version__),
        f"{ARCH}.has_vision_encoder": bool_value(True),
        f"{ARCH}.projector_type": string_value(declared.projector_type),
        **{f"{ARCH}.{key}": _metadata_value(value) for key, value in declared.keys.items()},
        f"{ARCH}.vision.image_mean": container.array_value(ValueType.F32, mean),
        f"{ARCH}.vision.image_std": container.array_value(ValueType.F32, deviation),
    }


def _metadata_value(value: KeyValue) -> container.MetadataValue:
    if isinstance(value, tuple):
        return container.array_value(ValueType.BOOL, value)
    if isinstance(value, bool):
        return bool_value(value)
    return u32_value(value) if isinstance(value, int) else container.f32_value(value)


def _mean_and_deviation(
    checkpoint: Checkpoint, declared: Projector
) -> tuple[list[float], list[float]]:
    """Return mean and deviation of the three color channels, from the processor's settings or the family.

    Raises:
        InputError: a setting is malformed.
    """
    path = next((p for name in _PROCESSOR if (p := checkpoint.path / name).is_file()), None)
    settings: Mapping[str, Any] = read_object(path, SETTINGS, checkpoint.path) if path else {}
    inner = settings.get("image_processor")
    settings = inner if isinstance(inner, Mapping) else settings
    usual = {
        "do_normalize": declared.normalizes_by_default,
        "image_mean": declared.mean,
        "image_std": declared.std,
    }
    values = usual | {key: settings[key] for key in usual if settings.get(key) is not None}
    mean, deviation = (
        _three_numbers(values, "image_mean", 0.0),
        _three_numbers(values, "image_std", _MIN_DEVIATION),
    )
    if not isinstance(values["do_normalize"], bool):
        raise _malformed(values, "do_normalize", "true or false")
    return (mean, deviation) if values["do_normalize"] else ([0.0] * 3, [1.0] * 3)


def _three_numbers(settings: Mapping[str, Any], key: str, minimum: float) -> list[float]:
    value = settings[key]
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(type(number) in {int, float} and minimum <= number <= 1 for number in value)
    ):
        raise _malformed(settings, key, f"three numbers from {minimum:g} to 1")
    return [float(number) for number in value]


def _malformed(settings: Mapping[str, Any], key: str, rule: str) -> InputError:
    return InputError(f"{_PROCESSOR[0]}: {key} = {str(settings[key])[:40]}", rule)
