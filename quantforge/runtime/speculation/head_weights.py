"""Linears of draft heads: plain weights in the type of the model, quantized ones packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from quantforge.formats.sources.head_directory import HeadDirectory
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.linear import PackedLinear
from quantforge_kernels.layers import linear

Linear = Callable[[Tensor], Tensor]  # of activations [..., in_features]


def read_linear(
    heads: HeadDirectory, shape: tuple[int, int], names: Sequence[str], like: Tensor
) -> Linear:
    """Read a linear with a weight ``[out_features, in_features]``, and the bias beside it if there is one.

    Args:
        heads: the directory.
        shape: of the weight.
        names: of the module, the first that is there; without ``.weight``.
        like: has the type and the device of the activations.

    Raises:
        InputError: as `HeadDirectory.read`.
    """
    weight, bias = heads.weight(shape, *(f"{name}.weight" for name in names)), None
    biases = [f"{name}.bias" for name in names]
    if heads.find(*biases):
        bias = heads.read(shape[:1], *biases).to(like.device, like.dtype)
    if isinstance(weight, QuantizedTensor):
        return PackedLinear(weight, bias, like.dtype, like.device)
    return partial(linear, weight=weight.to(like.device, like.dtype), bias=bias)
