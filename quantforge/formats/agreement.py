"""Agreement of two schemes: can tensors of one be restated in the other, as far as the schemes alone tell?

`plan` asks this, from headers; where the answer is that the values decide, `quantforge.formats.convert` reads them.
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.formats import Fit, Format, Verdict
from quantforge.grids import PerTensor, Row, ScaleType, Tile, Zero
from quantforge.notation import parse
from quantforge.scheme import Activation, LayerScheme, Scheme

# Scale types whose every value the key's type holds.
_CONTAINS = {
    ScaleType.F16: {ScaleType.F16},
    ScaleType.BF16: {ScaleType.BF16},
    ScaleType.F32: {ScaleType.F16, ScaleType.BF16, ScaleType.F32, ScaleType.DOUBLE},
}
# Types of ggml whose numbers are those of an integer grid with a float16 scale (and minimum) for 32 columns.
INTEGERS = {
    **{f"q{bits}_0": parse(f"int{bits}:g32:sym:f16") for bits in (4, 5, 8)},
    **{f"q{bits}_1": parse(f"int{bits}:g32:min:f16") for bits in (4, 5)},
}


def express(
    scheme: Scheme,
    shape: tuple[int, int],
    target: Format,
    model_dtype: str,
    activation: Activation | None = None,
) -> tuple[Fit, Scheme]:
    """Return the verdict from headers and the scheme with which ``target`` would hold a weight ``shape`` (out, in).

    ``model_dtype`` (F16, BF16 or F32) is that of the new artifact: some formats store scales in it.
    """
    wanted = scheme
    if scheme.integer and scheme.scale not in target.ABOUT.scale_types:
        wanted = replace(scheme, scale=target.scale_type(model_dtype))
    fit = target.check(LayerScheme(wanted, activation), shape)
    if fit.verdict is Verdict.IMPOSSIBLE:
        if scheme.grid in INTEGERS:
            return express(INTEGERS[scheme.grid], shape, target, model_dtype, activation)
        if scheme.integer and scheme.zero is Zero.MIN:
            return _without_minima(scheme, shape, target, model_dtype, activation)
        return fit, wanted
    wanted = target.native(wanted, shape)
    return agreement(scheme, wanted, shape, target.LEAST_ZERO), wanted


def _without_minima(
    scheme: Scheme,
    shape: tuple[int, int],
    target: Format,
    model_dtype: str,
    activation: Activation | None,
) -> tuple[Fit, Scheme]:
    """Judge and express minima as zero points: whether they are multiples of the scale is READ from the values."""
    zeros = replace(scheme, zero=Zero.INT)
    fit, wanted = express(zeros, shape, target, model_dtype, activation)
    if fit.verdict is Verdict.IMPOSSIBLE:
        return fit, wanted
    return agreement(scheme, wanted, shape, target.LEAST_ZERO), wanted


def express_layer(
    layer: LayerScheme, shape: tuple[int, int], target: Format, model_dtype: str
) -> tuple[Fit, LayerScheme]:
    """Do what `express` does, and where ``target`` has no such inputs try the weight alone.

    That is INEXACT, or READ where the values decide: the decoded weights may be the same, what is computed with them is
    not.
    """
    fit, weight = express(layer.weight, shape, target, model_dtype, layer.input)
    if fit.verdict is not Verdict.IMPOSSIBLE or layer.input is None:
        return fit, LayerScheme(weight, layer.input)
    bare, weight = express(layer.weight, shape, target, model_dtype)
    if bare.verdict is Verdict.IMPOSSIBLE:
        return fit, layer
    reason = f"inputs are no longer quantized ({layer.input})"
    reason += ", the columns kept in 16 bits are those of 8" if layer.input.kept else ""
    verdict = Verdict.INEXACT if bare.verdict is Verdict.EXACT else Verdict.READ
    return Fit(verdict, "; ".join(filter(None, (bare.reason, reason)))), LayerScheme(weight)


def agreement(scheme: Scheme, wanted: Scheme, shape: tuple[int, int], least_zero: int = 0) -> Fit:
    """Return whether tensors of ``scheme`` can be restated as ``wanted``: EXACT, IMPOSSIBLE, or READ from values."""
    if scheme.grid != wanted.grid:
        return Fit(Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not {wanted.grid} codes")
    if not _refines(scheme, wanted, shape):
        reason = f"one scale per {wanted.granularity} is coarser than one per {scheme.granularity}"
        return Fit(Verdict.IMPOSSIBLE, reason)
    reasons = []
    if Zero.MIN in {scheme.zero, wanted.zero} and scheme.zero is not wanted.zero:
        reasons += _about_minima(scheme, wanted)
    elif wanted.symmetric and not scheme.symmetric:
        reasons.append(f"every zero point has to be {1 << (scheme.bits - 1)}")
    elif least_zero and not scheme.symmetric:
        reasons.append(f"no zero point may be below {least_zero}")
    old, new = scheme.scale, wanted.scale
    if new is ScaleType.DOUBLE and old is not new:
        return Fit(Verdict.IMPOSSIBLE, "quantizing the scales again changes them")
    if old is not None and new is not None and old not in _CONTAINS.get(new, {new}):
        reasons.append(f"every {old} scale has to be a {new} number")
    return Fit(Verdict.READ, "; ".join(reasons)) if reasons else Fit(Verdict.EXACT)


def _about_minima(scheme: Scheme, wanted: Scheme) -> list[str]:
    if scheme.symmetric:
        return []
    if wanted.zero is Zero.MIN:
        return [f"every zero point times its scale has to be a {wanted.scale} number"]
    return ["every minimum has to be a whole number of steps below 0"]


def tile(scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
    """Return how many rows and columns share a scale."""
    match scheme.granularity:
        case Tile(rows, columns):
            return rows, columns
        case PerTensor():
            return shape
        case Row():
            return 1, shape[1]
        case _:
            return 1, scheme.group_size(shape[1])


def _refines(scheme: Scheme, wanted: Scheme, shape: tuple[int, int]) -> bool:
    whole = isinstance(scheme.granularity, PerTensor)
    if whole or isinstance(wanted.granularity, PerTensor):
        return whole
    old, new = tile(scheme, shape), tile(wanted, shape)
    return old[0] % new[0] == 0 and old[1] % new[1] == 0
