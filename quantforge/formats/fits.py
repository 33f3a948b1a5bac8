"""Reasons why a scheme cannot be stored, which several formats share."""

from __future__ import annotations

from collections.abc import Iterable

from quantforge.errors import RefusedError
from quantforge.formats import Fit, Verdict
from quantforge.formats.configuration import within_block
from quantforge.grids import PerGroup, ScaleType, Tile, Zero
from quantforge.scheme import LayerScheme, Scheme


def grouped(scheme: Scheme, shape: tuple[int, int]) -> Fit | None:
    """Return why the columns cannot be cut into whole groups or tiles, or None."""
    if not isinstance(scheme.granularity, PerGroup | Tile):
        return None
    size, columns = scheme.group_size(shape[1]), shape[1]
    if size > 1 and columns % size == 0:
        return None
    if not scheme.integer:
        reason = f"{columns} columns are not a multiple of {size}"
        return Fit(Verdict.IMPOSSIBLE, reason, "fp8:row:sym" if scheme.bits == 8 else "")
    if size == 1:
        reason = "groups of one column: a file with scattered groups (desc_act) cannot be stored"
        return Fit(Verdict.IMPOSSIBLE, reason)
    fitting = next(number for number in range(min(size, columns), 0, -1) if columns % number == 0)
    text = f"{scheme.grid}:{f'g{fitting}' if fitting > 1 else 'row'}:{scheme.zero.value}"
    return Fit(Verdict.IMPOSSIBLE, f"{columns} columns are not a multiple of {size}", text)


def float16_scales(scheme: Scheme) -> Fit | None:
    """Return why new scales of this type cannot be stored (existing ones may convert), or None."""
    if scheme.scale in {None, ScaleType.F16}:
        return None
    return Fit(
        Verdict.IMPOSSIBLE,
        f"scales are stored as f16, not {scheme.scale}",
        f"{scheme.grid}:{scheme.granularity}:{scheme.zero.value}:f16",
    )


def integers(layer: LayerScheme) -> Fit | None:
    """Return why a layer is not integers with inputs that are not quantized, or None."""
    scheme = layer.weight
    if not scheme.integer or scheme.zero is Zero.MIN:
        nearest = f"int{8 if scheme.bits > 4 else 4}:g128:sym"
        return Fit(Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not integers on a scale", nearest)
    if layer.input is not None:
        return Fit(Verdict.IMPOSSIBLE, "quantized activations are not written", str(scheme))
    return None


def possible(module: str, fit: Fit) -> None:
    """Raise `RefusedError` for a module that a format cannot hold."""
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(f"{module}: {fit.reason}", f"use {fit.nearest}" if fit.nearest else "")


def outside_blocks(layers: Iterable[str]) -> Fit | None:
    """Return why GPTQ and AWQ files cannot hold one of these modules, or None."""
    for module in layers:
        if not within_block(module):
            reason = f"{module}: engines expect heads and embeddings of this format as they were"
            return Fit(Verdict.IMPOSSIBLE, reason, "--format compressed-tensors")
    return None
