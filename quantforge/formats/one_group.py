"""One group size for a whole model, as formats require whose configuration has a single ``group_size``.

A model quantized with several group sizes fits such a format once its larger groups are split: the scale of a group of
128 columns is repeated for two groups of 64, and the decoded weights stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quantforge.formats import Fit, Verdict
from quantforge.grids import PerGroup
from quantforge.scheme import LayerScheme, Scheme

USUAL_GROUPS = (128, 64, 32, 16)  # sizes that engines have kernels for, the largest first
Shape = tuple[int, int]


def stated_size(scheme: Scheme) -> int:
    """Return the ``group_size`` to write for a scheme: -1 means one scale per row."""
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else -1


def largest_group(sizes: Iterable[int]) -> int | None:
    """Return the largest of `USUAL_GROUPS` that divides all of these sizes, None if none does."""
    sizes = tuple(sizes)
    return next((one for one in USUAL_GROUPS if all(size % one == 0 for size in sizes)), None)


def differing_groups(schemes: Mapping[str, tuple[Scheme, Shape]]) -> Fit | None:
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
    return Fit(Verdict.IMPOSSIBLE, f"one group size for the whole model, not {shown}", hint)


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
