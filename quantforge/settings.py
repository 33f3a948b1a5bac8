"""Settings of a run: choices that (but for ``imatrix``) the result's bytes do not show, and what a run tells.

No torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.arguments import strict_fields
from quantforge.errors import UsageError, nearest
from quantforge.events import Policy
from quantforge.files.hub import is_hub_name
from quantforge.plans import Plan, Serving

if TYPE_CHECKING:
    from quantforge.execution.progress import Progress

MOST_WORKERS = 8
INPUT_BITS = (16, 8)
ACTIVATIONS = ("memory", "disk")  # where hidden states are kept


@strict_fields
@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of where and how a run happens.

    Only ``imatrix`` and ``device`` (GPUs sum in another order) may change a code.
    """

    device: str = "cpu"
    threads: int | None = None
    activations: str = "memory"
    offline: bool = False
    overwrite: bool = False
    policy: Policy = field(default_factory=Policy)
    progress: Callable[[Progress], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None  # what a person should know before the work
    announce: Callable[[Plan, Path], None] = lambda _plan, _out: (
        None
    )  # before the work, and before a measurement
    serving: Serving = field(default_factory=Serving)  # for the command that serves the result
    modelfile: bool = False  # also write a Modelfile for Ollama beside a GGUF file
    mmproj: bool = False  # also write the vision tower beside a GGUF file, as llama.cpp reads it
    provenance: bool = False  # also write an in-toto statement and a CycloneDX bill of materials
    join: bool = False  # share the work with processes that give the same command
    sign: Path | None = None  # the private key that signs the result
    calibration: str = ""  # where the text is that a recipe names; as the recipe says when empty
    adapter: Path | None = None  # where the adapter is that a recipe names
    base_model: str = (
        ""  # the original model's name on the hub, for the card; as the files say when empty
    )
    input_bits: int = 16  # to which products round activations when a model is run: 16 or 8
    split: bool = False  # the processes that torchrun started share the model that answers
    imatrix: Path | None = (
        None  # importance that is known; recipes name it as the source imatrix:NAME
    )

    def __post_init__(self) -> None:
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise UsageError(f"threads = {self.threads!r}", "a number from 1 on, or None for all")
        check_threads(self.threads)
        if self.input_bits not in INPUT_BITS:
            raise UsageError(f"input_bits = {self.input_bits!r}", "16 or 8")
        if self.activations not in ACTIVATIONS:
            raise UsageError(
                f"activations = {self.activations!r}", nearest(str(self.activations), ACTIVATIONS)
            )
        name = self.base_model
        if name and isinstance(name, str) and not is_hub_name(name):
            raise UsageError(f"--base-model {name}: is no name of the hub", "--base-model ORG/NAME")
        check_device_name(self.device)


def workers_of(settings: Settings) -> int:
    """Return how many strips of rows are rounded side by side: each takes memory, and the disk is a limit too."""
    if settings.device != "cpu":
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(
        MOST_WORKERS, settings.threads or int(asked if asked.isdecimal() else 0) or processors()
    )


def check_threads(threads: int | None) -> int | None:
    """Return a number of threads unless it is more than could be of use: some thousands end the process.

    Raises:
        UsageError: with the most that is accepted here.
    """
    most = max(64, 2 * processors())
    if threads is not None and threads > most:
        raise UsageError(
            f"--threads {threads}: more than {most}", f"this machine has {processors()} processors"
        )
    return threads


def check_jobs(jobs: int) -> int:
    """Return a number of processes unless it is more than could be of use.

    Raises:
        UsageError: with the most that is accepted here.
    """
    most = max(4, processors())
    if jobs > most:
        raise UsageError(
            f"--jobs {jobs}: more than {most}", f"this machine has {processors()} processors"
        )
    return jobs


def under_torchrun() -> bool:
    """Return whether this is one of the processes of torchrun; other launchers do not set this variable."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Return the bytes of memory of this machine, None where the system does not tell."""
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    known = getattr(os, "sysconf_names", {})
    return math.prod(map(os.sysconf, names)) if known.keys() >= {*names} else None


def check_device_name(device: str) -> str:
    """Return the name of a device unless it is none of those that are computed on.

    Raises:
        UsageError: with those that are.
    """
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", str(device)):
        raise UsageError(f"--device {device}: unknown", "cpu, cuda or cuda:N")
    return device


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        UsageError: with what is; as `check_device_name`.
    """
    if check_device_name(device) == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= int(device.partition(":")[2] or 0):
        raise UsageError(
            f"--device {device}: torch sees {count} CUDA devices here", "use --device cpu"
        )
