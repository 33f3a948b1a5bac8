"""Granite 3 mixtures with a shared expert, whose gate and up are one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Absorber, Absorbs, SharedInput, granitemoe
from quantforge.architectures.declare import Mixer, layer, linear
from quantforge.errors import InputError

GATE_UP, DOWN = "shared_mlp.input_linear", "shared_mlp.output_linear"
SHARED = Mixer(
    (*linear(GATE_UP, "2*shared", "hidden"), *linear(DOWN, "hidden", "shared")),
    (
        SharedInput((GATE_UP,), "shared_mlp"),
        SharedInput((DOWN,), DOWN, Absorber(Absorbs.ROWS, GATE_UP, "up")),
    ),
    inner_copies=4,
)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: all of them have a shared expert, or none."""
    sharing = bool(config["shared_intermediate_size"])
    return ["sharing" if sharing else "experts"] * config["num_hidden_layers"]


def width(config: Mapping[str, Any]) -> int:
    """Return the width of the shared expert; 1 where there is none.

    Raises:
        InputError: it is no size.
    """
    size = config["shared_intermediate_size"]
    if type(size) is not int or size < 0:
        raise InputError(f"config.json: shared_intermediate_size = {str(size)[:40]!r}", "a size")
    return size or 1


ARCHITECTURE = replace(
    granitemoe.ARCHITECTURE,
    model_type="granitemoeshared",
    kinds=(
        layer(*granitemoe.PARTS, name="experts"),
        layer(*granitemoe.PARTS, SHARED, name="sharing"),
    ),
    kind_of=kinds,
    gguf=None,  # its gate and up are one matrix, and two in such a file
    slices={GATE_UP: ("shared", "shared")},
    slice_labels={GATE_UP: ("gate", "up")},
    sizes={
        **granitemoe.ARCHITECTURE.sizes,
        "shared": width,
    },
    defaults={**granitemoe.ARCHITECTURE.defaults, "shared_intermediate_size": 0},
)
