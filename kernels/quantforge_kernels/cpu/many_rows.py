"""Products of many rows on a processor, in a type that it has arithmetic for.

torch hands products in bfloat16 and float16 to oneDNN where the processor has AVX-512, whatever its
instructions; elsewhere they fall to loops of its own, which compute at 1 to 15 GF/s, by layout. float32
is fast everywhere. So a product in 16 bits is torch's where the processor multiplies that very type, and
is computed in float32 and rounded elsewhere: not slower with AVX-512 without such instructions, and forty
times as fast without AVX-512. What is chosen depends on the processor and the shape, never on a clock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from quantforge_kernels.cpu.features import without_avx512

SHORT_BLOCK = 16  # columns
SLAB_WEIGHTS = 1 << 20  # widened at a time: they stay in a cache
# What a processor must have, by torch's names, for oneDNN to multiply a type in its own instructions: vectors, tiles.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
# Limits of oneDNN that leave them in.
_ENOUGH = ("ALL", "DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")


def computes(x: Tensor) -> bool:
    """Return whether torch multiplies tensors of this type fast on this device, so that nothing need be widened."""
    return x.device.type != "cpu" or x.dtype not in _INSTRUCTIONS or _native(x.dtype)


def kind(x: Tensor) -> torch.dtype:
    """Return the type in which products of many rows of ``x`` are computed."""
    return x.dtype if computes(x) else torch.float32


def most_packed(dtype: torch.dtype, block: int, bits: int = 16) -> int:
    """Return how many rows are multiplied from packed weights in blocks of so many columns, where torch may as well.

    Its product of decoded weights is faster for more. In tiles (AMX), instead of vectors, it may be for fewer; of
    activations in 8 bits, products from packed weights are always faster than those in vectors.
    """
    there: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    tiles = dtype in _INSTRUCTIONS and there.get(_INSTRUCTIONS[dtype][1])
    if bits < 16 and not tiles:
        return sys.maxsize
    return 64 if tiles or block <= SHORT_BLOCK else 128


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in the type of ``a``."""
    return (a.to(kind(a)) @ b.to(kind(a))).to(a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x weight^T + bias`` of rows ``[rows, in]``; 16-bit weights are widened a slab at a time."""
    if computes(x):
        return functional.linear(x, weight, bias)
    wide, out = x.float(), x.new_empty(len(x), len(weight))
    step = max(1, SLAB_WEIGHTS // max(1, x.shape[1]))
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        more = None if bias is None else bias[part].float()
        out[:, part] = functional.linear(wide, weight[part].float(), more)
    return out


def widening(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return a context in which layers of transformers compute their products as `linear` and `matmul` do."""
    return nullcontext() if dtype not in _INSTRUCTIONS or _native(dtype) else _RowsMode()


class _RowsMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _PRODUCTS or any(computes(x) for x in args if isinstance(x, Tensor)):
            return func(*args, **(kwargs or {}))
        if func is functional.linear and args[0].dim() > 1:
            x, weight, *bias = args
            more = bias[0] if bias else (kwargs or {}).get("bias")
            return linear(x.flatten(0, -2), weight, more).view(*x.shape[:-1], len(weight))
        wide = [x.float() if isinstance(x, Tensor) else x for x in args]
        return func(*wide, **(kwargs or {})).to(args[0].dtype)


_PRODUCTS = frozenset(
    {
        functional.linear,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.Tensor.matmul,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.__matmul__,
    }
)


@cache
def _native(dtype: torch.dtype) -> bool:
    """Return whether this processor, as far as it may be used, has instructions for a 16-bit type."""
    there: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    limited = (os.environ.get("ONEDNN_MAX_CPU_ISA") or "ALL").upper()
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and limited.startswith(_ENOUGH)
        and not without_avx512()
        and any(there.get(name) for name in _INSTRUCTIONS[dtype])
    )
