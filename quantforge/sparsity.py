"""Sparsity: which share of a weight is zero, and in which pattern. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantforge.errors import InputError

HINT = "a share of every row, e.g. 50%, or how many of neighbours stay, e.g. 2:4"
_LARGEST = 32  # neighbours of a pattern


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Zeros of every row of a weight.

    Attributes:
        share: of the row that is zero, at least rounded down.
        stay: of every ``run`` neighbouring columns, so many stay; 0 where only the row counts.
        run: see there.
    """

    share: float
    stay: int = 0
    run: int = 1

    def __str__(self) -> str:
        return f"{self.stay}:{self.run}" if self.stay else f"{self.share:.6g}"

    def zeros(self, columns: int) -> int:
        """Return how many of the first ``columns`` of a row are zero."""
        if self.stay:
            return columns // self.run * (self.run - self.stay)
        return int(self.share * columns + 1e-9)

    def fits(self, columns: int) -> bool:
        """Return whether rows of so many columns can have the pattern."""
        return columns % self.run == 0


def parse_sparsity(text: str) -> Sparsity:
    """Return what ``50%``, ``0.5`` or ``2:4`` say.

    Raises:
        InputError: the text says nothing like that.
    """
    pattern = re.fullmatch(r"(\d{1,2}):(\d{1,2})", text)
    if pattern:
        stay, run = int(pattern[1]), int(pattern[2])
        if 0 < stay < run <= _LARGEST:
            return Sparsity(1 - stay / run, stay, run)
        raise InputError(f"sparsity = {text!r}", HINT)
    return Sparsity(share_of(text, "sparsity", HINT))


def share_of(text: str, key: str, hint: str) -> float:
    """Return a share as it is typed, ``25%`` or ``0.25``; raise `InputError`, naming ``key``, where it is none."""
    try:
        share = float(text.removesuffix("%")) / (100 if "%" in text else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise InputError(f"{key} = {text!r}", hint)
    return share
