"""Choice of the format of a result where none is asked for, and what the result's name says about it.

What decides, in this order: ``--format``; a type or a pre-tokenizer, which GGUF files alone have; a name that ends in
``.gguf``; the scheme, by what the formats themselves say they hold: those that the engine is fast with first, then
`DEFAULT_FORMAT`, then the others. A name that contradicts the format is refused.
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

_WHOLE = 4096  # a dimension that every tile and block divides
Shape = tuple[int, int]


def chosen_format(recipe: Recipe, out: Path | None = None) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe that names its format, and notes on the choice.

    Args:
        recipe: what is asked for.
        out: the name of the result, where one is given.

    Raises:
        UsageError: the name and the format contradict each other.
        InputError: the text of a scheme is none.
    """
    said: tuple[str, ...] = ()
    if not recipe.format:
        key, said = _stated(recipe.type, recipe.pre, out) or _chosen(recipe)
        recipe = replace(recipe, format=key)
    if out is not None:
        _check_name(recipe.format, recipe.engine, out)
    return recipe, said


def format_of_name(out: Path | None) -> str:
    """Return the format that the name of a result states, "" where it states none."""
    name = "" if out is None else out.name.lower()
    suffixes = ((key, load_format(key).INFO.file_suffix) for key in FORMATS)
    return next((key for key, suffix in suffixes if suffix and name.endswith(suffix)), "")


def holders(layer: LayerScheme, shape: Shape | None = None, model_dtype: str = "BF16") -> list[str]:
    """Return the formats that hold a layer as it is: of ``shape`` (out, in), or of one that everything divides."""
    return [key for key in FORMATS if _holds(load_format(key), layer, shape, model_dtype)]


def base_scheme(form: Format, wanted: Recipe) -> str:
    """Return the scheme of linears of which nothing else is said, as text; errors as `Format.default_scheme`."""
    return wanted.scheme or form.default_scheme(wanted.bits or form.DEFAULT_BITS)


def _stated(
    mixture: str | None, pre: str | None, out: Path | None
) -> tuple[str, tuple[str, ...]] | None:
    """Return the format that an option implies which it alone has, or that the name of the result states."""
    for option, value in (("--type", mixture), ("--pre", pre)):
        if value is not None:
            return GGUF, (choice(f"--format {GGUF}: {option} {value} is of GGUF files"),)
    if stated := format_of_name(out):
        return stated, (choice(f"--format {stated}: by the name of the result"),)
    return None


def _chosen(wanted: Recipe) -> tuple[str, tuple[str, ...]]:
    """Return the first format that holds what is wanted: of the engine, the default one, then the others."""
    engine = wanted.engine
    preferred = preferred_formats(engine) if engine else ()
    order = tuple(dict.fromkeys((*preferred, DEFAULT_FORMAT, *FORMATS)))
    key = next((key for key in order if _holds_all(wanted, key)), DEFAULT_FORMAT)
    if key == DEFAULT_FORMAT:
        return key, ()
    if key in preferred:
        return key, (choice(f"--format {key}: {engine} is fast with it"),)
    return key, (choice(f"--format {key}: {DEFAULT_FORMAT} files do not hold what is asked for"),)


def _holds_all(wanted: Recipe, key: str) -> bool:
    """Return whether a format holds every scheme of a recipe, alone and together."""
    form = load_format(key)
    try:
        base = base_scheme(form, wanted)
    except (RefusedError, InputError):
        return False
    places = {"model.layers.0.base": base, "lm_head": wanted.head, "embed_tokens": wanted.embedding}
    places |= {f"model.layers.0.rule{n}": rule.scheme for n, rule in enumerate(wanted.rules)}
    layers = {place: parse_layer(text) for place, text in places.items() if text not in ("", KEEP)}
    if not layers or not all(_holds(form, layer) for layer in layers.values()):
        return False
    sized = {place: (layer, _shape_for(layer)) for place, layer in layers.items()}
    return form.check_model(sized).verdict is not Verdict.IMPOSSIBLE


def _holds(
    form: Format, layer: LayerScheme, shape: Shape | None = None, model_dtype: str = "BF16"
) -> bool:
    shape = shape or _shape_for(layer)
    weight = layer.weight.with_scale(form.default_scale_type(model_dtype))
    if form.check_layer(replace(layer, weight=weight), shape).verdict is Verdict.IMPOSSIBLE:
        return False
    wanted = form.stored_scheme(weight, shape)
    return compare_schemes(weight, wanted, shape, form.MIN_ZERO_POINT).verdict is Verdict.EXACT


def _shape_for(layer: LayerScheme) -> Shape:
    granularity = layer.weight.granularity
    size = granularity.size if isinstance(granularity, PerGroup) else 1
    return _WHOLE, math.lcm(_WHOLE, size)


def _check_name(key: str, engine: str | None, out: Path) -> None:
    """Refuse a name that says another kind of result than the format makes."""
    stated, suffix = format_of_name(out), load_format(key).INFO.file_suffix
    if stated and stated != key:
        for_engine = f" (--for {engine})" if engine else ""
        raise UsageError(
            f"-o {out}: the name of a GGUF file, but {key} is asked for{for_engine}",
            f"--format {GGUF}, or a name without {out.suffix}: {key} is written as a directory",
        )
    if suffix and not stated:
        place = out / f"NAME{suffix}" if out.is_dir() else out.with_name(out.name + suffix)
        raise UsageError(f"-o {out}: a GGUF file is written, and its name ends so", f"-o {place}")
    if out.suffix.lower() == ".safetensors":
        raise UsageError(
            f"-o {out}: the name of a file, but {key} is written as a directory",
            f"-o {out.with_suffix('')}",
        )
