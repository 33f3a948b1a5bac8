"""The matrix of conversions: what becomes of each kind of numbers that a format holds in every other format.

It is computed from the same functions that an export runs, for a matrix of `SHAPE` in a bfloat16 model: nothing here is
stated twice. ``read`` means that the headers do not settle it and the scales and zero points do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from quantforge.formats import FORMATS, PLAIN, Fit, Verdict, format_of
from quantforge.formats.agreement import express_layer
from quantforge.notation import parse_layer
from quantforge.scheme import LayerScheme

SHAPE = (512, 512)
DTYPE = "BF16"


class Word(StrEnum):
    """A verdict, as the table shows it."""

    EXACT = "exact"
    INEXACT = "inexact"
    IMPOSSIBLE = "no"
    READ = "values"
    SAME = "="


@dataclass(frozen=True, slots=True)
class Cell:
    """One conversion."""

    source: str
    scheme: LayerScheme
    target: str
    fit: Fit

    @property
    def word(self) -> Word:
        """Return the verdict as the table shows it; ``=`` where the files stay what they are."""
        return Word.SAME if self.source == self.target else Word[self.fit.verdict.name]


def conversion(scheme: LayerScheme, target: str) -> tuple[Fit, LayerScheme]:
    """Return the verdict on a layer and the scheme that it gets in the format ``target``."""
    if target == PLAIN:
        return Fit(
            Verdict.READ, "every decoded weight has to be a number of the model's type"
        ), scheme
    return express_layer(scheme, SHAPE, format_of(target), DTYPE)


def cells() -> Iterator[Cell]:
    """Yield all pairs, source by source."""
    for source in FORMATS:
        form = format_of(source)
        for text in form.ABOUT.specimens:
            layer = parse_layer(text)
            weight = layer.weight.stored_as(form.scale_type(DTYPE))
            layer = LayerScheme(weight, layer.input)
            for target in FORMATS:
                yield Cell(source, layer, target, conversion(layer, target)[0])
