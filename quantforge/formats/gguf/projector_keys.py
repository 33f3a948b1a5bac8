"""Keys of the file of a vision tower: what it is, what its family says, and how pictures become numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge import __version__
from quantforge.architectures.projector import Projector, Value
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.hub import source_name
from quantforge.errors import InputError
from quantforge.formats.gguf import container
from quantforge.formats.gguf.container import GgufTensor, ValueType, flag, text, u32
from quantforge.formats.gguf.metadata import QUANTIZATION_VERSION, size_label
from quantforge_files.roles import SETTINGS

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

ARCH = "clip"
_F16 = 1  # `general.file_type`
_SETTINGS = ("preprocessor_config.json", "processor_config.json")
_LEAST = 1e-3  # that colours are divided by
_AS_THEY_ARE = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # colours that are not shifted, and divided by 1


def general(checkpoint: Checkpoint, held: Iterable[GgufTensor]) -> dict[str, container.Value]:
    """Return the keys that say what the file is."""
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


def tower_keys(declared: Projector, source: Path) -> dict[str, container.Value]:
    """Return the keys of the tower, in which the processor's settings say how pictures are shifted and divided."""
    settings = _processor(source)
    mean, deviation = (
        _three(settings, key, usual, least)
        for key, usual, least in (
            ("image_mean", declared.mean, 0.0),
            ("image_std", declared.deviation, _LEAST),
        )
    )
    if not _normalizes(settings, declared):
        mean, deviation = map(list, _AS_THEY_ARE)
    colours = {
        key: container.array(ValueType.F32, value)
        for key, value in (("image_mean", mean), ("image_std", deviation))
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


def _normalizes(settings: Mapping[str, Any], declared: Projector) -> bool:
    stated = settings.get("do_normalize")
    if stated is None:
        return declared.normalizes
    if not isinstance(stated, bool):
        said = f"{_SETTINGS[0]}: do_normalize = {str(stated)[:40]!r}"
        raise InputError(said, "true or false")
    return stated


def _three(
    settings: Mapping[str, Any], key: str, otherwise: tuple[float, ...], least: float
) -> list[float]:
    stated = settings.get(key)
    found = otherwise if stated is None else stated
    good = isinstance(found, list | tuple) and len(found) == 3
    if not good or not all(type(one) in {int, float} and least <= one <= 1 for one in found):
        wanted = f"three numbers from {least:g} to 1"
        raise InputError(f"{_SETTINGS[0]}: {key} = {str(found)[:40]}", wanted)
    return [float(one) for one in found]
