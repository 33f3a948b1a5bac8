"""The matrix of conversions: what becomes of each kind of numbers that a format holds in every other format.

It is computed from the same functions that an export runs, for a matrix of `SHAPE` in a bfloat16 model: nothing here is
stated twice. ``read`` means that the headers do not settle it and the scales and zero points do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from quantforge.formats import FORMATS, Fit, Verdict, format_of
from quantforge.formats.convert import express_layer
from quantforge.notation import parse_layer
from quantforge.scheme import LayerScheme

SHAPE = (512, 512)
DTYPE = "BF16"
PLAIN = "plain"
# What each format is read with, as its files spell it.
SPECIMENS: Mapping[str, tuple[str, ...]] = {
    "compressed-tensors": (
        "int4:g128:sym:bf16", "int4:g128:asym:bf16", "int8:row:sym:bf16", "W8A8", "fp8:row", "fp8:tensor",
        "FP8_BLOCK", "nvfp4", "mxfp4", "mxfp8",
    ),
    "gptq": ("int4:g128:sym:f16", "int4:g128:asym:f16", "int8:g128:sym:f16"),
    "gptq_v2": ("int4:g128:asym:f16",),
    "awq": ("int4:g128:sym:f16", "int4:g128:asym:f16"),
    "bnb": ("nf4:g64:sym:f32", "nf4:g64:sym:double", "fp4:g64:sym:f32", "int8:row:sym:f32+int8:token:dynamic:6"),
    "fp8": ("FP8_BLOCK",),
    "mlx": ("int4:g64:min:bf16", "int8:g64:min:bf16", "mxfp4", "mxfp8"),
    "gguf": ("q4_0", "q8_0", "q4_k", "mxfp4"),
}  # fmt: skip


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
    def word(self) -> str:
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
    for source, texts in SPECIMENS.items():
        form = format_of(source)
        for text in texts:
            layer = parse_layer(text)
            weight = layer.weight.stored_as(form.scale_type(DTYPE))
            layer = LayerScheme(weight, layer.input)
            for target in FORMATS:
                yield Cell(source, layer, target, conversion(layer, target)[0])
