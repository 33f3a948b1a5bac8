"""Methods: transforms, which rewrite the model so that it rounds better, then one rounder.

``awq`` is ``awq+rtn``; ``awq+gptq`` runs GPTQ on the transformed weights. A module of this package is either a
rounder (it has ``NEEDS`` and ``round_weight``) or a transform (``NEEDS`` and ``apply``). The table holds module
paths as text, so that planning imports no torch; adding a method is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantforge.errors import UsageError, nearest
from quantforge.events import Event
from quantforge.scheme import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.tensor import QuantizedTensor

ROUNDERS: Mapping[str, str] = {
    "rtn": "quantforge.quantizers.rtn",
    "gptq": "quantforge.quantizers.gptq",
}
TRANSFORMS: Mapping[str, str] = {
    "awq": "quantforge.quantizers.awq",
    "smooth": "quantforge.quantizers.smooth",
}
COMPILED_FROM = 1 << 21  # weights rounded together from which gptq compiles its inner loops


class Statistic(StrEnum):
    """What a method wants to know about the activation that a shared input reads."""

    SQUARES = "squares"  # mean of x^2 per column: importance
    HESSIAN = "hessian"  # mean of x x^T
    PEAKS = "peaks"  # largest |x| per column
    HISTOGRAM = "histogram"  # counts of |x|, for a static range
    CACHE = "cache"  # largest key and value of each head: of a block, not of a shared input


# What each method needs, here and not in its module so that planning imports no torch.
NEEDS: Mapping[str, frozenset[Statistic]] = {
    "rtn": frozenset(),
    "gptq": frozenset({Statistic.HESSIAN}),
    "awq": frozenset({Statistic.SQUARES}),
    "smooth": frozenset({Statistic.PEAKS}),
}


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What was observed of one shared input, over ``tokens`` calibration tokens.

    Attributes:
        tokens: how many activation rows were seen.
        squares: float32 ``[in_features]``, mean of x^2, or None when it was not asked for.
        hessian: float32 ``[in_features, in_features]``, mean of x x^T: summed first, divided once.
        peaks: float32 ``[in_features]``, largest of |x|.
        histogram: int64, see `quantforge.packers.inputs.histogram`.
    """

    tokens: int = 0
    squares: Tensor | None = None
    hessian: Tensor | None = None
    peaks: Tensor | None = None
    histogram: Tensor | None = None

    @property
    def importance(self) -> Tensor | None:
        """The diagonal of the Hessian, from whichever statistic holds it."""
        return self.squares if self.hessian is None else self.hessian.diagonal()


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """One rounded matrix with what there is to tell about it.

    ``figures`` are plain numbers for progress lines and the manifest, e.g. ``{"error": 0.0031}`` (relative error
    under the method's objective).
    """

    tensor: QuantizedTensor
    events: tuple[Event, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


def parse_method(text: str) -> tuple[tuple[str, ...], str]:
    """Split ``awq+gptq`` into its transforms and its rounder; a method without rounder ends in ``rtn``.

    Raises:
        UsageError: an unknown word, two rounders, or a transform after the rounder.
    """
    words = text.lower().split("+")
    for word in words:
        if word not in ROUNDERS and word not in TRANSFORMS:
            raise UsageError(
                f"unknown method '{word}' in '{text}'", nearest(word, [*ROUNDERS, *TRANSFORMS])
            )
    rounder = words.pop() if words[-1] in ROUNDERS else "rtn"
    if any(word in ROUNDERS for word in words) or len(set(words)) != len(words):
        raise UsageError(
            f"method '{text}': transforms come first, then one rounder", "e.g. --method awq+gptq"
        )
    return tuple(words), rounder


def needs(method: str, *, importance: bool = False) -> frozenset[Statistic]:
    """Return the statistics that ``method`` needs; ``importance`` adds the squares for a scale search."""
    transforms, rounder = parse_method(method)
    wanted = NEEDS[rounder].union(*(NEEDS[word] for word in transforms))
    if importance and Statistic.HESSIAN not in wanted:
        wanted |= {Statistic.SQUARES}
    return wanted


def of_inputs(inputs: Iterable[Activation | None]) -> frozenset[Statistic]:
    """Return what has to be observed for inputs that are quantized so."""
    wanted: set[Statistic] = set()
    for activation in inputs:
        if activation is not None and not activation.dynamic:
            wanted |= {Statistic.PEAKS, Statistic.HISTOGRAM}
        elif activation is not None and activation.threshold is not None:
            wanted.add(Statistic.PEAKS)
    return frozenset(wanted)


def measured(activation: Activation | None) -> bool:
    """Whether calibration has to look at an input: its range, or the columns that are kept in 16 bits."""
    return activation is not None and (not activation.dynamic or activation.kept > 0)


def module_of(name: str) -> ModuleType | Any:
    """Import the module of a rounder or transform."""
    return import_module({**ROUNDERS, **TRANSFORMS}[name])
