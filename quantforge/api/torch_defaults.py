"""Isolate API calls from the caller's torch defaults (dtype, device, gradients, threads)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Run the body with torch's initial defaults (float32, CPU, gradients), then restore the caller's.

    Without an imported torch there is nothing to restore. The number of threads is restored as well.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch

    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    threads = torch.get_num_threads()
    device_changed = device.type != "cpu"
    torch.set_default_dtype(torch.float32)
    if device_changed:
        torch.set_default_device(None)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        if device_changed:
            torch.set_default_device(device)
        torch.set_num_threads(threads)
