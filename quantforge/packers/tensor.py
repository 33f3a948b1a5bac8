"""A quantized tensor: what every method makes and every format stores.

Codes are integers that are never derived again from floats. Parameters have exactly the type and value that a file
stores (a float16 scale is a float16 scale). So ``decode`` gives, bit for bit, what an engine computes from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.scheme import Activation, Scheme

OUTLIER_PARAMS = ("outlier_columns", "outlier_weight")
# Parameters of the quantized input, not of the weight's grid.
INPUT_PARAMS = ("input_scale", *OUTLIER_PARAMS)
MATRIX_PARAMS = ("divisor",)  # shared by all rows of a matrix, and possibly by other matrices


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """Codes, parameters and scheme of one weight matrix.

    Attributes:
        codes: ``[out_features, in_features]``, never packed: int8 in ``[-2^(b-1), 2^(b-1) - 1]`` for a symmetric
            integer grid, uint8 in ``[0, 2^b - 1]`` for an asymmetric one, float8 for 8-bit floats, otherwise uint8. If
            a code stands for a vector of weights, there is one code per vector.
        parameters: named as in the packer's `fit`, in their stored types. For an integer grid ``scales`` (and
            ``zeros``, uint8, if it is asymmetric), each of shape ``scheme.parameter_shape(shape)``.
        scheme: the scheme, with its scale type filled in.
        input: how the input of the layer is quantized; None: not at all. The scale of a static input is the parameter
            ``input_scale``, float32 ``[1, 1]``. The columns that LLM.int8() keeps in 16 bits are ``outlier_columns``,
            int32 ``[k]`` with -1 for unused entries, and ``outlier_weight``, float16 ``[out, k]``.
    """

    codes: Tensor
    parameters: Mapping[str, Tensor]
    scheme: Scheme
    input: Activation | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return ``(out_features, in_features)``."""
        weights_per_code = GRIDS[self.scheme.grid].weights_per_code
        return self.codes.shape[0], self.codes.shape[1] * weights_per_code

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize the weight, ``[out_features, in_features]``."""
        packer = import_module(GRIDS[self.scheme.grid].packer)  # it imports this module
        weight: Tensor = packer.decode(self.codes, self.parameters, self.scheme)
        if (columns := self.outlier_columns) is not None:
            outlier_weights = self.parameters["outlier_weight"][:, : len(columns)]
            weight[:, columns] = outlier_weights.to(weight.dtype)
        return weight.to(dtype)

    def to(self, device: torch.device) -> QuantizedTensor:
        """Return a copy with codes and parameters on ``device``."""
        parameters = {name: value.to(device) for name, value in self.parameters.items()}
        return replace(self, codes=self.codes.to(device), parameters=parameters)

    @property
    def outlier_columns(self) -> Tensor | None:
        """Return the columns that are kept in 16 bits, int64, in rising order; None if the scheme keeps none."""
        columns = self.parameters.get("outlier_columns")
        return None if columns is None else columns[columns >= 0].long()


@dataclass(frozen=True, slots=True)
class KernelInputs:
    """A quantized tensor as the matmul kernels take it; the conversion is exact.

    Attributes:
        grid: as in `quantforge_kernels.matmul_spec.MatmulSpec`.
        codes: uint8 starting from 0, or the bytes of floats.
        parameters: ``scales`` and, where needed, ``zeros``, ``mins``, ``table``, ``d`` and ``dmin``.
        superblock_size: columns that share one ``d`` if scales have two levels; 0: they have one level.
        lower_encoding: how the lower of two levels of scales is stored, see `MatmulSpec.lower_encoding`.
    """

    grid: str
    codes: Tensor
    parameters: dict[str, Tensor]
    superblock_size: int = 0
    lower_encoding: str = ""
