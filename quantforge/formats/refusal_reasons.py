"""Reasons, shared by several formats, why a scheme or a mix of schemes cannot be stored.

Formats whose configuration has a single ``group_size`` hold one in a whole model. A model quantized with several group
sizes fits such a format once its larger groups are split: the scale of a group of 128 columns is repeated for two
groups of 64, and the decoded weights stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quantforge.errors import RefusedError
from quantforge.formats import Compatibility, Verdict
from quantforge.formats.configuration import name_within_block
from quantforge.grids import DEFAULT_GROUP_SIZE, PerGroup, ScaleType, Tile, Zero
from quantforge.scheme import LayerScheme, Scheme


def check_whole_groups(scheme: Scheme, shape: tuple[int, int]) -> Compatibility | None:
    """Return why the columns cannot be split into whole groups or tiles, or None."""
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
    largest_divisor = next(
        number for number in range(min(size, columns), 0, -1) if columns % number == 0
    )
    nearest = f"{scheme.grid}:{f'g{largest_divisor}' if largest_divisor > 1 else 'row'}:{scheme.zero.value}"
    return Compatibility(
        Verdict.IMPOSSIBLE, f"{columns} columns are not a multiple of {size}", nearest
    )


def check_float16_scales(scheme: Scheme) -> Compatibility | None:
    """Return why new scales of this type cannot be stored (existing ones may convert), or None."""
    if scheme.scale in {None, ScaleType.F16}:
        return None
    return Compatibility(
        Verdict.IMPOSSIBLE,
        f"scales are stored as f16, not {scheme.scale}",
        f"{scheme.grid}:{scheme.granularity}:{scheme.zero.value}:f16",
    )


def check_weight_only_integers(layer: LayerScheme) -> Compatibility | None:
    """Return why a layer is not integer weights with unquantized inputs, or None."""
    scheme = layer.weight
    if not scheme.integer or scheme.zero is Zero.MIN:
        nearest = f"int{8 if scheme.bits > 4 else 4}:g{DEFAULT_GROUP_SIZE}:sym"
        return Compatibility(
            Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not integers on a scale", nearest
        )
    if layer.input is not None:
        return Compatibility(
            Verdict.IMPOSSIBLE, "quantized activations are not written", str(scheme)
        )
    return None


def require_possible(module: str, compatibility: Compatibility) -> None:
    """Raise `RefusedError` if a format cannot hold a module."""
    if compatibility.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{module}: {compatibility.reason}",
            f"use {compatibility.nearest}" if compatibility.nearest else "",
        )


def check_inside_blocks(layers: Iterable[str]) -> Compatibility | None:
    """Return why GPTQ and AWQ files cannot hold a module outside of the blocks, or None."""
    for module in layers:
        if not name_within_block(module):
            reason = f"{module}: engines expect heads and embeddings of this format as they were"
            return Compatibility(Verdict.IMPOSSIBLE, reason, "--format compressed-tensors")
    return None


# One group size for a whole model


COMMON_GROUP_SIZES = (128, 64, 32, 16)  # sizes that engines have kernels for, the largest first
Shape = tuple[int, int]


def config_group_size(scheme: Scheme) -> int:
    """Return the ``group_size`` for the configuration: -1 means one scale per row."""
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else -1


def largest_common_group_size(sizes: Iterable[int]) -> int | None:
    """Return the largest of `COMMON_GROUP_SIZES` that divides all sizes, None if none does."""
    sizes = tuple(sizes)
    return next(
        (
            group_size
            for group_size in COMMON_GROUP_SIZES
            if all(size % group_size == 0 for size in sizes)
        ),
        None,
    )


def check_single_group_size(schemes: Mapping[str, tuple[Scheme, Shape]]) -> Compatibility | None:
    """Return why these modules cannot share one group size, or None if they do.

    Args:
        schemes: by module name, each as the files would hold it, with the shape ``(out, in)`` of the matrix.
    """
    modules: dict[int, list[str]] = {}
    for module, (scheme, _) in schemes.items():
        modules.setdefault(config_group_size(scheme), []).append(module)
    if len(modules) < 2:
        return None
    size_text = " and ".join(
        f"{size if size > 0 else 'one per row'} ({summarize_names(names)})"
        for size, names in sorted(modules.items())
    )
    scheme = next(iter(schemes.values()))[0]
    size = largest_common_group_size(shape[1] for _, shape in schemes.values())
    scheme_text = f"{scheme.grid}:{f'g{size}' if size else 'row'}:{scheme.zero.value}"
    hint = f"quantize all layers with one (--scheme {scheme_text}), or --format compressed-tensors, which mixes them"
    return Compatibility(
        Verdict.IMPOSSIBLE, f"one group size for the whole model, not {size_text}", hint
    )


def summarize_names(names: Sequence[str]) -> str:
    """Return the first name and how many more there are, for a message."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def common_split_size(layers: Iterable[tuple[LayerScheme, Shape]]) -> int | None:
    """Return the group size to which all layers can be split; None if sizes are equal or none divides all.

    ``layers`` are schemes as the files would hold them, with the shapes ``(out, in)`` of the matrices.
    """
    layers = tuple(layers)
    if len({config_group_size(layer.weight) for layer, _ in layers}) < 2:
        return None
    return largest_common_group_size(layer.weight.group_size(shape[1]) for layer, shape in layers)
