"""Choose the format of a result if none is requested, and check that the result's name matches it.

The first of these decides: ``--format``; a mixture type or a pre-tokenizer, which only GGUF files have; a name that
ends in ``.gguf``; the scheme, by which formats can store it: first the formats that the engine is fast with, then
`DEFAULT`, then the others. A name that contradicts the format is refused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from quantforge.engines import preferred_formats
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats import DEFAULT_FORMAT, FORMATS, GGUF, KEEP, Format, Verdict, load_format
from quantforge.formats.convert import compare_schemes
from quantforge.grids import PerGroup
from quantforge.notation import parse_layer
from quantforge.plans import choice
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme

_DIVISIBLE_SIZE = 4096  # a multiple of every tile and block size
Shape = tuple[int, int]


def choose_format(recipe: Recipe, out: Path | None = None) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe that names its format, and notes on the choice.

    Args:
        recipe: the requested recipe.
        out: path of the result, or None.

    Raises:
        UsageError: the path and the format contradict each other.
        InputError: a scheme is invalid.
    """
    notes: tuple[str, ...] = ()
    if not recipe.format:
        key, notes = _format_from_options(
            recipe.type, recipe.pre_tokenizer, out
        ) or _format_from_scheme(recipe)
        recipe = replace(recipe, format=key)
    if out is not None:
        _check_name(recipe.format, recipe.engine, out)
    return recipe, notes


def format_from_filename(out: Path | None) -> str:
    """Return the format that the suffix of a path implies, "" if it implies none."""
    name = "" if out is None else out.name.lower()
    suffixes = ((key, load_format(key).INFO.file_suffix) for key in FORMATS)
    return next((key for key, suffix in suffixes if suffix and name.endswith(suffix)), "")


def formats_holding(
    layer: LayerScheme, shape: Shape | None = None, model_dtype: str = "BF16"
) -> list[str]:
    """Return the formats that can store a layer exactly, for a shape (out, in) or for one that everything divides."""
    return [key for key in FORMATS if _holds(load_format(key), layer, shape, model_dtype)]


def base_scheme(file_format: Format, recipe: Recipe) -> str:
    """Return the text of the scheme of linears that no rule names; errors as `Format.default_scheme`."""
    return recipe.scheme or file_format.default_scheme(recipe.bits or file_format.DEFAULT_BITS)


def _format_from_options(
    mixture: str | None, pre: str | None, out: Path | None
) -> tuple[str, tuple[str, ...]] | None:
    """Return the format implied by an option that only it has, or by the name of the result; None if neither."""
    for option, value in (("--type", mixture), ("--pre-tokenizer", pre)):
        if value is not None:
            return GGUF, (choice(f"--format {GGUF}: {option} {value} is of GGUF files"),)
    if implied := format_from_filename(out):
        return implied, (choice(f"--format {implied}: by the name of the result"),)
    return None


def _format_from_scheme(recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """Return the first format that holds the requested schemes: those of the engine, the default, then the others."""
    engine = recipe.engine
    preferred = preferred_formats(engine) if engine else ()
    order = tuple(dict.fromkeys((*preferred, DEFAULT_FORMAT, *FORMATS)))
    key = next((key for key in order if _holds_all_schemes(recipe, key)), DEFAULT_FORMAT)
    if key == DEFAULT_FORMAT:
        return key, ()
    if key in preferred:
        return key, (choice(f"--format {key}: {engine} is fast with it"),)
    return key, (choice(f"--format {key}: {DEFAULT_FORMAT} files do not hold what is asked for"),)


def _holds_all_schemes(recipe: Recipe, key: str) -> bool:
    """Return whether a format can store every scheme of a recipe, alone and together."""
    file_format = load_format(key)
    try:
        base = base_scheme(file_format, recipe)
    except (RefusedError, InputError):
        return False
    texts = {
        "model.layers.0.base": base,
        "lm_head": recipe.lm_head,
        "embed_tokens": recipe.embedding,
    }
    texts |= {f"model.layers.0.rule{n}": rule.scheme for n, rule in enumerate(recipe.rules)}
    layers = {name: parse_layer(text) for name, text in texts.items() if text not in ("", KEEP)}
    if not layers or not all(_holds(file_format, layer) for layer in layers.values()):
        return False
    shaped_layers = {name: (layer, _shape_for(layer)) for name, layer in layers.items()}
    return file_format.check_model(shaped_layers).verdict is not Verdict.IMPOSSIBLE


def _holds(
    file_format: Format, layer: LayerScheme, shape: Shape | None = None, model_dtype: str = "BF16"
) -> bool:
    shape = shape or _shape_for(layer)
    weight = layer.weight.with_scale(file_format.default_scale_type(model_dtype))
    if file_format.check_layer(replace(layer, weight=weight), shape).verdict is Verdict.IMPOSSIBLE:
        return False
    native = file_format.stored_scheme(weight, shape)
    return (
        compare_schemes(weight, native, shape, file_format.MIN_ZERO_POINT).verdict is Verdict.EXACT
    )


def _shape_for(layer: LayerScheme) -> Shape:
    granularity = layer.weight.granularity
    size = granularity.size if isinstance(granularity, PerGroup) else 1
    return _DIVISIBLE_SIZE, math.lcm(_DIVISIBLE_SIZE, size)


def _check_name(key: str, engine: str | None, out: Path) -> None:
    """Refuse a path whose suffix implies another kind of result than the format."""
    implied, suffix = format_from_filename(out), load_format(key).INFO.file_suffix
    if implied and implied != key:
        for_engine = f" (--for {engine})" if engine else ""
        raise UsageError(
            f"-o {out}: the name of a GGUF file, but {key} is asked for{for_engine}",
            f"--format {GGUF}, or a name without {out.suffix}: {key} is written as a directory",
        )
    if suffix and not implied:
        path = out / f"NAME{suffix}" if out.is_dir() else out.with_name(out.name + suffix)
        raise UsageError(f"-o {out}: a GGUF file is written, and its name ends so", f"-o {path}")
    if out.suffix.lower() == ".safetensors":
        raise UsageError(
            f"-o {out}: the name of a file, but {key} is written as a directory",
            f"-o {out.with_suffix('')}",
        )
