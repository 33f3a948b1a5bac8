"""The processes that torchrun started, as those that share a model: what they sum goes through torch.distributed."""

from __future__ import annotations

import atexit
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from quantforge.errors import UsageError
from quantforge.runtime.weight_cuts import Share


def share_of_process(device: str) -> Share | None:
    """Return the share of this process; None: it is the only one.

    Args:
        device: where it computes: processors speak gloo, GPUs NCCL.

    Raises:
        UsageError: torchrun (or whoever else describes the processes in the environment) did not start it.
    """
    if not dist.is_initialized():
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group("gloo" if device == "cpu" else "nccl")
        except ValueError as error:
            raise UsageError(
                f"a model over several processes: {error}",
                "torchrun --nproc-per-node N -m quantforge generate MODEL PROMPT",
            ) from error
        atexit.register(dist.destroy_process_group)  # its threads, left to the end, may abort it
    if dist.get_world_size() == 1:
        return None
    return Share(dist.get_rank(), dist.get_world_size(), _total)


def _total(part: Tensor) -> Tensor:
    """Return the sum of all processes' parts in the order of their ranks, so that its bits are the same everywhere."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return reduce(torch.add, (one.float() for one in parts)).to(part.dtype)
