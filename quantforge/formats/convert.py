"""One quantized tensor in the terms of another format: the same numbers, or a refusal.

Formats differ in what they can spell, not in what the numbers are. These restatements lose nothing:

* a symmetric grid is an asymmetric one whose zero point is always ``2^(b-1)``, and the other way
  round;
* a scale that serves a whole matrix, row or long group serves each of its parts when it is
  repeated;
* a scale of another type is the same scale when it converts there and back;
* a scale that was itself quantized (``double``) is the float32 that it decodes to;
* a zero point stays what it is, unless the files cannot hold it (0 in the first GPTQ layout);
* a zero point is the minimum ``-zero * scale`` where its type can hold that, and the other way
  round;
* ggml's ``q4_0``, ``q5_0`` and ``q8_0`` are integers in groups of 32 with a float16 scale, ``q4_1`` and ``q5_1`` with a
  minimum as well, as MLX has them.

The schemes alone often settle it (`express`, `fit_of_schemes`), so that `plan` knows from headers; whether *these*
scales, zero points and minima convert can only be read from their values (`fit_of_values`), before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.errors import RefusedError
from quantforge.files.safetensors import torch_dtype
from quantforge.formats import Compatibility, Format, Verdict
from quantforge.grids import PerTensor, Row, ScaleType, Tile, Zero
from quantforge.notation import parse
from quantforge.scheme import Activation, LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

_MINIMA = ("minimum", "minima")
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


# By schemes


def express(
    scheme: Scheme,
    shape: tuple[int, int],
    target: Format,
    model_dtype: str,
    activation: Activation | None = None,
) -> tuple[Compatibility, Scheme]:
    """Return the verdict from headers and the scheme with which ``target`` would hold a weight ``shape`` (out, in).

    ``model_dtype`` (F16, BF16 or F32) is that of the new artifact: some formats store scales in it.
    """
    wanted = scheme
    if scheme.integer and scheme.scale not in target.INFO.preserved_scale_types:
        wanted = replace(scheme, scale=target.default_scale_type(model_dtype))
    fit = target.check_layer(LayerScheme(wanted, activation), shape)
    if fit.verdict is Verdict.IMPOSSIBLE:
        if scheme.grid in INTEGERS:
            return express(INTEGERS[scheme.grid], shape, target, model_dtype, activation)
        if scheme.integer and scheme.zero is Zero.MIN:
            return _without_minima(scheme, shape, target, model_dtype, activation)
        return fit, wanted
    wanted = target.stored_scheme(wanted, shape)
    return fit_of_schemes(scheme, wanted, shape, target.MIN_ZERO_POINT), wanted


def _without_minima(
    scheme: Scheme,
    shape: tuple[int, int],
    target: Format,
    model_dtype: str,
    activation: Activation | None,
) -> tuple[Compatibility, Scheme]:
    """Judge and express minima as zero points: whether they are multiples of the scale is READ from the values."""
    zeros = replace(scheme, zero=Zero.INT)
    fit, wanted = express(zeros, shape, target, model_dtype, activation)
    if fit.verdict is Verdict.IMPOSSIBLE:
        return fit, wanted
    return fit_of_schemes(scheme, wanted, shape, target.MIN_ZERO_POINT), wanted


def express_layer(
    layer: LayerScheme, shape: tuple[int, int], target: Format, model_dtype: str
) -> tuple[Compatibility, LayerScheme]:
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
    verdict = Verdict.INEXACT if bare.verdict is Verdict.EXACT else Verdict.DEPENDS_ON_VALUES
    return Compatibility(verdict, "; ".join(filter(None, (bare.reason, reason)))), LayerScheme(
        weight
    )


def fit_of_schemes(
    scheme: Scheme, wanted: Scheme, shape: tuple[int, int], min_zero_point: int = 0
) -> Compatibility:
    """Return whether tensors of ``scheme`` can be restated as ``wanted``: EXACT, IMPOSSIBLE, or READ from values."""
    if scheme.grid != wanted.grid:
        return Compatibility(Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not {wanted.grid} codes")
    if not _refines(scheme, wanted, shape):
        reason = f"one scale per {wanted.granularity} is coarser than one per {scheme.granularity}"
        return Compatibility(Verdict.IMPOSSIBLE, reason)
    reasons = []
    if Zero.MIN in {scheme.zero, wanted.zero} and scheme.zero is not wanted.zero:
        reasons += _about_minima(scheme, wanted)
    elif wanted.symmetric and not scheme.symmetric:
        reasons.append(f"every zero point has to be {1 << (scheme.bits - 1)}")
    elif min_zero_point and not scheme.symmetric:
        reasons.append(f"no zero point may be below {min_zero_point}")
    old, new = scheme.scale, wanted.scale
    if new is ScaleType.DOUBLE and old is not new:
        return Compatibility(Verdict.IMPOSSIBLE, "quantizing the scales again changes them")
    if old is not None and new is not None and old not in _CONTAINS.get(new, {new}):
        reasons.append(f"every {old} scale has to be a {new} number")
    return (
        Compatibility(Verdict.DEPENDS_ON_VALUES, "; ".join(reasons))
        if reasons
        else Compatibility(Verdict.EXACT)
    )


def _about_minima(scheme: Scheme, wanted: Scheme) -> list[str]:
    if scheme.symmetric:
        return []
    if wanted.zero is Zero.MIN:
        return [f"every zero point times its scale has to be a {wanted.scale} number"]
    return ["every minimum has to be a whole number of steps below 0"]


def _tile(scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
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
    old, new = _tile(scheme, shape), _tile(wanted, shape)
    return old[0] % new[0] == 0 and old[1] % new[1] == 0


# By values


def fit_of_values(
    tensor: QuantizedTensor, wanted: Scheme, min_zero_point: int = 0
) -> Compatibility:
    """Return whether this tensor can be restated as ``wanted``: EXACT, INEXACT or IMPOSSIBLE.

    Only scales, zero points and minima are looked at.
    """
    if tensor.scheme == wanted and (wanted.symmetric or not min_zero_point):
        return Compatibility(Verdict.EXACT)
    try:
        _, reason = _restated_parameters(
            as_integers(tensor) if wanted.integer else tensor, wanted, min_zero_point
        )
    except RefusedError as error:
        return Compatibility(Verdict.IMPOSSIBLE, error.message, error.hint)
    return Compatibility(Verdict.INEXACT, reason) if reason else Compatibility(Verdict.EXACT)


def convert(
    tensor: QuantizedTensor, wanted: Scheme, min_zero_point: int = 0, *, allow_inexact: bool = False
) -> QuantizedTensor:
    """Restate ``tensor`` as ``wanted``; ``allow_inexact`` lets scales and minima round to their new type.

    Raises:
        RefusedError: it cannot be done exactly; the message says which value is in the way.
    """
    if tensor.scheme == wanted and (wanted.symmetric or not min_zero_point):
        return tensor
    if wanted.integer:
        tensor = as_integers(tensor)
    parameters, reason = _restated_parameters(tensor, wanted, min_zero_point)
    if reason and not allow_inexact:
        raise RefusedError(reason, "accept the rounded scales with --allow-inexact")
    if not wanted.integer:
        return replace(tensor, parameters=parameters, scheme=wanted)
    from quantforge.packers.bits import signed, unsigned

    codes = unsigned(tensor.codes, wanted.bits)
    if tensor.scheme.zero is Zero.MIN and wanted.zero is not Zero.MIN:
        empty = (tensor.parameters["scales"] == 0).repeat_interleave(
            codes.shape[1] // tensor.parameters["scales"].shape[1], 1
        )
        codes = codes.masked_fill(empty, 1 << (wanted.bits - 1))  # of `_whole_steps`
    codes = signed(codes, wanted.bits) if wanted.symmetric else codes
    return replace(tensor, codes=codes, parameters=parameters, scheme=wanted)


def of_input(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that go with the input of a layer."""
    from quantforge.packers.tensor import OF_INPUT

    return {key: value for key, value in parameters.items() if key in OF_INPUT}


def as_integers(tensor: QuantizedTensor) -> QuantizedTensor:
    """Name a tensor in a type of ggml by the integer grid that it is, if it is one."""
    scheme = INTEGERS.get(tensor.scheme.grid)
    return tensor if scheme is None else replace(tensor, scheme=scheme)


def _restated_parameters(
    tensor: QuantizedTensor, wanted: Scheme, min_zero_point: int
) -> tuple[dict[str, Tensor], str]:
    """Return the restated parameters, and what makes them inexact ("" when nothing does)."""
    parameters, scheme, shape = tensor.parameters, tensor.scheme, tensor.shape
    fit = fit_of_schemes(scheme, wanted, shape, min_zero_point)
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(fit.reason, "keep the scheme, or quantize again from the source")
    scales = parameters["scales"]
    if scheme.scale is ScaleType.DOUBLE:
        from quantforge.packers.nf4 import unnest

        scales = unnest(parameters)
    scales, reason = _scales(scales, wanted)
    restated = of_input(parameters)
    restated["scales"] = _repeated(scales, scheme, wanted, shape)
    if wanted.zero is Zero.MIN:
        mins, inexact = _mins(parameters, scheme, wanted, scales)
        restated["mins"] = _repeated(mins, scheme, wanted, shape)
        return restated, "; ".join(filter(None, (reason, inexact)))
    if not wanted.integer:
        return restated, reason
    if scheme.zero is Zero.MIN:
        parameters = {**parameters, "zeros": _whole_steps(parameters, scheme)}
    zeros = _zeros(parameters, scheme, wanted, min_zero_point)
    if zeros is not None:
        restated["zeros"] = _repeated(zeros, scheme, wanted, shape)
    return restated, reason


def _repeated(parameter: Tensor, scheme: Scheme, wanted: Scheme, shape: tuple[int, int]) -> Tensor:
    import torch

    rows, groups = wanted.parameter_shape(shape)
    if parameter.shape == (rows, groups):
        return parameter
    old, new = _tile(scheme, shape), _tile(wanted, shape)
    down = torch.arange(rows) * new[0] // old[0]
    return parameter[down][:, torch.arange(groups) * new[1] // old[1]].contiguous()


def _scales(
    scales: Tensor, wanted: Scheme, what: tuple[str, str] = ("scale", "scales")
) -> tuple[Tensor, str]:
    if wanted.scale is None:
        return scales, ""
    converted = scales.to(torch_dtype(wanted.scale.upper()))
    lost = (~converted.isfinite()) | ((converted == 0) & (scales != 0))
    if bool(lost.any()):
        raise RefusedError(
            f"a {what[0]} of {scales[lost][0].item():.3g} is outside of the range of {wanted.scale}",
            "export to a format that stores wider scales (compressed-tensors holds f32)",
        )
    changed = int((converted.double() != scales.double()).sum())
    reason = (
        f"{changed} of {scales.numel()} {what[1]} are not {wanted.scale} numbers" if changed else ""
    )
    return converted, reason


def _mins(
    parameters: Mapping[str, Tensor], scheme: Scheme, wanted: Scheme, scales: Tensor
) -> tuple[Tensor, str]:
    """Return minima in the type of ``wanted``, and what makes them inexact."""
    if scheme.zero is Zero.MIN:
        return _scales(parameters["mins"], wanted, _MINIMA)
    middle = float(1 << (scheme.bits - 1))
    zeros = parameters["zeros"].double() if "zeros" in parameters else middle
    return _scales(-zeros * scales.double(), wanted, _MINIMA)


def _whole_steps(parameters: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return the zero points that stored minima stand for; of groups of scale 0 the middle code."""
    import torch

    scales, mins = parameters["scales"].double(), parameters["mins"].double()
    steps = (-mins / torch.where(scales == 0, 1, scales)).round()
    whole = (-steps * scales == mins) & (steps >= 0) & (steps < 1 << scheme.bits)
    if not bool(whole.all()):
        raise RefusedError(
            f"{int((~whole).sum())} minima are no whole number of steps below 0",
            "--format mlx keeps the minima",
        )
    return torch.where(scales == 0, 1 << (scheme.bits - 1), steps).to(torch.uint8)


def _zeros(
    parameters: Mapping[str, Tensor], scheme: Scheme, wanted: Scheme, min_zero_point: int
) -> Tensor | None:
    import torch

    middle = 1 << (scheme.bits - 1)
    if scheme.symmetric:
        zeros = torch.full_like(parameters["scales"], middle, dtype=torch.uint8)
        return None if wanted.symmetric else zeros
    zeros = parameters["zeros"]
    if wanted.symmetric:
        if bool((zeros != middle).any()):
            raise RefusedError(
                f"zero points differ from {middle}, a symmetric grid has none",
                f"export as {wanted.grid}:{wanted.granularity}:asym",
            )
        return None
    if bool((zeros < min_zero_point).any()):
        count = int((zeros < min_zero_point).sum())
        raise RefusedError(
            f"{count} group(s) have a zero point below {min_zero_point}, which the files cannot hold",
            "use --format gptq_v2 or --format compressed-tensors",
        )
    return zeros
