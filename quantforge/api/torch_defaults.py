"""State of the program that calls a verb: results do not depend on torch's defaults, and a verb leaves them alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute with torch as it starts (float32, processor, gradients), and restore what the caller has set.

    A caller that has not imported torch has set nothing. The number of threads, too, is the caller's again afterwards.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch

    kind, device = torch.get_default_dtype(), torch.get_default_device()
    threads = torch.get_num_threads()
    moved = device.type != "cpu"
    torch.set_default_dtype(torch.float32)
    if moved:
        torch.set_default_device(None)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(kind)
        if moved:
            torch.set_default_device(device)
        torch.set_num_threads(threads)
