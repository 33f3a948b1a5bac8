"""Modules in the tables of formats, grids and methods have their interface: mypy compares the signatures in this file.

The tables hold names of modules, so that nothing is imported before it is needed, and mypy cannot follow names.
"""

from __future__ import annotations

from quantforge.formats import (
    FORMATS,
    Format,
    awq,
    bnb,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    gptq_v2,
    mlx,
    plain,
)
from quantforge.grids import GRIDS
from quantforge.packers import Packer, VectorPacker, fp4, integer, nf4
from quantforge.packers import fp8 as fp8_grids
from quantforge.packers.ggml import packer as ggml
from quantforge.packers.lattices import packer as lattices
from quantforge.quantizers import METHODS, MethodKind, Rounder, Transform, rtn, smooth
from quantforge.quantizers import awq as awq_transform
from quantforge.quantizers.gptq import gptq as gptq_rounder

FORMAT_MODULES: tuple[Format, ...] = (
    plain, compressed_tensors, gptq, gptq_v2, awq, bnb, fp8, mlx, gguf,
)  # fmt: skip
PACKERS: tuple[Packer, ...] = (integer, nf4, fp8_grids, fp4, ggml)
VECTOR_PACKERS: tuple[VectorPacker, ...] = (lattices,)
ROUNDERS: tuple[Rounder, ...] = (rtn, gptq_rounder)
TRANSFORMS: tuple[Transform, ...] = (awq_transform, smooth)


def names(*modules: object) -> set[str]:
    """Return the names of modules."""
    return {vars(module)["__name__"] for module in modules}


def methods(kind: MethodKind) -> set[str]:
    """Return the names of the modules of all methods of a kind."""
    return {method.module for method in METHODS.values() if method.kind is kind}


def test_every_module_of_the_tables_is_compared() -> None:
    assert names(*FORMAT_MODULES) == set(FORMATS.values())
    assert names(*PACKERS, *VECTOR_PACKERS) == {grid.packer for grid in GRIDS.values()}
    vector_grids = {grid.packer for grid in GRIDS.values() if grid.weights_per_code > 1}
    assert names(*VECTOR_PACKERS) == vector_grids
    assert names(*ROUNDERS) == methods(MethodKind.ROUNDER)
    assert names(*TRANSFORMS) == methods(MethodKind.TRANSFORM)
