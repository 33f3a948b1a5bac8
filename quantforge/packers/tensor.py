"""The one thing that every method makes and every format stores: a quantized tensor.

Codes are integers, never re-derived from floats; parameters are exactly what a file stores (a float16 scale is a
float16 scale), so that ``decode`` gives bit for bit what an engine computes from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.scheme import Activation, Scheme

OUTLIERS = ("outlier_columns", "outlier_weight")
OF_INPUT = ("input_scale", *OUTLIERS)  # parameters that go with the input, not with the grid
OF_MATRIX = ("divisor",)  # what all rows share, and maybe other matrices


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """Codes, parameters and scheme of one weight matrix.

    Attributes:
        codes: ``[out_features, in_features]``; int8 in ``[-2^(b-1), 2^(b-1) - 1]`` for a symmetric integer grid,
            uint8 in ``[0, 2^b - 1]`` for an asymmetric one, float8 for floats of 8 bits, else uint8. Never packed. Of
            code vectors one for each vector.
        parameters: as the packer's `fit` names them, in the type that is stored; of an integer grid ``scales`` (and
            ``zeros``, uint8, where it is asymmetric), each ``scheme.parameter_shape(shape)``.
        scheme: with its scale type filled in.
        input: how the activation is quantized that it is multiplied with; a static one has its range in the
            parameter ``input_scale``, float32 ``[1, 1]``. Columns that LLM.int8() keeps in 16 bits are
            ``outlier_columns``, int32 ``[k]``, -1 where there is none, and ``outlier_weight``, float16 ``[out, k]``.
    """

    codes: Tensor
    parameters: Mapping[str, Tensor]
    scheme: Scheme
    input: Activation | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return ``(out_features, in_features)``."""
        width = GRIDS[self.scheme.grid].weights_per_code
        return self.codes.shape[0], self.codes.shape[1] * width

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ``[out_features, in_features]`` that the codes stand for."""
        from quantforge.packers import packer_of

        weight = packer_of(self.scheme).decode(self.codes, self.parameters, self.scheme)
        if (columns := self.outlier_columns) is not None:
            kept = self.parameters["outlier_weight"][:, : len(columns)]
            weight[:, columns] = kept.to(weight.dtype)
        return weight.to(dtype)

    def to(self, device: torch.device) -> QuantizedTensor:
        """Return it with codes and parameters on a device."""
        parameters = {name: value.to(device) for name, value in self.parameters.items()}
        return replace(self, codes=self.codes.to(device), parameters=parameters)

    @property
    def outlier_columns(self) -> Tensor | None:
        """Return the columns that are kept in 16 bits, int64, rising; None where the scheme keeps none."""
        columns = self.parameters.get("outlier_columns")
        return None if columns is None else columns[columns >= 0].long()


@dataclass(frozen=True, slots=True)
class KernelTerms:
    """A tensor in the terms of the kernels: nothing of it is rounded on the way.

    Attributes:
        grid: of `quantforge_kernels.matmul_spec.MatmulSpec`.
        codes: uint8 from 0, or the bytes of floats.
        parameters: ``scales``, and where they are needed ``zeros``, ``mins``, ``table``, ``d`` and ``dmin``.
        superblock: columns under one ``d``, where a group's scale is in two levels; 0: there is one level.
        lower: how the lower of two levels is held, see `MatmulSpec.lower_encoding`.
    """

    grid: str
    codes: Tensor
    parameters: dict[str, Tensor]
    superblock: int = 0
    lower: str = ""
