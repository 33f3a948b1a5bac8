"""Settings of a run: where and how it happens. Apart from ``imatrix`` and ``device`` they do not change the result."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.arguments import strict_fields
from quantforge.errors import UsageError, nearest_hint
from quantforge.events import Policy
from quantforge.files.hub import is_hub_name
from quantforge.plans import Plan, Serving

if TYPE_CHECKING:
    from quantforge.progress import Progress

MOST_WORKERS = 8
INPUT_BITS = (16, 8)
ACTIVATIONS = ("memory", "disk")  # where hidden states are stored


@strict_fields
@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of where and how a run happens.

    Only ``imatrix`` and ``device`` (GPUs sum in another order) can change a code of the result.
    """

    device: str = "cpu"
    threads: int | None = None
    activations: str = "memory"
    offline: bool = False
    overwrite: bool = False
    policy: Policy = field(default_factory=Policy)
    progress: Callable[[Progress], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None  # receives notes for the user before the work
    # Called before the work, and before a measurement
    announce: Callable[[Plan, Path], None] = lambda _plan, _out: None
    serving: Serving = field(default_factory=Serving)  # for the command that serves the result
    modelfile: bool = False  # also write a Modelfile for Ollama beside a GGUF file
    mmproj: bool = False  # also write the vision tower beside a GGUF file, as llama.cpp reads it
    provenance: bool = False  # also write an in-toto statement and a CycloneDX bill of materials
    join: bool = False  # share the work with other processes that run the same command
    sign: Path | None = None  # the private key that signs the result
    calibration: str = ""  # path of the recipe's calibration text; the recipe's own name if empty
    adapter: Path | None = None  # path of the recipe's adapter
    # Name of the original model on the hub, for the card; taken from the files if empty
    base_model: str = ""
    input_bits: int = 16  # activations of quantized products at run time: 16 or 8 bits
    split: bool = False  # split the model over the processes that torchrun has started
    # Importance file; recipes name it as the calibration source imatrix:NAME
    imatrix: Path | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise UsageError(f"threads = {self.threads!r}", "a number from 1 on, or None for all")
        check_threads(self.threads)
        if self.input_bits not in INPUT_BITS:
            raise UsageError(f"input_bits = {self.input_bits!r}", "16 or 8")
        if self.activations not in ACTIVATIONS:
            raise UsageError(
                f"activations = {self.activations!r}",
                nearest_hint(str(self.activations), ACTIVATIONS),
            )
        name = self.base_model
        if name and isinstance(name, str) and not is_hub_name(name):
            raise UsageError(f"--base-model {name}: is no name of the hub", "--base-model ORG/NAME")
        check_device_name(self.device)


def rounding_workers(settings: Settings) -> int:
    """Return how many strips of rows are rounded in parallel, which memory and disk speed limit."""
    if settings.device != "cpu":
        return 1
    environment_threads = os.environ.get("OMP_NUM_THREADS", "")
    return min(
        MOST_WORKERS,
        settings.threads
        or int(environment_threads if environment_threads.isdecimal() else 0)
        or usable_processors(),
    )


def check_threads(threads: int | None) -> int | None:
    """Return the number of threads, refusing more than can be useful (some thousands would crash the process).

    Raises:
        UsageError: with the largest accepted number.
    """
    max_threads = max(64, 2 * usable_processors())
    if threads is not None and threads > max_threads:
        raise UsageError(
            f"--threads {threads}: more than {max_threads}",
            f"this machine has {usable_processors()} processors",
        )
    return threads


def check_jobs(jobs: int) -> int:
    """Return the number of processes, refusing more than can be useful.

    Raises:
        UsageError: with the largest accepted number.
    """
    max_jobs = max(4, usable_processors())
    if jobs > max_jobs:
        raise UsageError(
            f"--jobs {jobs}: more than {max_jobs}",
            f"this machine has {usable_processors()} processors",
        )
    return jobs


def under_torchrun() -> bool:
    """Return whether torchrun has started this process; other launchers do not set this variable."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def usable_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Return the memory of this machine in bytes, None if the system does not report it."""
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    sysconf_names = getattr(os, "sysconf_names", {})
    return math.prod(map(os.sysconf, names)) if sysconf_names.keys() >= {*names} else None


def check_device_name(device: str) -> str:
    """Return the name of a device, refusing unsupported ones.

    Raises:
        UsageError: with the supported names.
    """
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", str(device)):
        raise UsageError(f"--device {device}: unknown", "cpu, cuda or cuda:N")
    return device


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        UsageError: with what it has; or as `check_device_name`.
    """
    if check_device_name(device) == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= int(device.partition(":")[2] or 0):
        raise UsageError(
            f"--device {device}: torch sees {count} CUDA devices here", "use --device cpu"
        )
