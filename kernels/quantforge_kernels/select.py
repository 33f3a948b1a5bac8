"""Selection of the kernel for a problem: the first one that accepts it, tried once before anything relies on it.

The last kernel of the list accepts everything. The trial runs a kernel on zeros: compilers fail in ways that no
declaration foresees (a driver too old for the code, a register file too small, a library that is missing), and what
they raise is turned into a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from quantforge_kernels import fallback, layers
from quantforge_kernels.attention import Scores, attend
from quantforge_kernels.cpu import packed_integers
from quantforge_kernels.gpu import eight_bit_products, plane_products
from quantforge_kernels.grouped import GroupedKernel, GroupedProblem, Owners, by_matrix
from quantforge_kernels.kv import PAGE, Store
from quantforge_kernels.problem import Kernel, Packed, Problem, has_triton

KERNELS: tuple[Kernel, ...] = (
    eight_bit_products.KERNEL,
    plane_products.INTEGERS,
    plane_products.TABLES,
    plane_products.FLOAT8,
    packed_integers.OF_OCTETS,
    packed_integers.KERNEL,
    fallback.KERNEL,
)
GROUPED: tuple[GroupedKernel, ...] = (*plane_products.GROUPED, *packed_integers.GROUPED)


def select(problem: Problem) -> Kernel:
    """Return the first kernel that accepts the problem."""
    return next(kernel for kernel in KERNELS if kernel.accepts(problem))


def select_grouped(problem: GroupedProblem) -> GroupedKernel:
    """Return the first kernel for grouped products that accepts; else products one after the other."""
    found = (kernel for kernel in GROUPED if kernel.accepts(problem))
    return next(found, None) or by_matrix(select(problem.each))


def failure(kernel: Kernel, packed: Packed, problem: Problem) -> str | None:
    """Return why the kernel cannot multiply, or None if it can; out of memory is not caught."""
    device = next(iter(packed.values())).device
    return _raised(lambda x: kernel.matmul(x.to(device), packed, problem), problem, (1, 2))


def grouped_failure(kernel: GroupedKernel, packed: Packed, problem: GroupedProblem) -> str | None:
    """Return likewise why a kernel for grouped products cannot multiply."""
    device = next(iter(packed.values())).device

    def multiply(x: Tensor) -> object:
        index = torch.zeros(len(x), 1, dtype=torch.int32, device=device)
        return kernel.matmul(x.to(device), Owners(index, problem.matrices), packed, problem)

    return _raised(multiply, problem.each, (1, 2, 64 * problem.matrices))


def _raised(
    multiply: Callable[[Tensor], object], problem: Problem, counts: tuple[int, ...]
) -> str | None:
    errors: tuple[type[Exception], ...] = (RuntimeError, OSError, *_errors())
    try:
        for rows in counts:
            multiply(torch.zeros(rows, problem.in_features, dtype=problem.dtype))
    except torch.OutOfMemoryError:
        raise
    except errors as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return None


def warm_up(dtype: torch.dtype) -> None:
    """Compute a small layer on the processor, so that what compilers hold is there before memory is measured."""
    problem = Problem(256, 256, 4, 128, True, dtype, "cpu")
    kernel = select(problem)
    codes, scales = torch.zeros(256, 256, dtype=torch.uint8), torch.ones(256, 2, dtype=dtype)
    failure(kernel, kernel.prepare(codes, {"scales": scales}, problem), problem)
    x = torch.zeros(2, 256, dtype=dtype)
    for residual in (x, None):
        layers.add_norm(x, residual, x[0], 1e-5)
    layers.silu_gate(layers.linear(x, torch.zeros(256, 256, dtype=dtype)), x)
    heads, angles = x.view(2, 4, 64), x[:, :32]
    page = Store(torch.zeros(1, PAGE, 1, 64, dtype=dtype))
    table, length = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    attend(layers.rotate(heads, angles, angles), page, page, table, length, Scores(1.0))


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors of Triton, where there is one."""
    if not has_triton():
        return ()
    found: type[Exception] = import_module("triton.errors").TritonError
    return (found,)
