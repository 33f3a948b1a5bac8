"""Reasons why a scheme, or a mixture of schemes, cannot be stored, which several formats share.

Formats whose configuration has a single ``group_size`` hold one in a whole model. A model quantized with several group
sizes fits such a format once its larger groups are split: the scale of a group of 128 columns is repeated for two
groups of 64, and the decoded weights stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quantforge.errors import RefusedError
from quantforge.formats import Compatibility, Verdict
from quantforge.formats.configuration import within_block
from quantforge.grids import PerGroup, ScaleType, Tile, Zero
from quantforge.scheme import LayerScheme, Scheme


def grouped(scheme: Scheme, shape: tuple[int, int]) -> Compatibility | None:
    """Return why the columns cannot be cut into whole groups or tiles, or None."""
    if not isinstance(scheme.granularity, PerGroup | Tile):
        return None
    size, columns = scheme.group_size(shape[1]), shape[1]
    if size > 1 and columns % size == 0:
        return None
    if not scheme.integer:
        reason = f"{columns} columns are not a multiple of {size}"
        return Compatibility(Verdict.IMPOSSIBLE, reason, "fp8:row:sym" if scheme.bits == 8 else "")
    if size == 1:
        reason = "groups of one column: a file with scattered groups (desc_act) cannot be stored"
        return Compatibility(Verdict.IMPOSSIBLE, reason)
    fitting = next(number for number in range(min(size, columns), 0, -1) if columns % number == 0)
    text = f"{scheme.grid}:{f'g{fitting}' if fitting > 1 else 'row'}:{scheme.zero.value}"
    return Compatibility(
        Verdict.IMPOSSIBLE, f"{columns} columns are not a multiple of {size}", text
    )


def float16_scales(scheme: Scheme) -> Compatibility | None:
    """Return why new scales of this type cannot be stored (existing ones may convert), or None."""
    if scheme.scale in {None, ScaleType.F16}:
        return None
    return Compatibility(
        Verdict.IMPOSSIBLE,
        f"scales are stored as f16, not {scheme.scale}",
        f"{scheme.grid}:{scheme.granularity}:{scheme.zero.value}:f16",
    )


def integers(layer: LayerScheme) -> Compatibility | None:
    """Return why a layer is not integers with inputs that are not quantized, or None."""
    scheme = layer.weight
    if not scheme.integer or scheme.zero is Zero.MIN:
        nearest = f"int{8 if scheme.bits > 4 else 4}:g128:sym"
        return Compatibility(
            Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not integers on a scale", nearest
        )
    if layer.input is not None:
        return Compatibility(
            Verdict.IMPOSSIBLE, "quantized activations are not written", str(scheme)
        )
    return None


def possible(module: str, fit: Compatibility) -> None:
    """Raise `RefusedError` for a module that a format cannot hold."""
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(f"{module}: {fit.reason}", f"use {fit.nearest}" if fit.nearest else "")


def outside_blocks(layers: Iterable[str]) -> Compatibility | None:
    """Return why GPTQ and AWQ files cannot hold one of these modules, or None."""
    for module in layers:
        if not within_block(module):
            reason = f"{module}: engines expect heads and embeddings of this format as they were"
            return Compatibility(Verdict.IMPOSSIBLE, reason, "--format compressed-tensors")
    return None


# One group size for a whole model


USUAL_GROUPS = (128, 64, 32, 16)  # sizes that engines have kernels for, the largest first
Shape = tuple[int, int]


def stated_size(scheme: Scheme) -> int:
    """Return the ``group_size`` to write for a scheme: -1 means one scale per row."""
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else -1


def largest_group(sizes: Iterable[int]) -> int | None:
    """Return the largest of `USUAL_GROUPS` that divides all of these sizes, None if none does."""
    sizes = tuple(sizes)
    return next((one for one in USUAL_GROUPS if all(size % one == 0 for size in sizes)), None)


def differing_groups(schemes: Mapping[str, tuple[Scheme, Shape]]) -> Compatibility | None:
    """Return why these modules cannot be written with one group size; None if all have the same one.

    Args:
        schemes: by module name, each as the files would hold it, with the shape ``(out, in)`` of the matrix.
    """
    modules: dict[int, list[str]] = {}
    for module, (scheme, _) in schemes.items():
        modules.setdefault(stated_size(scheme), []).append(module)
    if len(modules) < 2:
        return None
    shown = " and ".join(
        f"{size if size > 0 else 'one per row'} ({named(found)})"
        for size, found in sorted(modules.items())
    )
    scheme = next(iter(schemes.values()))[0]
    size = largest_group(shape[1] for _, shape in schemes.values())
    same = f"{scheme.grid}:{f'g{size}' if size else 'row'}:{scheme.zero.value}"
    hint = f"quantize all layers with one (--scheme {same}), or --format compressed-tensors, which mixes them"
    return Compatibility(
        Verdict.IMPOSSIBLE, f"one group size for the whole model, not {shown}", hint
    )


def named(names: Sequence[str]) -> str:
    """Return the first name and the number of the others, for a message."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def split_group(layers: Iterable[tuple[LayerScheme, Shape]]) -> int | None:
    """Return the one group size that all matrices can be split to exactly; None if all sizes are equal, or none fits.

    ``layers`` are schemes as the files would hold them, with the shapes ``(out, in)`` of the matrices.
    """
    layers = tuple(layers)
    if len({stated_size(layer.weight) for layer, _ in layers}) < 2:
        return None
    return largest_group(layer.weight.group_size(shape[1]) for layer, shape in layers)
