"""Costs of a method, for the forecasts of memory and time: records that its table holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MethodMemory:
    """Memory of a method at its worst moment, in float32 copies; changes only when the code of the method does.

    Attributes:
        matrices: of the largest matrix of a shared input; of a transform, which also runs a sub-block on captured
            inputs, of all of them; of a transform of the whole source, of a matrix whose strips are read.
        part: of the part of a matrix's rows that is worked on at a time.
        factorising: of the Hessian of a shared input, while it is factorised.
        factor: of the Hessian, afterwards.
        compiler: bytes that stay when loops for large matrices have been compiled: numba itself, and the loops.
    """

    matrices: float = 0.0
    part: float = 0.0
    factorising: float = 0.0
    factor: float = 0.0
    compiler: int = 0


@dataclass(frozen=True, slots=True)
class MethodWork:
    """Operations of a method beside the search of scales, in float32 products that take as long.

    Measured on one thread (docs/memory-and-cost.md); they change only when the code of the method does.

    Attributes:
        weights: for each weight.
        columns: for each weight and column of its matrix.
        sweep_columns: the same, of each sweep of a refinement.
        cubes: for each column of a shared input, cubed.
        tries: of a transform: factors that are tried on ``rows`` of each matrix.
        finalists: of these, how many are tried on all rows.
    """

    weights: float = 0.0
    columns: float = 0.0
    sweep_columns: float = 0.0
    cubes: float = 0.0
    tries: int = 0
    rows: int = 512
    finalists: int = 0
