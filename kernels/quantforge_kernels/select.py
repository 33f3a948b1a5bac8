"""Selection of the kernel for a product: the first one that accepts it, after a trial run.

The last kernel of the list accepts everything. The trial runs a kernel on zeros: compilers fail in ways that no
declaration foresees (a driver that is too old, too few registers, a missing library), and their exceptions become the
reason for a fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from quantforge_kernels import fallback, layers
from quantforge_kernels.attention import attend
from quantforge_kernels.cpu import packed_integers
from quantforge_kernels.gpu import plane_products, w8a8_products
from quantforge_kernels.grouped import (
    ExpertRouting,
    GroupedKernel,
    GroupedMatmulSpec,
    make_looped_kernel,
)
from quantforge_kernels.kv import PAGE_SIZE, EncodedKV
from quantforge_kernels.matmul_spec import Kernel, MatmulSpec, PackedWeight, has_triton
from quantforge_kernels.score_options import ScoreOptions

KERNELS: tuple[Kernel, ...] = (
    w8a8_products.KERNEL,
    plane_products.INT_KERNEL,
    plane_products.TABLE_KERNEL,
    plane_products.FLOAT8_KERNEL,
    packed_integers.INT8_KERNEL,
    packed_integers.KERNEL,
    fallback.KERNEL,
)
GROUPED_KERNELS: tuple[GroupedKernel, ...] = (
    *plane_products.GROUPED_KERNELS,
    *packed_integers.GROUPED_KERNELS,
)


def select_kernel(spec: MatmulSpec) -> Kernel:
    """Return the first kernel that accepts the specification."""
    return next(kernel for kernel in KERNELS if kernel.accepts(spec))


def select_grouped_kernel(spec: GroupedMatmulSpec) -> GroupedKernel:
    """Return the first grouped kernel that accepts the specification, else one that loops over the experts."""
    kernels = (kernel for kernel in GROUPED_KERNELS if kernel.accepts(spec))
    return next(kernels, None) or make_looped_kernel(select_kernel(spec.matrix_spec))


def find_kernel_failure(kernel: Kernel, packed: PackedWeight, spec: MatmulSpec) -> str | None:
    """Try the kernel on zeros; return its error as text, or None if it works. Out-of-memory errors are raised."""
    device = next(iter(packed.values())).device
    return _try_multiply(lambda x: kernel.matmul(x.to(device), packed, spec), spec, (1, 2))


def find_grouped_failure(
    kernel: GroupedKernel, packed: PackedWeight, spec: GroupedMatmulSpec
) -> str | None:
    """Try a grouped kernel on zeros; return its error as text, or None if it works."""
    device = next(iter(packed.values())).device

    def multiply(x: Tensor) -> object:
        experts = torch.zeros(len(x), 1, dtype=torch.int32, device=device)
        return kernel.matmul(x.to(device), ExpertRouting(experts, spec.num_matrices), packed, spec)

    return _try_multiply(multiply, spec.matrix_spec, (1, 2, 64 * spec.num_matrices))


def _try_multiply(
    multiply: Callable[[Tensor], object], spec: MatmulSpec, row_counts: tuple[int, ...]
) -> str | None:
    errors: tuple[type[Exception], ...] = (RuntimeError, OSError, *_triton_errors())
    try:
        for rows in row_counts:
            multiply(torch.zeros(rows, spec.in_features, dtype=spec.dtype))
    except torch.OutOfMemoryError:
        raise
    except errors as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return None


def warm_up(dtype: torch.dtype) -> None:
    """Run a small layer on the CPU, so that memory held by compilers exists before memory is measured."""
    spec = MatmulSpec(256, 256, 4, 128, True, dtype, "cpu")
    kernel = select_kernel(spec)
    codes, scales = torch.zeros(256, 256, dtype=torch.uint8), torch.ones(256, 2, dtype=dtype)
    find_kernel_failure(kernel, kernel.prepare(codes, {"scales": scales}, spec), spec)
    x = torch.zeros(2, 256, dtype=dtype)
    for residual in (x, None):
        layers.add_rms_norm(x, residual, x[0], 1e-5)
    layers.silu_gate(layers.linear(x, torch.zeros(256, 256, dtype=dtype)), x)
    query, angles = x.view(2, 4, 64), x[:, :32]
    pages = EncodedKV(torch.zeros(1, PAGE_SIZE, 1, 64, dtype=dtype))
    table, length = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    attend(
        layers.apply_rotary(query, angles, angles), pages, pages, table, length, ScoreOptions(1.0)
    )


def _triton_errors() -> tuple[type[Exception], ...]:
    """Return Triton's exception class, or nothing if Triton is not installed."""
    if not has_triton():
        return ()
    triton_error: type[Exception] = import_module("triton.errors").TritonError
    return (triton_error,)
