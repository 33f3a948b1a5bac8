"""Names of results that nobody names: ``wren-awq-int4``, ``wren-Q4_0.gguf``.

One rule, stated in ``docs/cli.md``: the name of the original model and what became of all of it, the method, the
scheme, and the format where it is not the default (a method that is called as the format is said once). A GGUF file is
called after its mixture, as llama.cpp's tools do, or after its bits for a weight where rules mix types
(``wren-mixed-4.06bpw.gguf``). The original model is the one that the first manifest of a chain of exports names, so
that no name grows by an export of an export.
Every part is a name for files on any system; what exists is never replaced.
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
from quantforge.artifacts.manifest import adapter_name, adapters_of, experts_of, experts_word
from quantforge.errors import InputError, RefusedError
from quantforge.files.hub import source_name
from quantforge.files.output_names import side_of
from quantforge.files.reader import Checkpoint
from quantforge.formats import DEFAULT_FORMAT, PLAIN, load_format
from quantforge.formats.gguf.mixture import MIXED_PREFIX, MIXTURES
from quantforge.grids import GRIDS, ScaleType
from quantforge.notation import ALIASES, parse_layer
from quantforge.planning.format_choice import format_of_name
from quantforge.plans import TensorPlan
from quantforge.quantizers import RTN
from quantforge.recipe import Recipe, from_toml
from quantforge.scheme import LayerScheme, Sparsity

_LONGEST = (
    120  # bytes of the model's part, so that names of work files beside the result fit into 255
)
_PLAIN_SCALES = (ScaleType.F16, ScaleType.BF16, ScaleType.F32)


def derived(
    checkpoint: Checkpoint,
    method: str | None,
    key: str,
    tensors: Iterable[TensorPlan],
    label: str = "",
    zeros: Sparsity | None = None,
) -> str:
    """Return the name of a result.

    Args:
        checkpoint: what it is made from.
        method: that is applied; None for an export, which passes on the recorded one.
        key: the format.
        tensors: of the plan.
        label: what the format calls the whole, if it has a name for that.
        zeros: that are made; those of the source stay in the name.
    """
    first = _first(checkpoint)
    tensors = tuple(tensors)
    schemes = Counter(tensor.scheme for tensor in tensors if tensor.scheme)
    recorded = str(first.get("method", "")) if first.get("recipe") else ""
    word = (recorded if method is None else method).replace("+", "-")  # which the hub takes
    if not schemes and not any(tensor.sparse for tensor in tensors):
        word = ""
    origin = _whole_origin(checkpoint, zeros)
    if suffix := load_format(key).INFO.file_suffix:
        word = "" if method is None or word == RTN else word
        return "-".join(filter(None, (origin, _safe(word), label))) + suffix
    mixed = len({(layer.weight.grid, layer.input) for layer in schemes}) > 1
    known = method is not None or bool(first)
    moved = method is None
    scheme = _scheme(schemes.most_common(1)[0][0], key, moved=moved) if schemes and known else ""
    parts = (origin, "" if word == key else _safe(word), scheme, MIXED_PREFIX if mixed else "")
    return "-".join(filter(None, (*parts, key if key != DEFAULT_FORMAT or not known else "")))


def sized(checkpoint: Checkpoint, method: str, key: str, size: str) -> str:
    """Return the name of a result of a size (as it is typed), which is known before what has that size is found."""
    parts = (_whole_origin(checkpoint), "" if method == key else method, _safe(size))
    suffix = load_format(key).INFO.file_suffix
    last = "" if suffix or key == DEFAULT_FORMAT else key
    return "-".join(filter(None, (*parts, last))) + suffix


def word_for(target: str | None, like: str | Path | None) -> str:
    """Return the word for a size that is asked for: as it is typed, or whose size it is."""
    other = Path(str(like))
    return target or f"like-{other.stem if format_of_name(other) else other.name}"


def place(name: str, model: Path) -> Path:
    """Return where a result goes: the working directory, or beside the model where that is inside of the model."""
    here, there = Path.cwd().resolve(), model.resolve()
    return there.parent / name if here.is_relative_to(there) else Path(name)


def first_recipe(checkpoint: Checkpoint) -> Recipe:
    """Return the recipe by which the first of a chain of results was made, an empty one where none is known."""
    text = _first(checkpoint).get("recipe")
    try:
        return from_toml(text) if isinstance(text, str) else Recipe()
    except InputError:
        return Recipe()


def _first(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return what the first manifest of a chain says of the original model; empty where there is none."""
    said: Mapping[str, Any] = manifest.read(checkpoint.path) or {}
    while isinstance(earlier := said.get("lineage"), Mapping) and "source" in earlier:
        said = earlier
    return said if isinstance(said.get("source"), Mapping) else {}


def _whole_origin(checkpoint: Checkpoint, zeros: Sparsity | None = None) -> str:
    """Return the part of a name that says what a result is made from; ``zeros`` that are made belong to it."""
    pattern = zeros or first_recipe(checkpoint).zeros
    return "-".join((*_origin(checkpoint, _first(checkpoint)), *_zeros(pattern)))


def _origin(checkpoint: Checkpoint, first: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of the original model, those of adapters that were merged, and how many experts were kept."""
    known = first.get("source", {}).get("model")
    name = known if isinstance(known, str) else source_name(checkpoint.path)[0]
    name = name.rpartition("/")[2]
    if format_of_name(Path(name)):
        name = _without_type(side_of(Path(name), "").stem)
    yield _safe(name) or "model"
    for said in adapters_of(checkpoint):
        yield _safe(adapter_name(said))
    yield from filter(None, map(experts_word, experts_of(checkpoint)))


def _zeros(pattern: Sparsity | None) -> tuple[str, ...]:
    """Return what a name says of zeros: ``2of4``, ``50zeros`` for half of a row."""
    if pattern is None:
        return ()
    return (
        f"{pattern.stay}of{pattern.run}" if pattern.stay else f"{100 * pattern.share:.6g}zeros",
    )


def _without_type(stem: str) -> str:
    """Return a name without its type: ``wren`` for ``wren-Q8_0``, ``wren.Q8_0`` and ``wren-mixed-4.06bpw``."""
    stem = re.sub(rf"(?<=.)-{MIXED_PREFIX}-[0-9.]+bpw$", "", stem)
    base, kind = re.fullmatch(r"(.*?)(?:[-.]([^-.]+))?", stem, re.DOTALL).groups()  # type: ignore[union-attr]
    return base if base and kind and kind.upper() in MIXTURES else stem


def _safe(text: str) -> str:
    """Return a text with ``_`` for all but letters, digits and ``.+_-``, no leading dot or dash, not too long."""
    plain = re.sub(r"[^\w.+-]", "_", text).lstrip(".-")
    return plain.encode()[:_LONGEST].decode(errors="ignore")


def _scheme(layer: LayerScheme, key: str, *, moved: bool) -> str:
    """Return the scheme in short: its grid and in what it differs from what ``--bits`` means, or its alias.

    Of codes that are ``moved`` from another format the size of groups alone is told: zero points are restated.
    """
    bare = _bare(layer)
    aliases = {_bare(parse_layer(text)): alias for alias, text in ALIASES.items()}
    if bare.input is not None and bare in aliases:
        return aliases[bare].lower().replace("_", "-")
    grid = GRIDS[bare.weight.grid].short or bare.weight.grid
    usual = {
        field
        for form in {key, DEFAULT_FORMAT}
        if moved or form == key
        for field in _usual(form, bare, grid)
    }
    fields = str(bare.weight).split(":")[1 : 2 if moved else None]
    inputs = [] if bare.input is None else ["in", *str(bare.input).split(":")]
    return _safe("-".join([grid, *(field for field in fields if field not in usual), *inputs]))


def _usual(key: str, layer: LayerScheme, grid: str) -> list[str]:
    """Return the fields of what the width of a layer, else its grid, means in a format."""
    usual = ""
    if GRIDS[layer.weight.grid].free:  # a fixed layout has no other name
        with suppress(RefusedError, InputError):
            usual = load_format(DEFAULT_FORMAT if key == PLAIN else key).default_scheme(
                layer.weight.bits
            )
    fields = str(_bare(parse_layer(usual)).weight).split(":") if usual else [""]
    if fields[0] != layer.weight.grid:
        fields = [""] if layer.weight.integer else str(_bare(parse_layer(grid)).weight).split(":")
    return fields[1:] or ["sym"]


def _bare(layer: LayerScheme) -> LayerScheme:
    """Return a layer without a type of its scales that formats fill in."""
    weight = layer.weight
    return (
        replace(layer, weight=replace(weight, scale=None))
        if weight.scale in _PLAIN_SCALES
        else layer
    )
