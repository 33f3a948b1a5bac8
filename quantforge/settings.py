"""How to run: choices without any influence on the result's bytes, and what a run tells on its way. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quantforge.errors import UsageError
from quantforge.events import Policy


@dataclass(frozen=True, slots=True)
class Progress:
    """One finished part: for a progress line and the run's log."""

    part: str
    done: int
    total: int
    seconds: float
    error: float | None  # mean relative error of its matrices, under the rounder's objective
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how a run happens; only ``device`` may move a rounding (GPUs sum in another order)."""

    device: str = "cpu"
    threads: int | None = None
    activations: str = "memory"
    offline: bool = False
    overwrite: bool = False
    policy: Policy = field(default_factory=Policy)
    progress: Callable[[Progress], None] = lambda _: None


def check_device(device: str) -> None:
    """Refuse a GPU that is not there.

    Raises:
        UsageError: with what is.
    """
    if device == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= int(device.partition(":")[2] or 0):
        raise UsageError(
            f"--device {device}: torch sees {count} CUDA devices here", "use --device cpu"
        )
