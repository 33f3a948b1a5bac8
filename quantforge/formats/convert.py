"""One quantized tensor in the terms of another format: the same numbers, or a refusal.

Formats differ in what they can spell, not in what the numbers are. Four restatements lose nothing:

* a symmetric grid is an asymmetric one whose zero point is always ``2^(b-1)``, and the other way
  round;
* a scale that serves a whole matrix, row or long group serves each of its parts when it is
  repeated;
* a scale of another type is the same scale when it converts there and back;
* a zero point stays what it is, unless the files cannot hold it (0 in the first GPTQ layout).

The schemes alone often settle it (`agreement`, no torch, so `plan` can say it); whether *these*
scales and zero points convert can only be read from their values (`settle`), before anything is
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.errors import RefusedError
from quantforge.formats import Fit, Format, Verdict
from quantforge.scheme import LayerScheme, PerTensor, ScaleType, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.tensor import QuantizedTensor

# Scale types whose every value the key's type holds.
_CONTAINS = {
    ScaleType.F16: {ScaleType.F16},
    ScaleType.BF16: {ScaleType.BF16},
    ScaleType.F32: set(ScaleType),
}
TORCH_NAMES = {ScaleType.F16: "float16", ScaleType.BF16: "bfloat16", ScaleType.F32: "float32"}


def express(
    scheme: Scheme, shape: tuple[int, int], target: Format, model_dtype: str
) -> tuple[Fit, Scheme]:
    """Return the verdict from headers and the scheme with which ``target`` holds a weight.

    ``model_dtype`` (F16, BF16 or F32) is that of the new artifact: some formats store scales in it.
    """
    wanted = replace(scheme, scale=target.scale_type(model_dtype))
    fit = target.check(LayerScheme(wanted), shape)
    if fit.verdict is Verdict.IMPOSSIBLE:
        return fit, wanted
    wanted = target.native(wanted, shape)
    return agreement(scheme, wanted, shape, target.LEAST_ZERO), wanted


def agreement(scheme: Scheme, wanted: Scheme, shape: tuple[int, int], least_zero: int = 0) -> Fit:
    """Return whether tensors of ``scheme`` can be restated as ``wanted``, from schemes alone."""
    if scheme.grid != wanted.grid:
        return Fit(Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not {wanted.grid} codes")
    if not _refines(scheme, wanted, shape):
        reason = f"one scale per {wanted.granularity} is coarser than one per {scheme.granularity}"
        return Fit(Verdict.IMPOSSIBLE, reason)
    reasons = []
    if wanted.symmetric and not scheme.symmetric:
        reasons.append(f"every zero point has to be {1 << (scheme.bits - 1)}")
    elif least_zero and not scheme.symmetric:
        reasons.append(f"no zero point may be below {least_zero}")
    old, new = scheme.scale, wanted.scale
    if old is not None and new is not None and old not in _CONTAINS[new]:
        reasons.append(f"every {old} scale has to be a {new} number")
    return Fit(Verdict.READ, "; ".join(reasons)) if reasons else Fit(Verdict.EXACT)


def settle(tensor: QuantizedTensor, wanted: Scheme, least_zero: int = 0) -> Fit:
    """Return whether this tensor can be restated as ``wanted``: EXACT, INEXACT or IMPOSSIBLE.

    Only scales and zero points are looked at.
    """
    try:
        _, reason = _restated(tensor.parameters, tensor.scheme, wanted, tensor.shape, least_zero)
    except RefusedError as error:
        return Fit(Verdict.IMPOSSIBLE, error.message, error.hint)
    return Fit(Verdict.INEXACT, reason) if reason else Fit(Verdict.EXACT)


def convert(
    tensor: QuantizedTensor, wanted: Scheme, least_zero: int = 0, *, allow_inexact: bool = False
) -> QuantizedTensor:
    """Restate ``tensor`` as ``wanted``; ``allow_inexact`` lets scales round to their new type.

    Raises:
        RefusedError: it cannot be done exactly; the message says which value is in the way.
    """
    if tensor.scheme == wanted and (wanted.symmetric or not least_zero):
        return tensor
    from quantforge.packers.bits import signed, unsigned
    from quantforge.tensor import QuantizedTensor

    parameters, reason = _restated(
        tensor.parameters, tensor.scheme, wanted, tensor.shape, least_zero
    )
    if reason and not allow_inexact:
        raise RefusedError(reason, "accept the rounded scales with --allow-inexact")
    codes = unsigned(tensor.codes, wanted.bits)
    return QuantizedTensor(
        signed(codes, wanted.bits) if wanted.symmetric else codes, parameters, wanted
    )


def _refines(scheme: Scheme, wanted: Scheme, shape: tuple[int, int]) -> bool:
    old, new = scheme.group_size(shape[1]), wanted.group_size(shape[1])
    wanted_whole = isinstance(wanted.granularity, PerTensor)
    return old % new == 0 and (not wanted_whole or isinstance(scheme.granularity, PerTensor))


def _restated(
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    wanted: Scheme,
    shape: tuple[int, int],
    least_zero: int,
) -> tuple[dict[str, Tensor], str]:
    """Return the restated parameters, and what makes them inexact ("" when nothing does)."""
    fit = agreement(scheme, wanted, shape, least_zero)
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(fit.reason, "keep the scheme, or quantize again from the source")
    scales, reason = _scales(parameters["scales"], wanted)
    restated = {"scales": _repeated(scales, wanted, shape)}
    zeros = _zeros(parameters, scheme, wanted, least_zero)
    if zeros is not None:
        restated["zeros"] = _repeated(zeros, wanted, shape)
    return restated, reason


def _repeated(parameter: Tensor, wanted: Scheme, shape: tuple[int, int]) -> Tensor:
    rows, groups = wanted.parameter_shape(shape)
    parts = groups // parameter.shape[1]
    return parameter.expand(rows, -1).repeat_interleave(parts, dim=1).contiguous()


def _scales(scales: Tensor, wanted: Scheme) -> tuple[Tensor, str]:
    import torch

    if wanted.scale is None:
        return scales, ""
    converted = scales.to(getattr(torch, TORCH_NAMES[wanted.scale]))
    lost = (~converted.isfinite()) | ((converted == 0) & (scales != 0))
    if bool(lost.any()):
        raise RefusedError(
            f"a scale of {scales[lost][0].item():.3g} is outside of the range of {wanted.scale}",
            "export to a format that stores wider scales (compressed-tensors holds f32)",
        )
    changed = int((converted.double() != scales.double()).sum())
    reason = (
        f"{changed} of {scales.numel()} scales are not {wanted.scale} numbers" if changed else ""
    )
    return converted, reason


def _zeros(
    parameters: Mapping[str, Tensor], scheme: Scheme, wanted: Scheme, least_zero: int
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
    if bool((zeros < least_zero).any()):
        count = int((zeros < least_zero).sum())
        raise RefusedError(
            f"{count} group(s) have a zero point below {least_zero}, which the files cannot hold",
            "use --format gptq_v2 or --format compressed-tensors",
        )
    return zeros
