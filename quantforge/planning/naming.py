"""Default names of results: ``wren-awq-int4``, ``wren-Q4_0.gguf``.

There is one rule, documented in ``docs/cli.md``: the name of the original model with what was merged into it or
removed, the method, the scheme, and the format if it is not the default (a method named like the format appears once).
A GGUF file is named after its mixture, as llama.cpp's tools do, or after its bits per weight if rules mix types
(``wren-mixed-4.06bpw.gguf``). The original model is the one that the first manifest of a chain of exports names, so
that an export of an export does not get a longer name. Every part is a valid file name on any system; existing files
are never replaced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantforge.artifacts import manifest
from quantforge.artifacts.manifest import (
    adapter_name,
    all_adapters,
    all_kept_experts,
    kept_experts_word,
)
from quantforge.errors import InputError, RefusedError
from quantforge.files.hub import source_name
from quantforge.files.output_names import side_path
from quantforge.files.reader import Checkpoint
from quantforge.formats import DEFAULT_FORMAT, PLAIN, load_format
from quantforge.formats.gguf.mixture import MIXED_PREFIX, MIXTURES
from quantforge.grids import GRIDS, ScaleType
from quantforge.notation import ALIASES, parse_layer
from quantforge.planning.format_choice import format_from_filename
from quantforge.plans import TensorPlan
from quantforge.quantizers import RTN
from quantforge.recipe import Recipe, from_toml
from quantforge.scheme import LayerScheme, Sparsity

# Bytes of the model's part, so that names of temporary files next to the result fit into 255
_MAX_NAME_BYTES = 120
_FORMAT_SCALE_TYPES = (ScaleType.F16, ScaleType.BF16, ScaleType.F32)


def default_name(
    checkpoint: Checkpoint,
    method: str | None,
    key: str,
    tensors: Iterable[TensorPlan],
    label: str = "",
    zeros: Sparsity | None = None,
) -> str:
    """Return the default name of a result.

    Args:
        checkpoint: the source.
        method: the method of the run; None for an export, which keeps the recorded one.
        key: key of the format.
        tensors: plans of all tensors.
        label: what the format calls the whole model, if it has a name for that.
        zeros: sparsity of the run; that of the source is added anyway.
    """
    original = _original_manifest(checkpoint)
    tensors = tuple(tensors)
    schemes = Counter(tensor.scheme for tensor in tensors if tensor.scheme)
    recorded = str(original.get("method", "")) if original.get("recipe") else ""
    method_word = (recorded if method is None else method).replace("+", "-")  # which the hub takes
    if not schemes and not any(tensor.sparse for tensor in tensors):
        method_word = ""
    origin = _origin_part(checkpoint, zeros)
    if suffix := load_format(key).INFO.file_suffix:
        method_word = "" if method is None or method_word == RTN else method_word
        return "-".join(filter(None, (origin, _safe_filename(method_word), label))) + suffix
    mixed = len({(layer.weight.grid, layer.input) for layer in schemes}) > 1
    has_history = method is not None or bool(original)
    exported = method is None
    scheme_word = (
        _scheme_word(schemes.most_common(1)[0][0], key, exported=exported)
        if schemes and has_history
        else ""
    )
    name_parts = (
        origin,
        "" if method_word == key else _safe_filename(method_word),
        scheme_word,
        MIXED_PREFIX if mixed else "",
    )
    return "-".join(
        filter(None, (*name_parts, key if key != DEFAULT_FORMAT or not has_history else ""))
    )


def name_for_size(checkpoint: Checkpoint, method: str, key: str, size: str) -> str:
    """Return the name of a result of a target size, which is needed before the mixture of that size is known."""
    name_parts = (_origin_part(checkpoint), "" if method == key else method, _safe_filename(size))
    suffix = load_format(key).INFO.file_suffix
    format_word = "" if suffix or key == DEFAULT_FORMAT else key
    return "-".join(filter(None, (*name_parts, format_word))) + suffix


def size_label(target: str | None, like: str | Path | None) -> str:
    """Return the part of a name for a target size: the size as typed, or the name of the model to match."""
    path = Path(str(like))
    return target or f"like-{path.stem if format_from_filename(path) else path.name}"


def default_path(name: str, model: Path) -> Path:
    """Return where a result is written: the working directory, or next to the model if that is inside the model."""
    working_directory, model_path = Path.cwd().resolve(), model.resolve()
    return model_path.parent / name if working_directory.is_relative_to(model_path) else Path(name)


def original_recipe(checkpoint: Checkpoint) -> Recipe:
    """Return the recipe of the first result in a chain of exports; an empty recipe if unknown."""
    text = _original_manifest(checkpoint).get("recipe")
    try:
        return from_toml(text) if isinstance(text, str) else Recipe()
    except InputError:
        return Recipe()


def _original_manifest(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return what the first manifest in a chain of exports says of the original model; empty if there is none."""
    entry: Mapping[str, Any] = manifest.read_manifest(checkpoint.path) or {}
    while isinstance(earlier := entry.get("lineage"), Mapping) and "source" in earlier:
        entry = earlier
    return entry if isinstance(entry.get("source"), Mapping) else {}


def _origin_part(checkpoint: Checkpoint, zeros: Sparsity | None = None) -> str:
    """Return the part of a name that says what a result is made from, sparsity included."""
    pattern = zeros or original_recipe(checkpoint).zeros
    return "-".join(
        (*_origin_words(checkpoint, _original_manifest(checkpoint)), *_sparsity_words(pattern))
    )


def _origin_words(checkpoint: Checkpoint, manifest_entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of the original model, of merged adapters, and the number of kept experts."""
    recorded_name = manifest_entry.get("source", {}).get("model")
    name = recorded_name if isinstance(recorded_name, str) else source_name(checkpoint.path)[0]
    name = name.rpartition("/")[2]
    if format_from_filename(Path(name)):
        name = _strip_type_suffix(side_path(Path(name), "").stem)
    yield _safe_filename(name) or "model"
    for entry in all_adapters(checkpoint):
        yield _safe_filename(adapter_name(entry))
    yield from filter(None, map(kept_experts_word, all_kept_experts(checkpoint)))


def _sparsity_words(pattern: Sparsity | None) -> tuple[str, ...]:
    """Return the part of a name for sparsity: ``2of4``, or ``50zeros`` for half of each row."""
    if pattern is None:
        return ()
    return (
        f"{pattern.num_nonzero}of{pattern.pattern_length}"
        if pattern.num_nonzero
        else f"{100 * pattern.share:.6g}zeros",
    )


def _strip_type_suffix(stem: str) -> str:
    """Return a name without its GGUF type: ``wren`` for ``wren-Q8_0``, ``wren.Q8_0`` and ``wren-mixed-4.06bpw``."""
    stem = re.sub(rf"(?<=.)-{MIXED_PREFIX}-[0-9.]+bpw$", "", stem)
    base, kind = re.fullmatch(r"(.*?)(?:[-.]([^-.]+))?", stem, re.DOTALL).groups()  # type: ignore[union-attr]
    return base if base and kind and kind.upper() in MIXTURES else stem


def _safe_filename(text: str) -> str:
    """Return a text as a safe file name: ``_`` for all but letters, digits and ``.+_-``, no leading dot or dash."""
    safe_text = re.sub(r"[^\w.+-]", "_", text).lstrip(".-")
    return safe_text.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")


def _scheme_word(layer: LayerScheme, key: str, *, exported: bool) -> str:
    """Return the short name of a scheme: its alias, or its grid and the fields that differ from the format's default.

    For codes exported from another format only the group size is named, because formats store zero points differently.
    """
    layer_scheme = _without_default_scale(layer)
    aliases = {_without_default_scale(parse_layer(text)): alias for alias, text in ALIASES.items()}
    if layer_scheme.input is not None and layer_scheme in aliases:
        return aliases[layer_scheme].lower().replace("_", "-")
    grid = GRIDS[layer_scheme.weight.grid].short_name or layer_scheme.weight.grid
    default_fields = {
        field
        for format_key in {key, DEFAULT_FORMAT}
        if exported or format_key == key
        for field in _default_fields(format_key, layer_scheme, grid)
    }
    fields = str(layer_scheme.weight).split(":")[1 : 2 if exported else None]
    inputs = [] if layer_scheme.input is None else ["in", *str(layer_scheme.input).split(":")]
    return _safe_filename(
        "-".join([grid, *(field for field in fields if field not in default_fields), *inputs])
    )


def _default_fields(key: str, layer: LayerScheme, grid: str) -> list[str]:
    """Return the fields of the default scheme of a layer's width (or else of its grid) in a format."""
    default = ""
    if GRIDS[layer.weight.grid].has_parameters:  # a fixed layout has no other name
        with suppress(RefusedError, InputError):
            default = load_format(DEFAULT_FORMAT if key == PLAIN else key).default_scheme(
                layer.weight.bits
            )
    fields = (
        str(_without_default_scale(parse_layer(default)).weight).split(":") if default else [""]
    )
    if fields[0] != layer.weight.grid:
        fields = (
            [""]
            if layer.weight.integer
            else str(_without_default_scale(parse_layer(grid)).weight).split(":")
        )
    return fields[1:] or ["sym"]


def _without_default_scale(layer: LayerScheme) -> LayerScheme:
    """Return a layer's scheme without a scale type that formats fill in."""
    weight = layer.weight
    return (
        replace(layer, weight=replace(weight, scale=None))
        if weight.scale in _FORMAT_SCALE_TYPES
        else layer
    )
