"""Products with the weights of draft heads: plain ones in the type of the model, quantized ones packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from quantforge.formats.sources.head_directory import HeadDirectory
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.linear import PackedLinear
from quantforge_kernels.layers import linear

Product = Callable[[Tensor], Tensor]  # of activations [..., in_features]


def read_product(
    found: HeadDirectory,
    shape: tuple[int, int],
    names: Sequence[str],
    biases: Sequence[str],
    like: Tensor,
) -> Product:
    """Read a weight ``[out_features, in_features]``, and return what multiplies by it.

    Args:
        found: the directory.
        shape: of the weight.
        names: that the weight may have.
        biases: names that a bias may have; without a tensor of one there is none.
        like: of the type and on the device in which is computed.

    Raises:
        InputError: as `HeadDirectory.read`.
    """
    weight = found.weight(shape, *names)
    bias = None
    if found.find(*biases):
        bias = found.read(shape[:1], *biases).to(like.device, like.dtype)
    if isinstance(weight, QuantizedTensor):
        return PackedLinear(weight, bias, like.dtype, like.device)
    return partial(linear, weight=weight.to(like.device, like.dtype), bias=bias)
