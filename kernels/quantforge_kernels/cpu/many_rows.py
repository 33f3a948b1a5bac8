"""Products of many rows on a CPU, computed in a type for which the CPU has instructions.

torch uses oneDNN for bfloat16 and float16 products if the CPU has AVX-512 of any kind;
without it, torch's own loops reach 1 to 15 GF/s, depending on the layout. float32
is always fast. Therefore torch computes a product in 16 bits if the CPU has instructions for that type, and otherwise
it is computed in float32 and rounded: as fast on a CPU with AVX-512 but without such instructions, and forty
times as fast on a CPU without AVX-512. The choice depends on the CPU and the shape, never on timing.
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

from quantforge_kernels.cpu.instruction_sets import avx512_disallowed

SHORT_BLOCK_COLUMNS = 16  # columns
SLAB_WEIGHTS = 1 << 20  # widened at a time: they stay in a cache
# What a processor must have, by torch's names, for oneDNN to multiply a type in its own instructions: vectors, tiles.
_NATIVE_FEATURES = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
# Limits of oneDNN that leave them in.
_SUFFICIENT_ISA_LIMITS = (
    "ALL",
    "DEFAULT",
    "AVX512_CORE_BF16",
    "AVX512_CORE_FP16",
    "AVX512_CORE_AMX",
    "AVX10",
)


def torch_is_fast(x: Tensor) -> bool:
    """Return whether torch is fast with this type on this device, so that widening to float32 is not needed."""
    return (
        x.device.type != "cpu" or x.dtype not in _NATIVE_FEATURES or _has_native_arithmetic(x.dtype)
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which products of many rows of ``x`` are computed."""
    return x.dtype if torch_is_fast(x) else torch.float32


def max_packed_rows(dtype: torch.dtype, block_columns: int, bits: int = 16) -> int:
    """Return up to how many rows a product from packed weights is faster than decoding the weight for torch.

    Args:
        dtype: type of the activations.
        block_columns: columns of a block of the packed layout; short blocks are slower.
        bits: bits of rounded activations. With 8, the packed product is always faster unless the CPU has AMX.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_amx = dtype in _NATIVE_FEATURES and capabilities.get(_NATIVE_FEATURES[dtype][1])
    if bits < 16 and not has_amx:
        return sys.maxsize
    return 64 if has_amx or block_columns <= SHORT_BLOCK_COLUMNS else 128


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in the type of ``a``."""
    return (a.to(compute_dtype(a)) @ b.to(compute_dtype(a))).to(a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x weight^T + bias`` for rows ``[rows, in]``; 16-bit weights are widened one slab at a time."""
    if torch_is_fast(x):
        return functional.linear(x, weight, bias)
    widened, out = x.float(), x.new_empty(len(x), len(weight))
    step = max(1, SLAB_WEIGHTS // max(1, x.shape[1]))
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        bias_slab = None if bias is None else bias[rows].float()
        out[:, rows] = functional.linear(widened, weight[rows].float(), bias_slab)
    return out


def widen_products(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return a context in which torch's products of 16-bit tensors are computed as `linear` and `matmul` do."""
    return (
        nullcontext()
        if dtype not in _NATIVE_FEATURES or _has_native_arithmetic(dtype)
        else _WideningMode()
    )


class _WideningMode(TorchFunctionMode):
    """Torch function mode that computes products in float32 and rounds the results."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _PRODUCT_FUNCTIONS or any(
            torch_is_fast(x) for x in args if isinstance(x, Tensor)
        ):
            return func(*args, **(kwargs or {}))
        if func is functional.linear and args[0].dim() > 1:
            x, weight, *bias = args
            bias_slab = bias[0] if bias else (kwargs or {}).get("bias")
            return linear(x.flatten(0, -2), weight, bias_slab).view(*x.shape[:-1], len(weight))
        widened = [x.float() if isinstance(x, Tensor) else x for x in args]
        return func(*widened, **(kwargs or {})).to(args[0].dtype)


_PRODUCT_FUNCTIONS = frozenset(
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
def _has_native_arithmetic(dtype: torch.dtype) -> bool:
    """Return whether this CPU has usable instructions for a 16-bit type."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    isa_limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or "ALL").upper()
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and isa_limit.startswith(_SUFFICIENT_ISA_LIMITS)
        and not avx512_disallowed()
        and any(capabilities.get(name) for name in _NATIVE_FEATURES[dtype])
    )
