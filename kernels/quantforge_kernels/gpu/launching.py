"""The only place that launches a Triton kernel: on the device of its tensors.

Triton launches on the current device of the thread, which is the first GPU unless someone changed it. A kernel that
runs there and reads the memory of another GPU ends in an illegal memory access.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], first: Tensor, /, *arguments: object, **constants: object
) -> None:
    """Launch a kernel on the device of its first argument, a tensor; the other tensors are on the same device.

    Args:
        kernel: a function that `triton.jit` made.
        grid: how many programs there are, along each dimension.
        first: the first argument of the kernel.
        arguments: the other ones.
        constants: arguments that the kernel is compiled for, and Triton's options.
    """
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[grid](first, *arguments, **constants)
