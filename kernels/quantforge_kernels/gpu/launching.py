"""Launching of Triton kernels on the device of their tensors.

Triton launches on the thread's current device, which is the first GPU unless changed. A kernel that runs there but
reads the memory of another GPU fails with an illegal memory access; so all kernels are launched by `launch_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], first: Tensor, /, *arguments: object, **constants: object
) -> None:
    """Launch a kernel on the device of its first argument, a tensor; the other tensors must be on the same device.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: number of programs along each dimension.
        first: the first argument of the kernel.
        arguments: the other positional arguments.
        constants: compile-time constants (``tl.constexpr``), and Triton's options such as ``num_warps``.
    """
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[grid](first, *arguments, **constants)
