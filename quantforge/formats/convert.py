"""Convert a quantized tensor to another format's scheme without changing its values, or refuse.

Formats differ in what they can express, not in what the numbers are. These conversions lose nothing:

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

The schemes alone often decide (`scheme_in_format`, `compare_schemes`), so that `plan` needs only headers. Otherwise the
values of scales, zero points and minima decide (`compare_values`), before anything is written.
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

_MINIMUM_WORDS = ("minimum", "minima")
# Scale types whose every value the key's type holds.
_EXACTLY_CONTAINS = {
    ScaleType.F16: {ScaleType.F16},
    ScaleType.BF16: {ScaleType.BF16},
    ScaleType.F32: {ScaleType.F16, ScaleType.BF16, ScaleType.F32, ScaleType.DOUBLE},
}
# Types of ggml whose numbers are those of an integer grid with a float16 scale (and minimum) for 32 columns.
GGML_INTEGER_SCHEMES = {
    **{f"q{bits}_0": parse(f"int{bits}:g32:sym:f16") for bits in (4, 5, 8)},
    **{f"q{bits}_1": parse(f"int{bits}:g32:min:f16") for bits in (4, 5)},
}


# By schemes


def scheme_in_format(
    scheme: Scheme,
    shape: tuple[int, int],
    target_format: Format,
    model_dtype: str,
    activation: Activation | None = None,
) -> tuple[Compatibility, Scheme]:
    """Return whether ``target_format`` can hold a weight of ``shape`` (out, in), and the scheme it would have there.

    ``model_dtype`` (F16, BF16 or F32) is that of the new artifact: some formats store scales in it.
    """
    target_scheme = scheme
    if scheme.integer and scheme.scale not in target_format.INFO.preserved_scale_types:
        target_scheme = replace(scheme, scale=target_format.default_scale_type(model_dtype))
    compatibility = target_format.check_layer(LayerScheme(target_scheme, activation), shape)
    if compatibility.verdict is Verdict.IMPOSSIBLE:
        if scheme.grid in GGML_INTEGER_SCHEMES:
            return scheme_in_format(
                GGML_INTEGER_SCHEMES[scheme.grid], shape, target_format, model_dtype, activation
            )
        if scheme.integer and scheme.zero is Zero.MIN:
            return _minima_as_zero_points(scheme, shape, target_format, model_dtype, activation)
        return compatibility, target_scheme
    target_scheme = target_format.stored_scheme(target_scheme, shape)
    return compare_schemes(
        scheme, target_scheme, shape, target_format.MIN_ZERO_POINT
    ), target_scheme


def _minima_as_zero_points(
    scheme: Scheme,
    shape: tuple[int, int],
    target_format: Format,
    model_dtype: str,
    activation: Activation | None,
) -> tuple[Compatibility, Scheme]:
    """Do as `scheme_in_format`, with zero points instead of minima; whether they are integers depends on values."""
    zeros = replace(scheme, zero=Zero.INT)
    compatibility, target_scheme = scheme_in_format(
        zeros, shape, target_format, model_dtype, activation
    )
    if compatibility.verdict is Verdict.IMPOSSIBLE:
        return compatibility, target_scheme
    return compare_schemes(
        scheme, target_scheme, shape, target_format.MIN_ZERO_POINT
    ), target_scheme


def layer_scheme_in_format(
    layer: LayerScheme, shape: tuple[int, int], target_format: Format, model_dtype: str
) -> tuple[Compatibility, LayerScheme]:
    """Do as `scheme_in_format`; if ``target_format`` lacks such quantized inputs, try with unquantized inputs.

    That is INEXACT, or READ where the values decide: the decoded weights may be the same, what is computed with them is
    not.
    """
    compatibility, weight = scheme_in_format(
        layer.weight, shape, target_format, model_dtype, layer.input
    )
    if compatibility.verdict is not Verdict.IMPOSSIBLE or layer.input is None:
        return compatibility, LayerScheme(weight, layer.input)
    weight_only, weight = scheme_in_format(layer.weight, shape, target_format, model_dtype)
    if weight_only.verdict is Verdict.IMPOSSIBLE:
        return compatibility, layer
    reason = f"inputs are no longer quantized ({layer.input})"
    reason += (
        ", the columns kept in 16 bits are those of 8" if layer.input.max_outlier_columns else ""
    )
    verdict = Verdict.INEXACT if weight_only.verdict is Verdict.EXACT else Verdict.DEPENDS_ON_VALUES
    return Compatibility(
        verdict, "; ".join(filter(None, (weight_only.reason, reason)))
    ), LayerScheme(weight)


def compare_schemes(
    scheme: Scheme, target: Scheme, shape: tuple[int, int], min_zero_point: int = 0
) -> Compatibility:
    """Return whether tensors of ``scheme`` convert to ``target``: EXACT, IMPOSSIBLE or DEPENDS_ON_VALUES."""
    if scheme.grid != target.grid:
        return Compatibility(Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not {target.grid} codes")
    if not _is_finer(scheme, target, shape):
        reason = f"one scale per {target.granularity} is coarser than one per {scheme.granularity}"
        return Compatibility(Verdict.IMPOSSIBLE, reason)
    reasons = []
    if Zero.MIN in {scheme.zero, target.zero} and scheme.zero is not target.zero:
        reasons += _minima_conditions(scheme, target)
    elif target.symmetric and not scheme.symmetric:
        reasons.append(f"every zero point has to be {1 << (scheme.bits - 1)}")
    elif min_zero_point and not scheme.symmetric:
        reasons.append(f"no zero point may be below {min_zero_point}")
    source_scale, target_scale = scheme.scale, target.scale
    if target_scale is ScaleType.DOUBLE and source_scale is not target_scale:
        return Compatibility(Verdict.IMPOSSIBLE, "quantizing the scales again changes them")
    if (
        source_scale is not None
        and target_scale is not None
        and source_scale not in _EXACTLY_CONTAINS.get(target_scale, {target_scale})
    ):
        reasons.append(f"every {source_scale} scale has to be a {target_scale} number")
    return (
        Compatibility(Verdict.DEPENDS_ON_VALUES, "; ".join(reasons))
        if reasons
        else Compatibility(Verdict.EXACT)
    )


def _minima_conditions(scheme: Scheme, target: Scheme) -> list[str]:
    if scheme.symmetric:
        return []
    if target.zero is Zero.MIN:
        return [f"every zero point times its scale has to be a {target.scale} number"]
    return ["every minimum has to be a whole number of steps below 0"]


def _tile_shape(scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
    """Return how many rows and columns share one scale."""
    match scheme.granularity:
        case Tile(rows, columns):
            return rows, columns
        case PerTensor():
            return shape
        case Row():
            return 1, shape[1]
        case _:
            return 1, scheme.group_size(shape[1])


def _is_finer(scheme: Scheme, target: Scheme, shape: tuple[int, int]) -> bool:
    is_per_tensor = isinstance(scheme.granularity, PerTensor)
    if is_per_tensor or isinstance(target.granularity, PerTensor):
        return is_per_tensor
    source_tile, target_tile = _tile_shape(scheme, shape), _tile_shape(target, shape)
    return source_tile[0] % target_tile[0] == 0 and source_tile[1] % target_tile[1] == 0


# By values


def compare_values(
    tensor: QuantizedTensor, target: Scheme, min_zero_point: int = 0
) -> Compatibility:
    """Return whether this tensor converts to the scheme ``target``: EXACT, INEXACT or IMPOSSIBLE.

    Only scales, zero points and minima are looked at.
    """
    if tensor.scheme == target and (target.symmetric or not min_zero_point):
        return Compatibility(Verdict.EXACT)
    try:
        _, reason = _convert_parameters(
            ggml_as_integers(tensor) if target.integer else tensor, target, min_zero_point
        )
    except RefusedError as error:
        return Compatibility(Verdict.IMPOSSIBLE, error.message, error.hint)
    return Compatibility(Verdict.INEXACT, reason) if reason else Compatibility(Verdict.EXACT)


def convert(
    tensor: QuantizedTensor, target: Scheme, min_zero_point: int = 0, *, allow_inexact: bool = False
) -> QuantizedTensor:
    """Convert ``tensor`` to the scheme ``target``; ``allow_inexact`` lets scales and minima be rounded.

    Raises:
        RefusedError: it cannot be done exactly; the message says which value is in the way.
    """
    if tensor.scheme == target and (target.symmetric or not min_zero_point):
        return tensor
    if target.integer:
        tensor = ggml_as_integers(tensor)
    parameters, reason = _convert_parameters(tensor, target, min_zero_point)
    if reason and not allow_inexact:
        raise RefusedError(reason, "accept the rounded scales with --allow-inexact")
    if not target.integer:
        return replace(tensor, parameters=parameters, scheme=target)
    from quantforge.packers.bits import to_signed_codes, to_unsigned_codes

    codes = to_unsigned_codes(tensor.codes, target.bits)
    if tensor.scheme.zero is Zero.MIN and target.zero is not Zero.MIN:
        zero_scales = (tensor.parameters["scales"] == 0).repeat_interleave(
            codes.shape[1] // tensor.parameters["scales"].shape[1], 1
        )
        # The code of zero for which `_minima_to_zero_points` chooses zero points
        codes = codes.masked_fill(zero_scales, 1 << (target.bits - 1))
    codes = to_signed_codes(codes, target.bits) if target.symmetric else codes
    return replace(tensor, codes=codes, parameters=parameters, scheme=target)


def input_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that belong to the layer's input."""
    from quantforge.packers.tensor import INPUT_PARAMS

    return {key: value for key, value in parameters.items() if key in INPUT_PARAMS}


def ggml_as_integers(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return a tensor of a ggml integer type with the equivalent integer scheme; others unchanged."""
    scheme = GGML_INTEGER_SCHEMES.get(tensor.scheme.grid)
    return tensor if scheme is None else replace(tensor, scheme=scheme)


def _convert_parameters(
    tensor: QuantizedTensor, target: Scheme, min_zero_point: int
) -> tuple[dict[str, Tensor], str]:
    """Return the converted parameters, and why they are inexact ("" if they are exact)."""
    parameters, scheme, shape = tensor.parameters, tensor.scheme, tensor.shape
    compatibility = compare_schemes(scheme, target, shape, min_zero_point)
    if compatibility.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            compatibility.reason, "keep the scheme, or quantize again from the source"
        )
    scales = parameters["scales"]
    if scheme.scale is ScaleType.DOUBLE:
        from quantforge.packers.nf4 import dequantize_scales

        scales = dequantize_scales(parameters)
    scales, reason = _convert_scales(scales, target)
    converted = input_parameters(parameters)
    converted["scales"] = _repeat_for_groups(scales, scheme, target, shape)
    if target.zero is Zero.MIN:
        mins, inexact = _convert_minima(parameters, scheme, target, scales)
        converted["mins"] = _repeat_for_groups(mins, scheme, target, shape)
        return converted, "; ".join(filter(None, (reason, inexact)))
    if not target.integer:
        return converted, reason
    if scheme.zero is Zero.MIN:
        parameters = {**parameters, "zeros": _minima_to_zero_points(parameters, scheme)}
    zeros = _convert_zero_points(parameters, scheme, target, min_zero_point)
    if zeros is not None:
        converted["zeros"] = _repeat_for_groups(zeros, scheme, target, shape)
    return converted, reason


def _repeat_for_groups(
    parameter: Tensor, scheme: Scheme, target: Scheme, shape: tuple[int, int]
) -> Tensor:
    import torch

    rows, groups = target.parameter_shape(shape)
    if parameter.shape == (rows, groups):
        return parameter
    source_tile, target_tile = _tile_shape(scheme, shape), _tile_shape(target, shape)
    down = torch.arange(rows) * target_tile[0] // source_tile[0]
    return parameter[down][:, torch.arange(groups) * target_tile[1] // source_tile[1]].contiguous()


def _convert_scales(
    scales: Tensor, target: Scheme, nouns: tuple[str, str] = ("scale", "scales")
) -> tuple[Tensor, str]:
    if target.scale is None:
        return scales, ""
    converted = scales.to(torch_dtype(target.scale.upper()))
    out_of_range = (~converted.isfinite()) | ((converted == 0) & (scales != 0))
    if bool(out_of_range.any()):
        raise RefusedError(
            f"a {nouns[0]} of {scales[out_of_range][0].item():.3g} is outside of the range of {target.scale}",
            "export to a format that stores wider scales (compressed-tensors holds f32)",
        )
    num_changed = int((converted.double() != scales.double()).sum())
    reason = (
        f"{num_changed} of {scales.numel()} {nouns[1]} are not {target.scale} numbers"
        if num_changed
        else ""
    )
    return converted, reason


def _convert_minima(
    parameters: Mapping[str, Tensor], scheme: Scheme, target: Scheme, scales: Tensor
) -> tuple[Tensor, str]:
    """Return minima in the type of ``target``, and why they are inexact ("" if they are exact)."""
    if scheme.zero is Zero.MIN:
        return _convert_scales(parameters["mins"], target, _MINIMUM_WORDS)
    middle = float(1 << (scheme.bits - 1))
    zeros = parameters["zeros"].double() if "zeros" in parameters else middle
    return _convert_scales(-zeros * scales.double(), target, _MINIMUM_WORDS)


def _minima_to_zero_points(parameters: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return the zero points equivalent to stored minima; the middle code for groups of scale 0."""
    import torch

    scales, mins = parameters["scales"].double(), parameters["mins"].double()
    steps = (-mins / torch.where(scales == 0, 1, scales)).round()
    is_exact = (-steps * scales == mins) & (steps >= 0) & (steps < 1 << scheme.bits)
    if not bool(is_exact.all()):
        raise RefusedError(
            f"{int((~is_exact).sum())} minima are no whole number of steps below 0",
            "--format mlx keeps the minima",
        )
    return torch.where(scales == 0, 1 << (scheme.bits - 1), steps).to(torch.uint8)


def _convert_zero_points(
    parameters: Mapping[str, Tensor], scheme: Scheme, target: Scheme, min_zero_point: int
) -> Tensor | None:
    import torch

    middle = 1 << (scheme.bits - 1)
    if scheme.symmetric:
        zeros = torch.full_like(parameters["scales"], middle, dtype=torch.uint8)
        return None if target.symmetric else zeros
    zeros = parameters["zeros"]
    if target.symmetric:
        if bool((zeros != middle).any()):
            raise RefusedError(
                f"zero points differ from {middle}, a symmetric grid has none",
                f"export as {target.grid}:{target.granularity}:asym",
            )
        return None
    if bool((zeros < min_zero_point).any()):
        count = int((zeros < min_zero_point).sum())
        raise RefusedError(
            f"{count} group(s) have a zero point below {min_zero_point}, which the files cannot hold",
            "use --format gptq_v2 or --format compressed-tensors",
        )
    return zeros
