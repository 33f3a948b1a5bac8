"""Make variants: in this process, with others that give the same command, or on a cluster, as the settings say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from quantforge.settings import Settings
from quantforge.verbs.asked_result import Variant
from quantforge.verbs.join_variants import join_variants
from quantforge.verbs.quantize_variants import quantize_variants
from quantforge.verbs.ray_variants import ray_variants


def share_of(made: int, scored: int) -> float:
    """Return the share that making variants has of a verb that then scores models, each half of the work of one."""
    return min(0.95, 2 * made / (2 * made + scored)) if made else 0.0


def make_variants(
    model: str | Path,
    variants: Sequence[Variant],
    is_there: Callable[[int], bool],
    place: Path,
    settings: Settings,
) -> list[int]:
    """Make variants that are not there, and return the numbers of those that were made for this call.

    Args:
        model: as of `quantize`.
        variants: what is wanted, each with an output of its own.
        is_there: whether another process has finished a variant, by its number.
        place: of what processes share, for `turn`.
        settings: how to run.

    Raises:
        QuantForgeError: as `quantize_variants`, `join_variants` and `ray_variants`.
    """
    if settings.join:
        return join_variants(model, variants, is_there, place, settings)
    if settings.ray:
        return ray_variants(model, variants, settings)
    quantize_variants(model, variants, settings)
    return [*range(len(variants))]
