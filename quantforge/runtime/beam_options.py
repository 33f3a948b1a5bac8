"""Options of a beam search, which are checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantforge.errors import UsageError
from quantforge.runtime.sampling_options import Range

RANGES = {
    "beams": Range("a whole number from 1 to 64", 1, 64, whole=True),
    "length_penalty": Range("a number from -10 to 10 (above 0 favours long texts)", -10, 10),
}


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Rule of a beam search.

    Attributes:
        beams: how many continuations are kept; ``num_beams`` of transformers.
        length_penalty: exponent of the length by which a sum of log-probabilities is divided.
        early_stopping: when the search is over, see the module.

    Raises:
        UsageError: a value out of its range, see `RANGES`.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, values in RANGES.items():
            values.check(name, getattr(self, name))
        if not any(self.early_stopping is one for one in (False, True)) and (
            self.early_stopping != "never"
        ):
            raise UsageError(
                f"early_stopping = {self.early_stopping!a:.60}", "False, True, or never"
            )
